# SPDX-License-Identifier: Apache-2.0
"""Training runs that must all end with the same weights, as data: ranks, placements, networks, deaths and joins."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

TRANSPORTS: Final = ("shm", "udp")
HOMES: Final = ("memory", "files")
TABLES: Final = ("fixed", "dynamic")
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
    home: str = "memory"
    """Where rows of tables are."""
    resumes: bool = False
    """It ends before its last steps, and `resumed_ranks` go on from its checkpoint."""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= SLICES:
            raise ValueError(f"ranks {self.ranks}; allowed: 1..{SLICES}")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport {self.transport!r}; allowed: {', '.join(TRANSPORTS)}")
        if self.loss_fraction and self.transport == "shm":
            raise ValueError(f"loss_fraction {self.loss_fraction} over shm, which loses nothing; allowed: over udp")
        if self.home not in HOMES:
            raise ValueError(f"home {self.home!r}; allowed: {', '.join(HOMES)}")

    @property
    def resumed_ranks(self) -> int:
        """How many ranks a resumed run has at its end: other ones than before."""
        return self.ranks % 3 + 1

    @property
    def events(self) -> str:
        """What happens to it, for a table."""
        told = [*(["kill and join"] if self.changes else []), *(["resumption"] if self.resumes else [])]
        return ", ".join([*told, *(["files"] if self.home == "files" else [])])

    def __str__(self) -> str:
        network = "shm" if self.transport == "shm" else f"udp, {100 * self.loss_fraction:g} % lost"
        return f"{self.sharding}, ranks {self.ranks}, {network}{', ' if self.events else ''}{self.events}"


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """Runs one after the other, in place of a collective (`training_runs.py`)."""

    runs: tuple[Training, ...]
    tables: str = "fixed"
    """What the model has: tables of a fixed number of rows, or dynamic ones with admission and eviction."""
    timeout_s: float = 180.0
    """Deadline of one run."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("no runs; allowed: one or more")
        if self.tables not in TABLES:
            raise ValueError(f"tables {self.tables!r}; allowed: {', '.join(TABLES)}")
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


def covering(choices: Sequence[Sequence[Any]], strength: int) -> list[tuple[Any, ...]]:
    """Rows with one of each of `choices`, of which every `strength` meet in every way in at least one row.

    Greedy, as in AETG (Cohen, Dalal, Fredman, Patton, IEEE TSE 23(7), 1997), with nothing random: each row begins with
    a way that no row has yet, and takes for the other choices what covers most.
    """
    places = list(itertools.combinations(range(len(choices)), strength))
    missing = {(own, ways) for own in places for ways in itertools.product(*(range(len(choices[one])) for one in own))}
    rows = []
    for first in sorted(missing):
        if first not in missing:
            continue
        row = dict(zip(*first, strict=True))
        for place in range(len(choices)):
            if place not in row:
                row[place] = max(
                    range(len(choices[place])), key=lambda way: len(_covered(row | {place: way}, places) & missing)
                )
        missing -= _covered(row, places)
        rows.append(tuple(choice[row[place]] for place, choice in enumerate(choices)))
    return rows


def _covered(row: dict[int, int], places: Iterable[tuple[int, ...]]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The ways in which choices meet in a row, which may miss some."""
    return {(own, tuple(row[one] for one in own)) for own in places if all(one in row for one in own)}


def dynamic_runs(strength: int) -> tuple[Training, ...]:
    """Runs of dynamic tables, in which every `strength` of these meet: ranks, placement, network, home of rows, a kill
    and a join, a resumption.
    """
    shardings = [one for one in SHARDINGS if one != "data_parallel"]
    networks = (("shm", 0.0), ("udp", 0.01))
    return tuple(
        Training(
            ranks=ranks,
            sharding=sharding,
            transport=transport,
            loss_fraction=loss,
            home=home,
            changes=changes,
            resumes=resumes,
        )
        for ranks, sharding, (transport, loss), home, changes, resumes in covering(
            [(1, 2, 3, 4, 8), shardings, networks, HOMES, (False, True), (False, True)], strength
        )
    )
