# SPDX-License-Identifier: Apache-2.0
"""Which rank has which shard, within the memory of each rank. No placement changes a bit of the weights.

The classic shardings are assignments of shards: a table whose shards are all on one rank is sharded table-wise, one
whose row shards are spread row-wise, and so on. So every mixture is possible, and tables of one model may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sennit.known_names import few, hint
from sennit.runtime.sharded.tables import IN_MEMORY, Home, Homes, Shard, Table, shard_bytes, shard_name, shards_of
from sennit.transport.errors import ConfigError

EVERYWHERE: Final = -1
"""The owner of a replicated shard."""

UNLIMITED: Final = 1 << 62

SHARDINGS: Final = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid",
    "data_parallel",
)

_NEEDS: Final = {
    "row_wise": ("row_shards",),
    "table_row_wise": ("row_shards",),
    "column_wise": ("column_shards",),
    "table_column_wise": ("column_shards",),
    "grid": ("row_shards", "column_shards"),
}
"""The settings of a table of which one has to be above 1 if a sharding is to give several ranks a part of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The owner of each shard."""

    world_size: int
    owner_of: Mapping[Shard, int]
    """The rank of each shard; `EVERYWHERE` for a replicated one."""

    replicated: frozenset[int] = frozenset()
    """Tables that every rank has whole (data-parallel)."""

    def shards_on(self, rank: int) -> list[Shard]:
        """The shards that a rank holds, replicated ones among them, in the order of the model."""
        return sorted(shard for shard, owner in self.owner_of.items() if owner in (rank, EVERYWHERE))


def place(
    tables: Sequence[Table],
    world_size: int,
    shardings: str | Mapping[str, str] = "table_wise",
    *,
    local_ranks: int | None = None,
    limits: Sequence[int] | Mapping[Home, Sequence[int]] | None = None,
    homes: Homes = IN_MEMORY,
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

    `limits`: bytes of each rank for tables in memory (`memory_limits`), or by home; None: no limits. `homes`: what the
    module will have, which matters with limits alone. A rank or host without room is passed over. If a table then finds
    no room, all are placed again by memory alone, without regard to hosts: the largest first, each on the rank with the
    most room, a table-wise table whole, others shard by shard.

    Raises `ConfigError` for what `sharding_names` refuses, for a table that cannot be at its home, and for one without
    room: its message then has the missing bytes.
    """
    local = world_size if local_ranks is None else local_ranks
    if local < 1 or world_size % local:
        raise ConfigError(f"{local} ranks a host for {world_size} ranks; allowed: a divisor")
    of_home = limits if isinstance(limits, Mapping) else {} if limits is None else {homes.memory: limits}
    for of_ranks in of_home.values():
        if len(of_ranks) != world_size:
            raise ConfigError(f"limits of {len(of_ranks)} ranks, but there are {world_size}")
    bytes_of = {shard: shard_bytes(tables, shard) for shard in shards_of(tables)}
    room = Room(tables, bytes_of, world_size, of_home, homes)
    names = sharding_names(tables, shardings, world_size, local_ranks=local)
    hosts = [range(first, first + local) for first in range(0, world_size, local)]
    owner_of = _by_load(room, names, hosts) or room.by_memory(names)
    return placed(tables, world_size, {shard_name(tables, shard): rank for shard, rank in owner_of.items()})


def check_placement(tables: Sequence[Table], placement: Placement, world_size: int) -> None:
    """Raises `ConfigError` for a placement of other ranks, or of another model."""
    if placement.world_size != world_size:
        raise ConfigError(f"a placement for {placement.world_size} ranks, but there are {world_size}")
    if placement.owner_of.keys() != set(shards_of(tables)):
        what = f"a placement of {len(placement.owner_of)} shards for tables of {len(shards_of(tables))}"
        raise ConfigError(f"{what}, or of others; allowed: one that `place` or `placed` made for these tables")


def check_room(
    tables: Sequence[Table], placement: Placement, limits: Mapping[Home, Sequence[int]], homes: Homes
) -> None:
    """Raises `ConfigError` if the shards of a rank need more than its bytes (`place`)."""
    room = Room(
        tables, {shard: shard_bytes(tables, shard) for shard in shards_of(tables)}, placement.world_size, limits, homes
    )
    room.take(placement.owner_of)
    room.check()


def _by_load(room: Room, names: Mapping[str, str], hosts: Sequence[range]) -> dict[Shard, int] | None:
    """The owner of each shard; None if a table finds no room."""
    owner_of: dict[Shard, int] = {}
    for number in room.largest_first():
        for wish in _wishes(room, number, names[room.tables[number].name], hosts):
            chosen = room.found(wish)
            if chosen is not None:
                owner_of |= chosen
                room.take(chosen)
                break
        else:
            return None
    return owner_of


