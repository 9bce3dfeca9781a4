# SPDX-License-Identifier: Apache-2.0
"""The memory of each rank while shards are placed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from sennit.runtime.sharded.tables import Shard, Table, shard_name
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

    def __init__(self, tables: Sequence[Table], bytes_of: Mapping[Shard, int], limits: Sequence[int]) -> None:
        self.tables, self._bytes_of, self._limits = tables, bytes_of, list(limits)
        self.load = [0] * len(limits)
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
        for shards, wished, ranks in wishes:
            size = self._size(shards)
            fitting = [rank for rank in ranks if load[rank] + size <= self._limits[rank]]
            if not fitting or (wished == EVERYWHERE and len(fitting) < len(ranks)):
                return None
            rank = wished if wished in (*fitting, EVERYWHERE) else min(fitting, key=lambda one: (load[one], one))
            for one in ranks if rank == EVERYWHERE else (rank,):
                load[one] += size
            chosen.update(dict.fromkeys(shards, rank))
        return chosen

    def take(self, owner_of: Mapping[Shard, int]) -> None:
        """Counts shards to their ranks."""
        for shard, rank in owner_of.items():
            for one in range(len(self.load)) if rank == EVERYWHERE else (rank,):
                self.load[one] += self._bytes_of[shard]

    def by_memory(self, names: Mapping[str, str]) -> dict[Shard, int]:
        """The owner of each shard: from empty ranks, the largest first, each to the rank with the most room.

        `names`: the sharding of each table. Raises `ConfigError` if something has no room.
        """
        self.load = [0] * len(self.load)
        owner_of: dict[Shard, int] = {}
        parts = []
        for number, shards in self.shards.items():
            match names[self.tables[number].name]:
                case "data_parallel":
                    least = min(range(len(self.load)), key=self._left)
                    self._check(shards, least, "which has the least room")
                    owner_of.update(dict.fromkeys(shards, EVERYWHERE))
                    self.take(dict.fromkeys(shards, EVERYWHERE))
                case "table_wise":
                    parts.append(shards)
                case _:
                    parts += [[shard] for shard in shards]
        for shards in sorted(parts, key=lambda part: (-self._size(part), part)):
            rank = max(range(len(self.load)), key=lambda one: (self._left(one), -one))
            self._check(shards, rank, "which has the most room")
            owner_of.update(dict.fromkeys(shards, rank))
            self.take(dict.fromkeys(shards, rank))
        return owner_of

    def _check(self, shards: Sequence[Shard], rank: int, where: str) -> None:
        size, left, table = self._size(shards), self._left(rank), self.tables[shards[0].table]
        if size <= left:
            return
        is_whole = len(shards) == table.row_shards * table.column_shards
        what = (
            f"table {table.name}" if is_whole else f"shard {shard_name(self.tables, shards[0])} of table {table.name}"
        )
        raise ConfigError(
            f"{what} needs {size:,} bytes with its optimizer states. Of the {self._limits[rank]:,} bytes for tables on "
            f"rank {rank}, {where}, {left:,} are left: {size - left:,} bytes are missing. All tables need "
            f"{self._size(self._bytes_of):,} bytes, all ranks have {sum(self._limits):,}. Give more ranks, a table "
            "store, tensor trains, more row shards or fewer columns"
        )

    def _size(self, shards: Iterable[Shard]) -> int:
        return sum(self._bytes_of[shard] for shard in shards)

    def _left(self, rank: int) -> int:
        return self._limits[rank] - self.load[rank]
