# SPDX-License-Identifier: Apache-2.0
"""Searches for the placement with the least predicted time: greedy, exact for few tables, then local search.

The number of placements that are rated is limited, not the time. So the same problem has the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sennit.runtime.planner.step_time import Kind, Rating, Work
from sennit.runtime.sharded.placement import EVERYWHERE, SHARDINGS, Placement, place
from sennit.runtime.sharded.tables import Home, Shard, Table, shard_name
from sennit.transport.errors import ConfigError

Owners = npt.NDArray[np.int64]
"""[row shards, column shards] of a table: the rank of each, or all `EVERYWHERE`."""

# Ranks that a table is tried on: those with the least to do.
CANDIDATES: Final = 12
# Placements of single tables that local search rates, and how many rounds without gain end it.
MOVES_MAX: Final = 60_000
# Tables of the slowest rank that a round of local search tries elsewhere.
TABLES_A_ROUND: Final = 24
# Tables of an exact search, and the partial placements that it may look at.
EXACT_TABLES: Final = 10
EXACT_NODES: Final = 30_000
# A gain below this share is none.
GAIN_MIN: Final = 1e-6


@dataclass(frozen=True, kw_only=True)
class Found:
    """A placement with its prediction."""

    name: str
    """The name of the search or sharding that gave it."""
    owners: list[Owners]
    work: Work
    phases: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    def placement(self, rating: Rating) -> Placement:
        """The placement as `ShardedEmbeddingBags` takes it."""
        owner_of = {
            Shard(number, row, column): int(owners[row, column])
            for number, owners in enumerate(self.owners)
            for row in range(owners.shape[0])
            for column in range(owners.shape[1])
        }
        replicated = frozenset(number for number, owners in enumerate(self.owners) if owners[0, 0] == EVERYWHERE)
        return Placement(world_size=rating.problem.cluster.ranks, owner_of=owner_of, replicated=replicated)

    def shards(self, rating: Rating) -> dict[str, int]:
        """The rank of each shard by name."""
        tables = rating.problem.tables
        return {shard_name(tables, shard): rank for shard, rank in self.placement(rating).owner_of.items()}


def rate(rating: Rating, name: str, owners: Sequence[Owners]) -> Found:
    """The prediction for a placement."""
    work = rating.total(owners)
    phases = {phase: float(seconds) for phase, seconds in rating.phases(work).items()}
    return Found(name=name, owners=list(owners), work=work, phases=phases)


def of_placement(rating: Rating, name: str, placement: Placement) -> Found:
    owners = [
        np.array(
            [[placement.owner_of[Shard(number, row, column)] for column in range(table.column_shards)]
             for row in range(table.row_shards)]
        )
        for number, table in enumerate(rating.problem.tables)
    ]  # fmt: skip
    return rate(rating, name, owners)


def round_robin(rating: Rating) -> Found:
    """Whole tables, one rank after the other."""
    ranks = rating.problem.cluster.ranks
    return rate(
        rating,
        "round robin",
        [
            np.full((table.row_shards, table.column_shards), number % ranks)
            for number, table in enumerate(rating.problem.tables)
        ],
    )


def named(rating: Rating) -> Iterator[Found]:
    """The classic shardings that have room, each for all tables. Raises nothing."""
    cluster, tables = rating.problem.cluster, rating.problem.tables
    for name in SHARDINGS:
        if any(table.train_rank is not None for table in tables) and name not in ("table_wise", "data_parallel"):
            continue
        if name == "data_parallel" and not all(map(_may_be_replicated, tables)):
            continue
        if name in ("row_wise", "table_row_wise", "grid") and all(table.row_shards == 1 for table in tables):
            continue
        if name in ("column_wise", "table_column_wise", "grid") and all(table.column_shards == 1 for table in tables):
            continue
        if name.startswith("table_") and name != "table_wise" and cluster.hosts == 1:
            continue
        try:
            placement = place(
                tables,
                cluster.ranks,
                name,
                local_ranks=cluster.local_ranks,
                limits=cluster.limits_by_home,
                homes=cluster.homes,
            )
        except ConfigError:
            continue
        found = of_placement(rating, name, placement)
        if rating.fits(found.work):
            yield found


def _may_be_replicated(table: Table) -> bool:
    """A file holds shards of one rank, and so does a directory of ids."""
    return table.home is not Home.FILE and table.ids is None


class _Search:
    """The work of each table in its present place, and the sum."""

    def __init__(self, rating: Rating) -> None:
        self.rating, self.problem = rating, rating.problem
        self.owners: dict[int, Owners] = {}
        self.works: dict[int, Work] = {}
        self.work = np.zeros_like(rating.total([]))
        self.rated = 0
        self._whole: dict[int, Work] = {}

    def put(self, number: int, owners: Owners, work: Work) -> None:
        self.take(number)
        self.owners[number], self.works[number] = owners, work
        self.work = self.work + work

    def take(self, number: int) -> None:
        if number in self.works:
            self.work = self.work - self.works.pop(number)
            del self.owners[number]

    def options(self, number: int, without: Work) -> list[tuple[Owners, Work]]:
        """Places of a table that are worth a look, given what the ranks do already."""
        table, cluster = self.problem.tables[number], self.problem.cluster
        shape = (table.row_shards, table.column_shards)
        lightest = np.argsort(self._load(without), kind="stable")[:CANDIDATES]
        found = [(np.full(shape, rank), self.whole_on(number, int(rank))) for rank in lightest]
        spreads: list[Owners] = [np.full(shape, EVERYWHERE)] if cluster.ranks > 1 and _may_be_replicated(table) else []
        if table.train_rank is None and cluster.ranks > 1:
            spreads += self._spreads(number, lightest)
        return found + [(owners, self.rating.work(number, owners)) for owners in spreads]

    def _load(self, work: Work) -> Work:
        load = self.rating.rank_seconds(work)
        limits = self.problem.cluster.limits
        if limits is not None:
            # Nearly full ranks come last.
            load = load + (work[Kind.MEMORY] / np.maximum(np.asarray(limits, np.float64), 1.0) > 0.98) * 1e3
        return load

    def whole_on(self, number: int, rank: int) -> Work:
        """A whole table on a rank: that on rank 0, with its own work elsewhere."""
        if number not in self._whole:
            table = self.problem.tables[number]
            self._whole[number] = self.rating.work(number, np.zeros((table.row_shards, table.column_shards), np.int64))
        work = self._whole[number].copy()
        work[:, [0, rank]] = work[:, [rank, 0]]
        return work

    def _spreads(self, number: int, lightest: Any) -> Iterator[Owners]:
        """Its shards over ranks: all of them or those of a host, by rows, by columns and by both."""
        table, cluster = self.problem.tables[number], self.problem.cluster
        rows, columns, ranks = table.row_shards, table.column_shards, cluster.ranks
        local, host = cluster.local_ranks, int(lightest[0]) // cluster.local_ranks
        groups = [np.arange(ranks)]
        if cluster.hosts > 1:
            groups.append(np.arange(host * local, (host + 1) * local))
        shares = self.problem.uses[number].shares(rows)
        for group in groups:
            if rows > 1:
                even = group[np.arange(rows) * len(group) // rows]
                middle = np.cumsum(shares) - shares / 2
                by_use = group[np.minimum((middle * len(group)).astype(np.int64), len(group) - 1)]
                for order in (even, by_use):
                    yield np.repeat(order[:, None], columns, 1)
            if columns > 1:
                light = [rank for rank in np.argsort(self._load(self.work), kind="stable") if rank in group]
                yield np.repeat(np.array(light)[np.arange(columns) % len(light)][None, :], rows, 0)
            if rows > 1 and columns > 1 and len(group) > 1:
                parts = min(columns, len(group))
                size = len(group) // parts
                column, row = np.meshgrid(np.arange(columns) % parts, np.arange(rows) * size // rows)
                yield group[column * size + row]
        if rows > 1 and len(lightest) > 1:
            # The shards also try a few ranks that have little to do.
            for count in (2, 4):
                if count < min(len(lightest), ranks):
                    yield np.repeat(np.sort(lightest[:count])[np.arange(rows) * count // rows][:, None], columns, 1)

    def best(self, number: int, options: Sequence[tuple[Owners, Work]]) -> tuple[float, Owners, Work] | None:
        """The option with the least time that has room. `work` is without the table."""
        works = self.work + np.stack([work for _, work in options])
        self.rated += len(options)
        # The sum breaks ties: what hides behind a slower rank today may not tomorrow.
        seconds = self.rating.seconds(works) + 1e-3 * self.mean_load(works)
        seconds = np.where(self.rating.fits(works), seconds, np.inf)
        at = int(np.argmin(seconds))
        return None if not np.isfinite(seconds[at]) else (float(seconds[at]), *options[at])

    def mean_load(self, work: Work) -> Any:
        """Of one placement, or of each of several, [...]."""
        load = self.rating.rank_seconds(work)
        return np.sqrt((load**2).mean(-1))

    def seconds(self) -> float:
        return float(self.rating.seconds(self.work)) + 1e-3 * float(self.mean_load(self.work))

    def found(self, name: str) -> Found:
        return rate(self.rating, name, [self.owners[number] for number in range(len(self.problem.tables))])


def greedy(rating: Rating) -> Found:
    """The tables with the most work first, each where the step is then the shortest.

    Raises `ConfigError`, which names table and tier, if one has no room.
    """
    search = _Search(rating)
    first = {
        number: rating.work(number, np.zeros((table.row_shards, table.column_shards), np.int64))
        for number, table in enumerate(rating.problem.tables)
    }
    limits = rating.problem.cluster.limits

    def weight(number: int) -> float:
        load = float(rating.rank_seconds(first[number])[0])
        memory = 0.0 if limits is None else float(first[number][Kind.MEMORY, 0]) / max(limits)
        # Tables that hardly fit go first.
        return load + (memory > 0.2) * 1e3 * memory

    # Tables without a place can still fill ranks that have little to do.
    rest = sum((_spread_evenly(work) for work in first.values()), search.work)
    for number in sorted(first, key=lambda one: (-weight(one), one)):
        rest = rest - _spread_evenly(first[number])
        options = search.options(number, search.work)
        works = search.work + np.stack([work for _, work in options])
        planned = works + rest
        load, all_load = rating.rank_seconds(works), rating.rank_seconds(planned)
        # All of it in balance, and what no balance can mend.
        seconds = rating.seconds(np.broadcast_to(planned.mean(-1, keepdims=True), planned.shape).copy())
        seconds = seconds + np.maximum(load.max(-1) - all_load.mean(-1), 0) + 1e-3 * load.max(-1)
        seconds = np.where(rating.fits(works), seconds, np.inf)
        at = int(np.argmin(seconds))
        if not np.isfinite(seconds[at]):
            return _by_memory(rating)
        search.put(number, *options[at])
    return search.found("greedy")


def _spread_evenly(work: Work) -> Work:
    return np.broadcast_to(work.mean(1, keepdims=True), work.shape)


def _by_memory(rating: Rating) -> Found:
    """What `place` finds by memory alone; it says which table has no room."""
    cluster, tables = rating.problem.cluster, rating.problem.tables
    wanted = {
        table.name: "row_wise" if table.row_shards > 1 else "column_wise" if table.column_shards > 1 else "table_wise"
        for table in tables
    }
    try:
        placement = place(tables, cluster.ranks, wanted, limits=cluster.limits_by_home, homes=cluster.homes)
    except ConfigError as error:
        raise ConfigError(f"{cluster.source} cannot hold the model{cluster.limited_tier}: {error}") from None
    found = of_placement(rating, "greedy", placement)
    if not rating.fits(found.work):
        raise ConfigError(f"{cluster.source} cannot hold in memory what of the model is not in files")
    return found


def local(rating: Rating, start: Found, moves_max: int = MOVES_MAX) -> Found:
    """Moves tables of the slowest ranks, and single shards, and swaps tables, while the step gets shorter."""
    search = _Search(rating)
    for number, owners in enumerate(start.owners):
        search.put(number, owners, rating.work(number, owners))
    best = search.seconds()
    gained = True
    while gained and search.rated < moves_max:
        gained = False
        load = rating.rank_seconds(search.work)
        for rank in np.argsort(-load, kind="stable")[: 1 if len(load) > 16 else 4]:
            for number in _tables_on(search, int(rank)):
                was = search.owners[number], search.works[number]
                search.take(number)
                options = search.options(number, search.work) + _of_shards(search, number, was[0])
                chosen = search.best(number, options)
                if chosen is not None and chosen[0] < best * (1 - GAIN_MIN):
                    best, gained = chosen[0], True
                    search.put(number, *chosen[1:])
                else:
                    search.put(number, *was)
                if search.rated >= moves_max:
                    break
            if gained:
                break
        if not gained:
            best, gained = _swapped(search, best, moves_max)
    found = search.found(f"{start.name}, then local search")
    return found if found.seconds < start.seconds else start


def _tables_on(search: _Search, rank: int) -> list[int]:
    """Numbers of the tables on a rank, those with the most work there first. Replicated tables are among them."""
    weight = {
        number: float(search.rating.rank_seconds(work)[rank])
        for number, work in search.works.items()
        if rank in search.owners[number] or search.owners[number].flat[0] == EVERYWHERE
    }
    return sorted(weight, key=lambda number: (-weight[number], number))[:TABLES_A_ROUND]


def _of_shards(search: _Search, number: int, owners: Owners) -> list[tuple[Owners, Work]]:
    """The table with one more row shard on a lighter rank."""
    if owners.size == 1 or owners.flat[0] == EVERYWHERE:
        return []
    load = search.rating.rank_seconds(search.work)
    lightest = np.argsort(load, kind="stable")[:3]
    found = []
    for row in range(min(owners.shape[0], 64)):
        for rank in lightest:
            moved = owners.copy()
            moved[row] = rank
            if (moved != owners).any():
                found.append((moved, search.rating.work(number, moved)))
    return found


def _swapped(search: _Search, best: float, moves_max: int) -> tuple[float, bool]:
    """Swaps a whole table of the slowest rank with one of another rank."""
    load = search.rating.rank_seconds(search.work)
    slowest = int(np.argmax(load))
    whole = {number: int(one.flat[0]) for number, one in search.owners.items() if (one == one.flat[0]).all()}
    others = [rank for rank in np.argsort(load, kind="stable")[:CANDIDATES] if rank != slowest]
    for mine in [number for number in _tables_on(search, slowest) if whole.get(number) == slowest]:
        pairs = [
            (other, rank)
            for rank in others
            for other in [number for number in _tables_on(search, int(rank)) if whole.get(number) == rank][:6]
        ]
        if not pairs or search.rated >= moves_max:
            continue
        without = search.work - search.works[mine]
        works = np.stack(
            [
                without - search.works[other] + search.whole_on(mine, int(rank)) + search.whole_on(other, slowest)
                for other, rank in pairs
            ]
        )
        search.rated += len(pairs)
        seconds = search.rating.seconds(works) + 1e-3 * search.mean_load(works)
        seconds = np.where(search.rating.fits(works), seconds, np.inf)
        at = int(np.argmin(seconds))
        if seconds[at] < best * (1 - GAIN_MIN):
            other, rank = pairs[at]
            for number, to in ((mine, int(rank)), (other, slowest)):
                search.put(number, np.full_like(search.owners[number], to), search.whole_on(number, to))
            return float(seconds[at]), True
    return best, False


def exact(rating: Rating, start: Found, nodes_max: int = EXACT_NODES) -> Found | None:
    """The best of all placements whose tables are whole, replicated or spread as `local` may spread them.

    None if the problem is too large. Work only grows with tables, so a partial placement that is slower than the best
    whole one is left.
    """
    tables, cluster = rating.problem.tables, rating.problem.cluster
    if len(tables) > EXACT_TABLES or cluster.ranks > CANDIDATES:
        return None
    search = _Search(rating)
    order = sorted(
        range(len(tables)), key=lambda n: (-float(rating.rank_seconds(rating.work(n, start.owners[n])).max()), n)
    )
    options = {number: search.options(number, search.work) for number in order}
    best: list[Any] = [start.seconds, dict(enumerate(start.owners))]
    seen = 0

    def visit(depth: int, work: Work, chosen: dict[int, Owners]) -> bool:
        nonlocal seen
        if depth == len(order):
            best[:] = [float(rating.seconds(work)), dict(chosen)]
            return True
        number = order[depth]
        works = work + np.stack([one for _, one in options[number]])
        seen += len(works)
        if seen > nodes_max:
            return False
        seconds = np.where(rating.fits(works), rating.seconds(works), np.inf)
        for at in np.argsort(seconds, kind="stable"):
            if seconds[at] >= best[0] * (1 - GAIN_MIN):
                break
            if not visit(depth + 1, works[at], chosen | {number: options[number][at][0]}):
                return False
        return True

    if not visit(0, search.work, {}):
        return None
    return rate(rating, "exact", [best[1][number] for number in range(len(tables))])


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The result of a search: the best placement, and the others that were rated, the best first."""

    best: Found
    others: list[Found]
    is_proven: bool
    """Whether no placement of the kinds that are tried is better."""


def search(rating: Rating, *, exact_nodes: int = EXACT_NODES) -> Searched:
    """Raises `ConfigError` if the cluster cannot hold the model."""
    first = greedy(rating)
    found = [first, *named(rating)]
    robin = round_robin(rating)
    if rating.fits(robin.work):
        found.append(robin)
    found.sort(key=lambda one: one.seconds)
    starts = [found[0]] if found[0] is first else [found[0], first]
    best = min((local(rating, one) for one in starts), key=lambda one: one.seconds)
    proven = exact(rating, best, exact_nodes)
    if proven is not None and proven.seconds < best.seconds:
        best = proven
    others = [one for one in found if one is not best]
    return Searched(best=best, others=others, is_proven=proven is not None)