def _wishes(room: Room, number: int, name: str, hosts: Sequence[range]) -> Iterator[list[Wish]]:
    """The places that a table may go to by its sharding, the best place first."""
    table, shards, everyone = room.tables[number], room.shards[number], range(len(room.load))
    spread_over = [everyone]
    if name in ("table_row_wise", "table_column_wise"):
        spread_over = sorted(hosts, key=lambda ranks: (sum(room.load[rank] for rank in ranks), ranks[0]))
    match name:
        case "data_parallel":
            yield [Wish(shards, EVERYWHERE, everyone)]
        case "table_wise":
            yield [Wish(shards, room.lightest(everyone), everyone)]
        case "row_wise" | "table_row_wise":
            for ranks in spread_over:
                yield [Wish([shard], _spread(shard.row, table.row_shards, ranks), ranks) for shard in shards]
        case "column_wise" | "table_column_wise":
            for ranks in spread_over:
                first = ranks.index(room.lightest(ranks))
                yield [Wish([shard], ranks[(first + shard.column) % len(ranks)], ranks) for shard in shards]
        case _:
            # A grid of several hosts, or on one host of halves of it.
            groups = hosts if len(hosts) > 1 else _halves(everyone)
            group_of = {shard: groups[(number + shard.column) % len(groups)] for shard in shards}
            yield [
                Wish([shard], _spread(shard.row, table.row_shards, group), group) for shard, group in group_of.items()
            ]


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


def sharding_names(
    tables: Sequence[Table],
    shardings: str | Mapping[str, str],
    world_size: int,
    *,
    others: str = "table_wise",
    local_ranks: int | None = None,
) -> dict[str, str]:
    """The sharding of each table, by its name. `others`: of tables that `shardings` does not name.

    A sharding that is not given by a table's own name spreads those that have shards to spread, and places the others
    table-wise. Tensor trains have no shards: any sharding but `data_parallel` places them table-wise.

    Raises `ConfigError` for names that do not exist, for a table of one shard that is to be spread by its own name,
    and where the others are to be spread and none of them can be.
    """
    named, others = ({}, shardings) if isinstance(shardings, str) else (shardings, others)
    known = [table.name for table in tables]
    for table in named:
        if table not in known:
            raise ConfigError(
                f"a sharding for table {table}, which the model has not; allowed: {few(known)}{hint(table, known)}"
            )
    names = {table: named.get(table, others) for table in known}
    for table, name in names.items():
        if name not in SHARDINGS:
            raise ConfigError(f"table {table}: sharding {name!r}; allowed: {', '.join(SHARDINGS)}")
    local = world_size if local_ranks is None else local_ranks
    whole = [table for table in tables if _is_single(table, names[table.name], world_size, local)]
    wrong = [table for table in whole if table.train_rank is None]
    unnamed = [table for table in tables if table.train_rank is None and table.name not in named]
    if any(table not in whole for table in unnamed):
        wrong = [table for table in wrong if table.name in named]
    if wrong:
        name = names[wrong[0].name]
        raise ConfigError(
            f"table {wrong[0].name}: sharding {name}, but one rank would have all of it: "
            f"{' and '.join(f'{need} 1' for need in _NEEDS[name])}; allowed: {' or '.join(_NEEDS[name])} of 2 or more "
            "(which belong to the model), or another sharding, such as table_wise"
        )
    return names | {table.name: "table_wise" for table in whole}


def _is_single(table: Table, name: str, world_size: int, local_ranks: int) -> bool:
    """Whether one rank would have all of a table that the sharding `name` is to spread over several."""
    needs, ranks = _NEEDS.get(name, ()), local_ranks if name.startswith("table_") else world_size
    return bool(needs) and ranks > 1 and all(getattr(table, need) == 1 for need in needs)


