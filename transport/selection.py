# SPDX-License-Identifier: Apache-2.0
"""Which algorithm a reduction runs: a cost model, or the one that `SENNIT_ALGORITHM` names.

All algorithms compute the same tree (tree.py), so a choice never changes a bit of a result. It depends on the call and
the group alone. So all ranks make the same one.

The model adds up what the busiest rank does (LogGP: Alexandrov, Ionescu, Schauser and Scheiman, 1995), and one term
for many peers at once. Its constants were fitted to runs of 4, 6 and 8 ranks (docs/lab/collectives.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sennit.transport import algorithms
from sennit.transport.algorithms.ranges import DEFAULT_CHUNK_BYTES
from sennit.transport.config import Algorithm
from sennit.transport.elements import Dtype, ReduceOp, accumulator
from sennit.transport.plan import MAX_LOAN_BYTES, Plan

# Those whose plans can be on device (device_plan.py).
ON_DEVICE: Final = (Algorithm.ONE_SHOT, Algorithm.DIRECT)


class Reduction(StrEnum):
    """The collectives that have several algorithms."""

    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce_scatter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds that the parts of a collective take, for one way between ranks."""

    round_s: float
    """From the send of a small message until its receiver can go on."""
    message_s: float
    """Processor time of a message on one rank, at both ends together."""
    byte_s: float
    """Of each byte that a rank sends."""
    peer_share: float
    """By what share each further peer, up to PEERS_MAX, makes a byte dearer: more acknowledgements, shorter bursts."""
    fold_byte_s: float
    """Of each byte that a reduction reads."""


