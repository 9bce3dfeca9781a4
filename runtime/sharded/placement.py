# SPDX-License-Identifier: Apache-2.0
"""Which rank has which shard. No placement changes a bit of the weights.

The classic shardings are assignments of shards: a table whose shards are all on one rank is sharded table-wise, one
whose row shards are spread row-wise, and so on. So every mixture is possible, and tables of one model may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sennit.runtime.sharded.tables import Shard, Table, shard_bytes, shard_name, shards_of
from sennit.transport.errors import ConfigError

SHARDINGS: Final = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid",
    "data_parallel",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The owner of each shard."""

    world_size: int
    owner_of: Mapping[Shard, int]
    """Ranks of the shards that one rank owns."""

    replicated: frozenset[int] = frozenset()
    """Tables that every rank has whole (data-parallel)."""

    def shards_on(self, rank: int) -> list[Shard]:
        """The shards that a rank holds, replicated ones among them, in the order of the model."""
        return sorted(shard for shard, owner in self.owner_of.items() if owner in (rank, EVERYWHERE))


EVERYWHERE: Final = -1
"""The owner of a replicated shard."""


def alone(shards: Iterable[Shard]) -> Placement:
    """The placement of a rank that has all of these shards for itself."""
    return Placement(world_size=1, owner_of=dict.fromkeys(shards, 0))


def place(
    tables: Sequence[Table],
    world_size: int,
    shardings: str | Mapping[str, str] = "table_wise",
    *,
    local_ranks: int | None = None,
) -> Placement:
    """Places all shards by the name of a sharding, for all tables or by table name (others: table-wise).

    | sharding | shards of a table |
    | --- | --- |
    | `table_wise` | on one rank |
    | `row_wise` | row shards over all ranks, in contiguous ranges |
    | `column_wise` | column shards over all ranks in turn |
    | `table_row_wise` | row shards over the ranks of one host |
    | `table_column_wise` | column shards over the ranks of one host |
    | `grid` | column shards over hosts in turn, the row shards of each over the ranks of that host |
    | `data_parallel` | on every rank |

    Ranks and hosts are chosen by load, in bytes: the largest table first, to the rank or host with the least.
    `local_ranks`: the ranks of a host; None: all ranks are on one. A host is then ranks `n * local_ranks` and on.
    Raises `ConfigError` for names that do not exist.
    """
    local = world_size if local_ranks is None else local_ranks
    if local < 1 or world_size % local:
        raise ConfigError(f"{local} ranks a host for {world_size} ranks; allowed: a divisor")
    names = _names(tables, shardings)
    owner_of: dict[Shard, int] = {}
    load = [0] * world_size
    hosts = [range(first, first + local) for first in range(0, world_size, local)]
    sizes = {shard: shard_bytes(tables, shard) for shard in shards_of(tables)}
    of_table = {number: [shard for shard in sizes if shard.table == number] for number in range(len(tables))}
    order = sorted(of_table, key=lambda number: (-sum(sizes[shard] for shard in of_table[number]), number))

    def lightest(ranks: Sequence[int]) -> int:
        return min(ranks, key=lambda rank: (load[rank], rank))

    def lightest_host() -> Sequence[int]:
        return min(hosts, key=lambda ranks: (sum(load[rank] for rank in ranks), ranks[0]))

    for number in order:
        table, shards = tables[number], of_table[number]
        match names[table.name]:
            case "data_parallel":
                chosen = dict.fromkeys(shards, EVERYWHERE)
            case "table_wise":
                chosen = dict.fromkeys(shards, lightest(range(world_size)))
            case "row_wise" | "table_row_wise" as name:
                ranks = range(world_size) if name == "row_wise" else lightest_host()
                chosen = {shard: _spread(shard.row, table.row_shards, ranks) for shard in shards}
            case "column_wise" | "table_column_wise" as name:
                ranks = range(world_size) if name == "column_wise" else lightest_host()
                first = ranks.index(lightest(ranks))
                chosen = {shard: ranks[(first + shard.column) % len(ranks)] for shard in shards}
            case _:
                # A grid of several hosts, or on one host of halves of it.
                groups = hosts if len(hosts) > 1 else _halves(range(world_size))
                chosen = {
                    shard: _spread(shard.row, table.row_shards, groups[(number + shard.column) % len(groups)])
                    for shard in shards
                }
        for shard, rank in chosen.items():
            owner_of[shard] = rank
            for one in range(world_size) if rank == EVERYWHERE else (rank,):
                load[one] += sizes[shard]
    return placed(tables, world_size, {shard_name(tables, shard): rank for shard, rank in owner_of.items()})


def placed(tables: Sequence[Table], world_size: int, owners: Mapping[str, int]) -> Placement:
    """The placement with these owners, by names of shards; -1 replicates a shard, and then all of its table.

    Raises `ConfigError` if shards are missing or foreign, or ranks do not exist: then the plan is of another model.
    """
    known = {shard_name(tables, shard): shard for shard in shards_of(tables)}
    missing, foreign = sorted(known.keys() - owners.keys()), sorted(owners.keys() - known.keys())
    if missing or foreign:
        what = f"does not place {missing[0]}" if missing else f"places {foreign[0]}, which the model has not"
        raise ConfigError(
            f"the placement {what}; is it of another model? It has {len(owners)} shards, the model {len(known)}"
        )
    for name, rank in owners.items():
        if not EVERYWHERE <= rank < world_size:
            raise ConfigError(f"shard {name} on rank {rank}; allowed: -1 (every rank), 0 to {world_size - 1}")
    owner_of = {known[name]: rank for name, rank in owners.items()}
    replicated = frozenset(shard.table for shard, rank in owner_of.items() if rank == EVERYWHERE)
    for shard, rank in owner_of.items():
        if shard.table in replicated and rank != EVERYWHERE:
            raise ConfigError(
                f"shard {shard_name(tables, shard)} on rank {rank}, other shards of its table on every rank; "
                "allowed: all or none"
            )
    return Placement(world_size=world_size, owner_of=owner_of, replicated=replicated)


def _names(tables: Sequence[Table], shardings: str | Mapping[str, str]) -> dict[str, str]:
    given = {table.name: shardings for table in tables} if isinstance(shardings, str) else dict(shardings)
    known = {table.name for table in tables}
    for table, name in given.items():
        if table not in known:
            raise ConfigError(f"a sharding for table {table}, which the model has not")
        if name not in SHARDINGS:
            raise ConfigError(f"table {table}: sharding {name!r}; allowed: {', '.join(SHARDINGS)}")
    return {table.name: given.get(table.name, "table_wise") for table in tables}


def _spread(part: int, parts: int, ranks: Sequence[int]) -> int:
    """The rank of a part, if neighbours are kept together: subtrees of the sum over row shards are then on one rank."""
    return ranks[part * len(ranks) // parts]


def _halves(ranks: range) -> list[range]:
    middle = len(ranks) // 2
    return [ranks[:middle], ranks[middle:]] if middle else [ranks]
