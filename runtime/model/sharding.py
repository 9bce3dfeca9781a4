# SPDX-License-Identifier: Apache-2.0
"""Which rank owns which embedding table: whole tables, placed greedily by cost.

Every rank computes the same placement from the same table list; nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One embedding table."""

    name: str
    """Global name; weights, state and checkpoints go by it."""

    row_count: int
    """Rows; ids are in [0, row_count)."""

    mean_length: float
    """Ids a sample on average (the pooling factor)."""

    def cost(self, dim: int) -> float:
        """Floats touched a sample: `mean_length` rows read and updated, one pooled vector sent each way.

        Lookup and update read and write each row once a pass (3 accesses a row: lookup, gradient, write);
        the pooled vector crosses the exchange forward and backward.
        """
        return dim * (3 * self.mean_length + 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Owner of each table, and the order in which tables travel."""

    owner_of: tuple[int, ...]
    """Rank of each table, in the global order of tables."""

    tables_of: tuple[tuple[int, ...], ...]
    """For each rank its tables, as global numbers in rising order; a rank may own none."""

    @property
    def wire_order(self) -> tuple[int, ...]:
        """All tables, grouped by owner: the order of a batch's parts in the exchange."""
        return tuple(table for tables in self.tables_of for table in tables)

    @property
    def wire_place(self) -> tuple[int, ...]:
        """For each table in the global order its place in `wire_order`."""
        place = {table: number for number, table in enumerate(self.wire_order)}
        return tuple(place[table] for table in range(len(self.owner_of)))


def place(tables: Sequence[Table], *, world_size: int, dim: int) -> Placement:
    """Longest processing time first (Graham 1969): the dearest table goes to the rank with the least to do.

    Its largest load is at most 4/3 of the best possible one. Ties go to the lower table and the lower rank.
    """
    owner_of = [0] * len(tables)
    load = [0.0] * world_size
    for table in sorted(range(len(tables)), key=lambda number: (-tables[number].cost(dim), number)):
        rank = min(range(world_size), key=lambda number: (load[number], number))
        owner_of[table] = rank
        load[rank] += tables[table].cost(dim)
    tables_of = tuple(
        tuple(table for table, owner in enumerate(owner_of) if owner == rank) for rank in range(world_size)
    )
    return Placement(owner_of=tuple(owner_of), tables_of=tables_of)