# With more peers the dearer bytes were not measured.
PEERS_MAX: Final = 8
SHARED_MEMORY: Final = Costs(round_s=2.5e-6, message_s=0.8e-6, byte_s=0.05e-9, peer_share=0, fold_byte_s=0.08e-9)
NETWORK: Final = Costs(round_s=8e-6, message_s=5e-6, byte_s=1e-9, peer_share=0.1, fold_byte_s=0.08e-9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What the busiest rank does in one collective."""

    rounds: int
    """Messages that wait for one another."""
    messages: int
    """That it sends."""
    peers: int
    """That it sends to."""
    sent_bytes: float
    folded_bytes: float

    def seconds(self, costs: Costs) -> float:
        byte_s = costs.byte_s * (1 + costs.peer_share * (min(self.peers, PEERS_MAX) - 1))
        network_s = self.rounds * costs.round_s + self.messages * costs.message_s + self.sent_bytes * byte_s
        return network_s + self.folded_bytes * costs.fold_byte_s


def work_of(
    algorithm: Algorithm, reduction: Reduction, *, world: int, size_bytes: int, partial_ratio: float = 1
) -> Work | None:
    """Returns the work for a vector of `size_bytes`, or None if the algorithm does not run there.

    A partial sum has `partial_ratio` times the bytes of its elements.
    """
    peers, levels = world - 1, (world - 1).bit_length()
    gathers = reduction is Reduction.ALLREDUCE
    phases = 2 if gathers else 1
    # A rank keeps its own share.
    others_bytes = size_bytes * peers / world
    match algorithm:
        case Algorithm.DIRECT:
            return Work(
                rounds=phases,
                messages=phases * peers * _pieces(size_bytes / world, DEFAULT_CHUNK_BYTES),
                peers=peers,
                sent_bytes=phases * others_bytes,
                folded_bytes=size_bytes,
            )
        case Algorithm.HALVING:
            if world < 2:
                return None
            # The first round sends elements, the others partial sums.
            first_bytes = size_bytes / 2
            reduced_bytes = first_bytes + (others_bytes - first_bytes) * partial_ratio
            # Where the world is no power of two, some rank passes on results for another.
            gathered_bytes = others_bytes if world == 1 << levels else size_bytes
            chunk_bytes = DEFAULT_CHUNK_BYTES / partial_ratio
            if gathers:
                messages = 2 * sum(_pieces(size_bytes / 2 ** (level + 1), chunk_bytes) for level in range(levels))
            else:
                # What a rank passes on in a round lies apart.
                messages = peers * _pieces(size_bytes / world, chunk_bytes)
            return Work(
                rounds=phases * levels,
                messages=messages,
                peers=levels,
                sent_bytes=reduced_bytes + (gathered_bytes if gathers else 0),
                # Partial sums are written to memory and read again.
                folded_bytes=3 * size_bytes,
            )
        case Algorithm.ONE_SHOT | Algorithm.DISSEMINATION:
            if not gathers or world < 2 or size_bytes > MAX_LOAN_BYTES:
                return None
            rounds, messages = (1, peers) if algorithm is Algorithm.ONE_SHOT else (levels, levels)
            return Work(
                rounds=rounds,
                messages=messages,
                peers=messages,
                sent_bytes=size_bytes * peers,
                folded_bytes=size_bytes * world,
            )


def _pieces(size_bytes: float, piece_bytes: float) -> int:
    """Of a range. An empty one is sent, too."""
    return max(1, math.ceil(size_bytes / piece_bytes))


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Compiles the reductions of a group, each by the algorithm that fits it."""

    costs: Costs
    forced: Algorithm | None = None
    """Runs wherever it can. Elsewhere the direct algorithm runs."""

    def rate(
        self,
        reduction: Reduction,
        *,
        world: int,
        size_bytes: int,
        partial_ratio: float = 1,
        on_device: bool = False,
    ) -> dict[Algorithm, Work]:
        """Returns the work of each algorithm that runs for this vector, in their order."""
        rated = {}
        for algorithm in ON_DEVICE if on_device else Algorithm:
            work = work_of(algorithm, reduction, world=world, size_bytes=size_bytes, partial_ratio=partial_ratio)
            if work is not None:
                rated[algorithm] = work
        return rated

    def choose(self, rated: Mapping[Algorithm, Work]) -> Algorithm:
        """Returns the one to run."""
        if self.forced is not None:
            return self.forced if self.forced in rated else Algorithm.DIRECT
        return min(rated, key=lambda algorithm: rated[algorithm].seconds(self.costs))

    def allreduce(
        self,
        *,
        world: int,
        rank: int,
        elements: int,
        dtype: Dtype,
        op: ReduceOp,
        in_place: bool = True,
        on_device: bool = False,
    ) -> Plan:
        """Returns a plan with the buffers and the result of `algorithms.allreduce`."""
        compile_plan: Callable[..., Plan]
        match self._choose(Reduction.ALLREDUCE, world, elements, dtype, on_device):
            case Algorithm.DIRECT:
                compile_plan = algorithms.allreduce
            case Algorithm.ONE_SHOT:
                compile_plan = functools.partial(algorithms.allreduce, one_shot=True)
            case Algorithm.DISSEMINATION:
                compile_plan = algorithms.allreduce_dissemination
            case Algorithm.HALVING:
                compile_plan = algorithms.allreduce_halving
        return compile_plan(world=world, rank=rank, elements=elements, dtype=dtype, op=op, in_place=in_place)

    def reduce_scatter(
        self,
        *,
        world: int,
        rank: int,
        counts: Sequence[int],
        dtype: Dtype,
        op: ReduceOp,
        list_input: bool = False,
        on_device: bool = False,
    ) -> Plan:
        """Returns a plan with the buffers and the result of `algorithms.reduce_scatter`."""
        algorithm = self._choose(Reduction.REDUCE_SCATTER, world, sum(counts), dtype, on_device)
        halves = algorithm is Algorithm.HALVING
        compile_plan: Callable[..., Plan] = algorithms.reduce_scatter_halving if halves else algorithms.reduce_scatter
        return compile_plan(world=world, rank=rank, counts=counts, dtype=dtype, op=op, list_input=list_input)

    def _choose(self, reduction: Reduction, world: int, elements: int, dtype: Dtype, on_device: bool) -> Algorithm:
        # The algorithms say what is wrong with arguments like these.
        if world < 1 or elements < 0:
            return Algorithm.DIRECT
        rated = self.rate(
            reduction,
            world=world,
            size_bytes=elements * dtype.item_bytes,
            partial_ratio=accumulator(dtype).item_bytes / dtype.item_bytes,
            on_device=on_device,
        )
        return self.choose(rated)
