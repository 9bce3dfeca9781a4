# SPDX-License-Identifier: Apache-2.0
"""An aggregator as the interpreter of plans (reference.py) sees it: it stores leaves, and may fail for any rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from sennit.transport.plans.arithmetic import fold
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.plan import AGGREGATOR, MISSING_SLOT, Branch, Plan, Recv, Step

Bytes = npt.NDArray[np.uint8]


class StoredLeaves:
    """The leaves of one operation of `world` ranks. The ranks `without` get no sum, and say so."""

    def __init__(self, plans: Iterable[Plan], without: Collection[int]) -> None:
        plans = list(plans)
        self._world = len(plans)
        self._dtype = Dtype(plans[0].signature >> 48 & 0xFF) if plans else Dtype.F32
        self._given_up = set(without)
        self._missing = dict.fromkeys(range(self._world), 0)
        self._left = [sum(map(is_sum, plan.steps)) for plan in plans]
        self._leaves: dict[int, dict[int, Bytes]] = defaultdict(dict)

    def store(self, rank: int, slot: int, leaf: Bytes) -> None:
        if rank not in self._given_up:
            self._leaves[slot][rank] = leaf.copy()

    def hear(self, rank: int, missing: int) -> None:
        """The rank hears how many sums another one lacks."""
        if missing:
            self._given_up.add(rank)

    def may_answer(self, rank: int, slot: int, *, has_sent: bool) -> bool:
        if slot == MISSING_SLOT:
            return not self._left[rank]
        return has_sent and (rank in self._given_up or len(self._leaves[slot]) == self._world)

    def answer(self, rank: int, slot: int, place: Bytes) -> None:
        if slot == MISSING_SLOT:
            place[:] = np.array([self._missing[rank]], np.uint32).view(np.uint8)
            return
        self._left[rank] -= 1
        leaves = self._leaves[slot]
        if rank in self._given_up or len(leaves) != self._world:
            self._missing[rank] += 1
            return
        place[:] = fold([leaves[each] for each in range(self._world)], self._dtype, ReduceOp.SUM)


def is_sum(step: Step) -> bool:
    """Whether a step receives a sum from the aggregator."""
    return isinstance(step, Recv) and step.peer == AGGREGATOR and step.slot != MISSING_SLOT


def left_out(plan: Plan) -> int:
    """How many steps wait for the plan's branch."""
    waiting: set[int] = set()
    for number, step in enumerate(plan.steps):
        # A step waits only for earlier ones.
        if any(earlier in waiting or isinstance(plan.steps[earlier], Branch) for earlier in step.after):
            waiting.add(number)
    return len(waiting)
