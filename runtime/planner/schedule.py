# SPDX-License-Identifier: Apache-2.0
"""What of a step hides behind what: the longest of its threads, its processor and its network decides.

The model, its optimizer and the AllReduce of its gradients are one thread. Input and ids of the next batch are another,
if batches are sent ahead. Lookups, updates and their exchanges are a third, if they run beside the model
(`sennit.runtime.pipeline`): from the gradients of a batch on they have time until the model needs the next vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import numpy as np

PHASES: Final = (
    "input",
    "id exchange",
    "wait for rows",
    "lookup",
    "pooled exchange",
    "dense",
    "gradient exchange",
    "update",
    "replicas",
    "AllReduce",
)
# Phases of the next batch, if batches are sent ahead.
AHEAD: Final = ("input", "id exchange")
# Phases of the thread for tables.
VECTORS, GRADIENTS = ("lookup", "pooled exchange"), ("gradient exchange", "update", "replicas")
# The forward pass's share of a pass forward and backward.
FORWARD: Final = 1 / 3


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of something on the slowest rank, each [...]."""

    busy: Any = 0.0
    """Seconds that a processor works."""
    waited: Any = 0.0
    """Seconds that the network takes while the processor is free."""
    link: Any = 0.0
    """The part of `waited` in which bytes leave or arrive: two cannot do so at once."""

    @property
    def seconds(self) -> Any:
        return self.busy + self.waited

    def __add__(self, other: Time) -> Time:
        return Time(self.busy + other.busy, self.waited + other.waited, self.link + other.link)

    def times(self, factor: float) -> Time:
        return Time(self.busy * factor, self.waited * factor, self.link * factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What runs beside what, and on how many cores."""

    ahead: bool
    tables_beside: bool
    looks_ahead: bool
    """Whether rows of the next batch are looked up as soon as those of this one are updated."""
    cores: float
    """Cores of a rank, at least 1: ranks that share a core take longer for all that they do."""
    early: Time
    """What the model does before it needs vectors, and in the backward pass after their gradients; part of "dense"."""
    optimizer: Time
    """The step of the dense optimizer; part of "dense"."""
    switches: float
    """What a further thread costs a step whose cores are all in use, as a share."""

    def exposed(self, times: Mapping[str, Time]) -> dict[str, Any]:
        """Seconds of each phase, without what hides behind others. Together they are the step."""
        found = {phase: time.seconds for phase, time in times.items()}
        beside: list[tuple[Sequence[str], Time]] = []
        if self.tables_beside:
            own = times["AllReduce"] + self.optimizer
            if self.looks_ahead:
                beside = [((*GRADIENTS, *VECTORS), own + self.early)]
            else:
                after = own + self.early.times(1 - FORWARD)
                beside = [(VECTORS, self.early.times(FORWARD)), (GRADIENTS, after)]
        for phases, model in beside:
            tables = _sum(times, phases)
            _scale(found, phases, self._longest([tables, model]) - model.seconds)
        if self.ahead:
            rest = sum(found[phase] for phase in PHASES if phase not in AHEAD)
            ahead, others = _sum(times, AHEAD), _sum(times, [phase for phase in PHASES if phase not in AHEAD])
            bound = self._bound([ahead, others], 2 + bool(beside))
            _scale(found, AHEAD, np.maximum(np.maximum(ahead.seconds, bound) - rest, 0.0))
        threads = self.ahead + bool(beside)
        crowded = 1 + self.switches * threads * max(1 - (self.cores - 1) / max(threads, 1), 0.0)
        return {phase: found[phase] * crowded for phase in PHASES}

    def _longest(self, chains: Sequence[Time]) -> Any:
        """The seconds of chains that run at once: the longest of them, or what cores and link need for all."""
        longest = reduce(np.maximum, (chain.seconds for chain in chains))
        return np.maximum(longest, self._bound(chains, len(chains)))

    def _bound(self, chains: Sequence[Time], threads: int) -> Any:
        """Seconds that the cores of a rank and its link need for all chains."""
        whole = reduce(Time.__add__, chains)
        return np.maximum(whole.busy / min(self.cores, threads), whole.link)


def _sum(times: Mapping[str, Time], phases: Sequence[str]) -> Time:
    return reduce(Time.__add__, (times[phase] for phase in phases))


def _scale(found: dict[str, Any], phases: Sequence[str], seconds: Any) -> None:
    """Gives these phases so many seconds together."""
    whole = sum(found[phase] for phase in phases)
    share = np.divide(seconds, whole, out=np.zeros_like(whole + seconds), where=whole + 0 * seconds > 0)
    for phase in phases:
        found[phase] = found[phase] * share
