# SPDX-License-Identifier: Apache-2.0
"""Which rank owns which embedding table. Whole tables are placed greedily by cost, within the memory of the ranks.

Every rank computes the same placement from the same tables and limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sennit.offload.ingest.facts import TableFacts
from sennit.transport.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Owner of each table, and the order in which tables travel."""

    owner_of: tuple[int, ...]
    """The owner of each table, in the global order of tables."""

    tables_of: tuple[tuple[int, ...], ...]
    """The tables of each rank, as global numbers in rising order; a rank may own none."""

    @property
    def wire_order(self) -> tuple[int, ...]:
        """All tables grouped by owner, which is the order of the parts of a batch in the exchange."""
        return tuple(table for tables in self.tables_of for table in tables)

    @property
    def wire_place(self) -> tuple[int, ...]:
        """The place in `wire_order` of each table, in the global order."""
        place = {table: number for number, table in enumerate(self.wire_order)}
        return tuple(place[table] for table in range(len(self.owner_of)))


def cost(table: TableFacts, dim: int) -> float:
    """The floats touched per sample: `mean_length` rows read and updated, one pooled vector sent each way.

    Lookup and update read and write each row once per pass (3 accesses per row: lookup, gradient, write).
    The pooled vector crosses the exchange forward and backward.
    """
    return dim * (3 * table.mean_length + 2)


def place(
    tables: Sequence[TableFacts],
    *,
    world_size: int,
    dim: int,
    table_bytes: Sequence[int] | None = None,
    limit_bytes: Sequence[int] | None = None,
) -> Placement:
    """Longest processing time first (Graham 1969): the most expensive table goes to the rank with the smallest load.

    Without limits, the largest load is at most 4/3 of the best possible one. Ties go to the lower table and the lower
    rank. `table_bytes`: memory of each table with its optimizer states. `limit_bytes`: memory of each rank.

    A rank without room for a table is passed over. If that leaves a table without a rank, all tables are placed again
    by memory alone: the largest first, each on the rank with the most room. Raises `ConfigError` if a table still has
    no room.
    """
    costs = [cost(table, dim) for table in tables]
    if table_bytes is None or limit_bytes is None:
        table_bytes, limit_bytes = [0] * len(tables), [0] * world_size
    owner_of = _by_cost(costs, table_bytes, limit_bytes)
    if owner_of is None:
        owner_of = _by_memory(tables, table_bytes, limit_bytes)
    tables_of = tuple(
        tuple(table for table, owner in enumerate(owner_of) if owner == rank) for rank in range(world_size)
    )
    return Placement(owner_of=tuple(owner_of), tables_of=tables_of)


def _by_cost(costs: Sequence[float], table_bytes: Sequence[int], limit_bytes: Sequence[int]) -> list[int] | None:
    """The owner of each table; None if a table has no room."""
    owner_of, load, room = [0] * len(costs), [0.0] * len(limit_bytes), list(limit_bytes)
    for table in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        fitting = [rank for rank in range(len(room)) if table_bytes[table] <= room[rank]]
        if not fitting:
            return None
        rank = min(fitting, key=lambda number: (load[number], number))
        owner_of[table] = rank
        load[rank] += costs[table]
        room[rank] -= table_bytes[table]
    return owner_of


def _by_memory(tables: Sequence[TableFacts], table_bytes: Sequence[int], limit_bytes: Sequence[int]) -> list[int]:
    owner_of, room = [0] * len(tables), list(limit_bytes)
    for table in sorted(range(len(tables)), key=lambda number: (-table_bytes[number], number)):
        rank = max(range(len(room)), key=lambda number: (room[number], -number))
        if table_bytes[table] > room[rank]:
            raise ConfigError(
                f"table {tables[table].name} needs {table_bytes[table]:,} bytes with its optimizer state, but of the "
                f"{limit_bytes[rank]:,} bytes for tables on rank {rank}, the rank with the most room, {room[rank]:,} "
                f"are left; all tables need {sum(table_bytes):,} bytes, all ranks have {sum(limit_bytes):,}. "
                "Give more ranks, --table-store, --tensor-train or a smaller --dim"
            )
        owner_of[table] = rank
        room[rank] -= table_bytes[table]
    return owner_of
