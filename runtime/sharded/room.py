# SPDX-License-Identifier: Apache-2.0
"""The memory of each rank, and its room in files, while shards are placed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from sennit.runtime.sharded.homes import Homes
from sennit.runtime.sharded.tables import Home, Shard, Table, shard_name
from sennit.transport.errors import ConfigError

EVERYWHERE: Final = -1
"""The owner of a replicated shard."""

UNLIMITED: Final = 1 << 62


class Wish(NamedTuple):
    """Shards that stay together, the rank that they should go to, and those that they may go to."""

    shards: Sequence[Shard]
    rank: int
    ranks: range


class Room:
    """What each rank has, and what it may have, in bytes."""

    def __init__(
        self,
        tables: Sequence[Table],
        bytes_of: Mapping[Shard, int],
        world_size: int,
        limits: Mapping[Home, Sequence[int]],
        homes: Homes,
    ) -> None:
        """`limits`: of each rank by home; a home that is not there has none."""
        self.tables, self._bytes_of, self._limits, self._homes = tables, bytes_of, limits, homes
        self.load = [0] * world_size
        """Of all homes, which is what ranks are balanced by."""
        self._used = {home: [0] * world_size for home in Home}
        self.shards = {number: [shard for shard in bytes_of if shard.table == number] for number in range(len(tables))}
        """The shards of each table."""

    def largest_first(self) -> list[int]:
        """The tables by size."""
        return sorted(self.shards, key=lambda number: (-self._size(self.shards[number]), number))

    def lightest(self, ranks: Sequence[int]) -> int:
        """The rank with the least so far."""
        return min(ranks, key=lambda rank: (self.load[rank], rank))

    def found(self, wishes: Sequence[Wish]) -> dict[Shard, int] | None:
        """A rank with room for each wish: the wished one, or else the lightest. None if there is none for one."""
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
        """Counts shards to their ranks."""
        for shard, rank in owner_of.items():
            home = self._home(shard.table, rank == EVERYWHERE)
            for one in range(len(self.load)) if rank == EVERYWHERE else (rank,):
                self.load[one] += self._bytes_of[shard]
                self._used[home][one] += self._bytes_of[shard]

    def by_memory(self, names: Mapping[str, str]) -> dict[Shard, int]:
        """The owner of each shard: from empty ranks, the largest first, each to the rank with the most room.

        `names`: the sharding of each table. Raises `ConfigError` if something has no room.
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
        raise ConfigError(
            f"{what} needs {size:,} bytes with its optimizer states. Of the {self._limit(home, rank):,} bytes for "
            f"{kind} on rank {rank}, {where}, {left:,} are left: {size - left:,} bytes are missing. All {kind} need "
            f"{self._size(shard for shard in self._bytes_of if home_of[shard.table] is home):,} bytes, all ranks have "
            f"{sum(self._limits[home]):,}. Give more ranks, a table store, tensor trains, more row shards or fewer "
            "columns"
        )

    def _home(self, number: int, is_replicated: bool) -> Home:
        """Without limits nobody asks where a table is."""
        return self._homes.of(self.tables[number], is_replicated=is_replicated) if self._limits else self._homes.memory

    def _limit(self, home: Home, rank: int) -> int:
        return self._limits[home][rank] if home in self._limits else UNLIMITED

    def _size(self, shards: Iterable[Shard]) -> int:
        return sum(self._bytes_of[shard] for shard in shards)

    def _left(self, home: Home) -> list[int]:
        """Bytes of each rank."""
        return [self._limit(home, rank) - used for rank, used in enumerate(self._used[home])]
