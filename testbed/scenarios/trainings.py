# SPDX-License-Identifier: Apache-2.0
"""Training runs that must all end with the same weights, as data: ranks, placements, networks, deaths and joins."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

TRANSPORTS: Final = ("shm", "udp")
# All of sennit.runtime.sharded.placement, which needs torch: scenarios are listed without it, too.
SHARDINGS: Final = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid",
    "data_parallel",
)
HOST_RANKS: Final = 2
"""Ranks that say that they share a host (SENNIT_HOST_ID), where they are on networks of their own."""
SLICES: Final = 8


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run of `sennit train`."""

    ranks: int
    sharding: str
    transport: str = "udp"
    """shm: all ranks on one host. udp: each in a network namespace of its own, and two of them say that they share a
    host."""
    loss_fraction: float = 0.0
    changes: bool = False
    """In the middle a rank is killed, and then another one joins. A rank alone is joined first; then the newcomer is
    killed."""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= SLICES:
            raise ValueError(f"ranks {self.ranks}; allowed: 1..{SLICES}")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport {self.transport!r}; allowed: {', '.join(TRANSPORTS)}")
        if self.loss_fraction and self.transport == "shm":
            raise ValueError(f"loss_fraction {self.loss_fraction} over shm, which loses nothing; allowed: over udp")

    def __str__(self) -> str:
        network = "shm" if self.transport == "shm" else f"udp, {100 * self.loss_fraction:g} % lost"
        return f"{self.sharding}, ranks {self.ranks}, {network}{', a kill and a join' if self.changes else ''}"


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """Runs one after the other, in place of a collective (`training_runs.py`)."""

    runs: tuple[Training, ...]
    timeout_s: float = 180.0
    """Deadline of one run."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("no runs; allowed: one or more")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s {self.timeout_s}; allowed: above 0")

    @property
    def hosts(self) -> int:
        """Networks that they need: one for each rank, and one for a newcomer."""
        return max(run.ranks for run in self.runs) + 1


def product(shardings: Iterable[str], ranks: Iterable[int], losses: Iterable[float]) -> tuple[Training, ...]:
    """Every placement with every number of ranks, over shared memory and over udp with every loss, left alone and with
    a kill and a join."""
    networks = [("shm", 0.0), *(("udp", loss) for loss in losses)]
    return tuple(
        Training(ranks=count, sharding=sharding, transport=transport, loss_fraction=loss, changes=changes)
        for (transport, loss), changes, count, sharding in itertools.product(
            networks, (False, True), list(ranks), list(shardings)
        )
    )