def _spread(part: int, parts: int, ranks: Sequence[int]) -> int:
    """The rank of a part. Neighbours stay together, so that one rank has whole subtrees of the sum over row shards."""
    return ranks[part * len(ranks) // parts]


def _halves(ranks: range) -> list[range]:
    middle = len(ranks) // 2
    return [ranks[:middle], ranks[middle:]] if middle else [ranks]


class Wish(NamedTuple):
    """Shards that stay together, the rank that they should go to, and those that they may go to."""

    shards: Sequence[Shard]
    rank: int
    ranks: range


class Room:
    """The bytes that each rank has, and the bytes that it may have, while shards are placed."""

    def __init__(
        self,
        tables: Sequence[Table],
        bytes_of: Mapping[Shard, int],
        world_size: int,
        limits: Mapping[Home, Sequence[int]],
        homes: Homes,
    ) -> None:
        """`limits`: bytes for each rank, by home. A home that is not among them has no limit."""
        self.tables, self._bytes_of, self._limits, self._homes = tables, bytes_of, limits, homes
        self.load = [0] * world_size
        """The bytes of each rank in all homes together. Ranks are balanced by them."""
        self._used = {home: [0] * world_size for home in Home}
        self.shards = {number: [shard for shard in bytes_of if shard.table == number] for number in range(len(tables))}
        """The shards of each table."""

    def largest_first(self) -> list[int]:
        """The numbers of the tables, the largest table first."""
        return sorted(self.shards, key=lambda number: (-self._size(self.shards[number]), number))

    def lightest(self, ranks: Sequence[int]) -> int:
        """The rank with the fewest bytes so far."""
        return min(ranks, key=lambda rank: (self.load[rank], rank))

    def found(self, wishes: Sequence[Wish]) -> dict[Shard, int] | None:
        """Finds a rank with room for each wish: the wished rank, or else the lightest. None if a wish finds no room."""
        load, chosen = list(self.load), {}
        used = {home: list(sizes) for home, sizes in self._used.items()}
        for shards, wished, ranks in wishes:
            size, home = self._size(shards), self._home(shards[0].table, wished == EVERYWHERE)
            fitting = [rank for rank in ranks if used[home][rank] + size <= self._limit(home, rank)]
            if not fitting or (wished == EVERYWHERE and len(fitting) < len(ranks)):
                return None
            rank = wished if wished in (*fitting, EVERYWHERE) else min(fitting, key=lambda one: (load[one], one))
            for one in ranks if rank == EVERYWHERE else (rank,):
                load[one] += size
                used[home][one] += size
            chosen.update(dict.fromkeys(shards, rank))
        return chosen

    def take(self, owner_of: Mapping[Shard, int]) -> None:
        """Adds shards to what their ranks have."""
        for shard, rank in owner_of.items():
            home = self._home(shard.table, rank == EVERYWHERE)
            for one in range(len(self.load)) if rank == EVERYWHERE else (rank,):
                self.load[one] += self._bytes_of[shard]
                self._used[home][one] += self._bytes_of[shard]

    def by_memory(self, names: Mapping[str, str]) -> dict[Shard, int]:
        """Places all shards again on empty ranks: the largest first, each on the rank with the most room.

        `names`: the sharding of each table. Returns the owner of each shard. Raises `ConfigError` for one without room.
        """
        self.load = [0] * len(self.load)
        self._used = {home: [0] * len(self.load) for home in Home}
        owner_of: dict[Shard, int] = {}
        home_of = {
            number: self._home(number, names[table.name] == "data_parallel") for number, table in enumerate(self.tables)
        }
        parts = []
        for number, shards in self.shards.items():
            match names[self.tables[number].name]:
                case "data_parallel":
                    left = self._left(home_of[number])
                    self._check(shards, home_of, left.index(min(left)), "which has the least room")
                    owner_of.update(dict.fromkeys(shards, EVERYWHERE))
                    self.take(dict.fromkeys(shards, EVERYWHERE))
                case "table_wise":
                    parts.append(shards)
                case _:
                    parts += [[shard] for shard in shards]
        for shards in sorted(parts, key=lambda part: (-self._size(part), part)):
            left = self._left(home_of[shards[0].table])
            rank = left.index(max(left))
            self._check(shards, home_of, rank, "which has the most room")
            owner_of.update(dict.fromkeys(shards, rank))
            self.take(dict.fromkeys(shards, rank))
        return owner_of

    def check(self) -> None:
        """Raises `ConfigError` if a rank has more than it may have."""
        for home, of_ranks in self._limits.items():
            for rank, (used, limit) in enumerate(zip(self._used[home], of_ranks, strict=True)):
                if used > limit:
                    kind = "tables" if len(self._limits) == 1 else f"tables in {home.value}"
                    raise ConfigError(
                        f"the placement gives rank {rank} {used:,} bytes of {kind}, with their optimizer states; "
                        f"allowed: {limit:,}"
                    )

    def _check(self, shards: Sequence[Shard], home_of: Mapping[int, Home], rank: int, where: str) -> None:
        table, home = self.tables[shards[0].table], home_of[shards[0].table]
        size, left = self._size(shards), self._left(home)[rank]
        if size <= left:
            return
        is_whole = len(shards) == table.row_shards * table.column_shards
        what = (
            f"table {table.name}" if is_whole else f"shard {shard_name(self.tables, shards[0])} of table {table.name}"
        )
        kind = "tables" if len(self._limits) == 1 else f"tables in {home.value}"
        files = 'tables with home = "file"' if self._homes.has_store else "a table store"
        ways = ["more ranks", *([] if home is Home.FILE else [files]), "tensor trains", "more row shards"]
        raise ConfigError(
            f"{what} needs {size:,} bytes with its optimizer states. Of the {self._limit(home, rank):,} bytes for "
            f"{kind} on rank {rank}, {where}, {left:,} are left: {size - left:,} bytes are missing. All {kind} need "
            f"{self._size(shard for shard in self._bytes_of if home_of[shard.table] is home):,} bytes, all ranks have "
            f"{sum(self._limits[home]):,}. Give {', '.join(ways)} or fewer columns"
        )

    def _home(self, number: int, is_replicated: bool) -> Home:
        """The home of a table. It matters only where there are limits."""
        return self._homes.of(self.tables[number], is_replicated=is_replicated) if self._limits else self._homes.memory

    def _limit(self, home: Home, rank: int) -> int:
        return self._limits[home][rank] if home in self._limits else UNLIMITED

    def _size(self, shards: Iterable[Shard]) -> int:
        return sum(self._bytes_of[shard] for shard in shards)

    def _left(self, home: Home) -> list[int]:
        """The bytes that are left on each rank."""
        return [self._limit(home, rank) - used for rank, used in enumerate(self._used[home])]
