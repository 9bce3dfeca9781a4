# SPDX-License-Identifier: Apache-2.0
"""Lookups of rows, not of sums: each distinct row comes once, and its gradient goes back once, summed.

A rank asks for the distinct rows of each of its *nodes*: the largest subtrees of the tree over slices that its slices
make (one, where the world is a power of two). The sum of a row's gradients over a node is what its owner needs.

Ids, rows and sums travel in one order: destination, node of the asking rank, part of the owner, column shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.id_directory import shards_of_ids
from sennit.runtime.kernels.ids import distinct as distinct_rows
from sennit.runtime.kernels.layout import ShardMemory
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import MAX_ROW_COUNT, Pooling, ShardSpec
from sennit.runtime.sharded.batch_parts import joined
from sennit.runtime.sharded.dealing import by_shard
from sennit.runtime.sharded.engines import Settings
from sennit.runtime.sharded.exchange import Arrived, Exchange, Given, Ready
from sennit.runtime.sharded.features import Outgoing, features_of
from sennit.runtime.sharded.placement import EVERYWHERE
from sennit.runtime.sharded.shards import Announced, Shards
from sennit.runtime.sharded.slices import GlobalBatch, Slices
from sennit.runtime.sharded.tables import Range, Shard
from sennit.runtime.sharded.wire import Wire
from sennit.transport.errors import ArgumentError


class Part(NamedTuple):
    """Rows of a row shard, and the column shards of them that a rank has."""

    table: int
    row: int
    columns: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What a rank looks up in one node of its slices."""

    lookups: Lookups
    distinct: dict[int, Tensor]
    """The distinct rows of each table: int64, rising."""

    borders: dict[int, list[int]]
    """For each table: where each row shard begins in `distinct`, and the end of the last one."""

    places: dict[int, Tensor]
    """For each table: where the row of each lookup is in `distinct`, int64, in the order of `lookups`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsArrived(Arrived):
    """The rows that all peers asked this rank for, and what it asked them for."""

    sizes: list[int]
    """Floats of the answer to each peer."""

    nodes: list[Node]
    """What this rank looks up."""

    rows: dict[int, int]
    """For each feature of which ids are ignored: the rows of its result."""

    kept: dict[int, Tensor]
    """For these features: int64 [ids that are looked up], their places in the result."""


class RowExchange(Exchange[RowsArrived]):
    """Lookups that return the row of each id."""

    poolings = (Pooling.NONE,)

    def __init__(
        self,
        settings: Settings,
        shards: Shards,
        number_of: Mapping[Shard, int],
        features: Sequence[int],
        peers: Sequence[int],
        wire: Wire,
    ) -> None:
        super().__init__(settings, shards, number_of, features, peers, wire)
        table_of = [table for _, table in features_of(settings.tables)]
        self._numbers = sorted({table_of[feature] for feature in features})
        self._of_table = {
            table: [feature for feature in features if table_of[feature] == table] for table in self._numbers
        }
        self._parts = [_parts_on(settings, self._numbers, rank) for rank in peers]
        self._nodes = [settings.slices.nodes_of(rank) for rank in peers]
        self._summer = summer(settings, self._numbers)
        self._codec = self._wire.codec_of(
            settings.tables[table].column_range(column).size
            for table in self._numbers
            for column in range(settings.tables[table].column_shards)
        )

    @staticmethod
    def result_rows(outgoing: Outgoing) -> list[int]:
        found: list[int] = outgoing.given_lengths.sum(1, dtype=torch.int64).tolist()
        return found

    def ready(self, outgoing: Outgoing, sizes: Sequence[int]) -> Ready:
        if outgoing.weights is not None:
            raise ArgumentError("weights for ids that are not pooled; allowed: none")
        nodes = [self._node(outgoing, slices) for slices in slice_ranges(self._slices, sizes)]
        counts = [[end - start for _, _, start, end in self._requests(nodes, peer)] for peer in self._world]

        def send(told: Sequence[int], batch: GlobalBatch) -> RowsArrived:
            announced, floats = self._ask(nodes, counts, told)
            ignoring = [feature for feature in self._features if feature in outgoing.kept]
            return RowsArrived(
                announced=announced,
                sizes=floats,
                nodes=nodes,
                rows={feature: int(outgoing.given_lengths[feature].sum()) for feature in ignoring},
                kept={feature: outgoing.kept[feature].nonzero().view(-1).to(self._device) for feature in ignoring},
            )

        return Ready([sum(of_peer) for of_peer in counts], send)

    def _ask(
        self, nodes: Sequence[Node], counts: Sequence[Sequence[int]], told: Sequence[int]
    ) -> tuple[Announced, list[int]]:
        """Asks the owners for the rows of all nodes: `counts` by peer and request. `told`: what each peer asks for.

        Returns the rows that all peers asked this rank for, and the floats of the answer to each of them.
        """
        mine = self._parts[self._me]
        flat = [count for of_peer in counts for count in of_peer]
        sizes = [len(of_node) * len(mine) for of_node in self._nodes]
        own = self._wire.all_to_all(
            "counts", torch.tensor(flat, dtype=torch.int64), sizes, [len(of_peer) for of_peer in counts]
        )
        asked = [part.tolist() for part in torch.split(own, sizes)]
        wanted = [
            nodes[node].distinct[part.table][start:end] - self._tables[part.table].id_of_first_row(part.row)
            for peer in self._world
            for node, part, start, end in self._requests(nodes, peer)
        ]
        ids = self._wire.all_to_all("ids", joined(wanted, torch.int64), told, [sum(of_peer) for of_peer in counts])
        batch, answers = self._batch(ids, asked)
        return self._shards.announce(batch), answers

    def results(self, arrived: RowsArrived) -> dict[int, Tensor]:
        """The row of each id, in the order of ids. Ignored ids have a row of zeros."""
        found = self._by_lookup(arrived)
        for feature, kept in arrived.kept.items():
            rows = found[feature]
            found[feature] = rows.new_zeros(arrived.rows[feature], rows.shape[1]).index_copy_(0, kept, rows)
        return found

    def give(self, arrived: RowsArrived, gradients: Mapping[int, Tensor]) -> tuple[Given, dict[int, Tensor]]:
        of_lookups = dict(gradients)
        for feature, kept in arrived.kept.items():
            of_lookups[feature] = of_lookups[feature].index_select(0, kept)
        announced = arrived.announced
        return Given(announced, announced.batch, self._exchanged(arrived, of_lookups)), {}

    def _by_lookup(self, arrived: RowsArrived) -> dict[int, Tensor]:
        """Gets the rows. Returns the row of each lookup, float32 [lookups, dim] by feature."""
        nodes, answer = arrived.nodes, self._shards.lookup(arrived.announced)
        found = self._wire.all_to_all("rows", answer, self._own_sizes(nodes), arrived.sizes, codec=self._codec)
        pieces: dict[int, list[Tensor]] = {feature: [] for feature in self._features}
        for node, rows in zip(nodes, self._assembled(nodes, found), strict=True):
            for number, table in enumerate(self._numbers):
                own = [
                    piece
                    for block, piece in zip(node.lookups.batch.table_of_block, node.lookups.pieces, strict=True)
                    if block == number
                ]
                chosen = rows[table].index_select(0, node.places[table].to(self._device))
                if len(self._of_table[table]) == 1:
                    pieces[own[0][0]].append(chosen)
                    continue
                sizes = [piece.stop - piece.start for _, piece in own]
                for (feature, _), part in zip(own, torch.split(chosen, sizes), strict=True):
                    pieces[feature].append(part)
        return {feature: parts[0] if len(parts) == 1 else torch.cat(parts) for feature, parts in pieces.items()}

    def _exchanged(self, arrived: RowsArrived, gradients: Mapping[int, Tensor]) -> Tensor:
        """Sends the sum of each row's gradients in each node to its owner. Returns the sums for this rank's rows.

        `gradients`: float32 [lookups, dim] by feature. The result is float32, flat.
        """
        nodes = arrived.nodes
        sums: list[dict[int, Tensor]] = []
        for node in nodes:
            found = self._summer.sum_rows(node.lookups.batch, node.lookups.gathered(gradients, self._device))
            of_table = {self._numbers[one.table]: one.sums for one in found}
            sums.append(
                {
                    table: of_table.get(table, torch.empty(0, self._tables[table].dim, device=self._device))
                    for table in node.distinct
                }
            )
        parts = [
            sums[node][part.table][start:end, columns.low : columns.high].reshape(-1)
            for node, part, start, end, columns in self._answers(nodes)
        ]
        own = joined(parts, torch.float32, self._device)
        return self._wire.all_to_all("gradients", own, arrived.sizes, self._own_sizes(nodes), codec=self._codec)

    @property
    def _world(self) -> range:
        return range(len(self._peers))

    def _node(self, ids: Outgoing, slices: Sequence[tuple[int, int, int]]) -> Node:
        lookups = lookups_of(ids, list(enumerate(self._of_table.values())), slices)
        sizes = [piece.stop - piece.start for _, piece in lookups.pieces]
        of_table: dict[int, list[Tensor]] = {table: [] for table in self._numbers}
        for number, values in zip(lookups.batch.table_of_block, torch.split(lookups.batch.values, sizes), strict=True):
            of_table[self._numbers[number]].append(values)
        distinct, places, borders = {}, {}, {}
        for table, values_of in of_table.items():
            spec = self._tables[table]
            if spec.ids is not None:
                distinct[table], places[table], borders[table] = _dealt_ids(torch.cat(values_of), spec.row_shards)
                continue
            rows, places[table] = distinct_rows(torch.cat(values_of))
            distinct[table] = rows
            starts = torch.tensor(spec.row_borders)
            borders[table] = torch.searchsorted(rows, starts).tolist()
        if any(self._tables[table].ids is not None for table in of_table):
            # Sums of rows need numbers, and ids of a dynamic table are none: their places among the distinct ones are.
            rows_of = {
                table: iter(own if self._tables[table].ids is None else torch.split(places[table], list(map(len, own))))
                for table, own in of_table.items()
            }
            parts = [next(rows_of[self._numbers[number]]) for number in lookups.batch.table_of_block]
            lookups = replace(lookups, batch=replace(lookups.batch, values=joined(parts, torch.int64)))
        return Node(lookups=lookups, distinct=distinct, borders=borders, places=places)

    def _requests(self, nodes: Sequence[Node], rank: int) -> Iterator[tuple[int, Part, int, int]]:
        """What this rank asks another for: node, part, and the range among the node's distinct rows of the table."""
        for number, node in enumerate(nodes):
            for part in self._parts[rank]:
                start, end = node.borders[part.table][part.row : part.row + 2]
                yield number, part, start, end

    def _answers(self, nodes: Sequence[Node]) -> Iterator[tuple[int, Part, int, int, Range]]:
        """What this rank gets, in the order of the wire: each request, once for each column shard."""
        for rank in self._world:
            for number, part, start, end in self._requests(nodes, rank):
                for column in part.columns:
                    yield number, part, start, end, self._tables[part.table].column_range(column)

    def _own_sizes(self, nodes: Sequence[Node]) -> list[int]:
        """Floats that this rank gets from each other one."""
        return [
            sum((end - start) * self._width(part) for _, part, start, end in self._requests(nodes, rank))
            for rank in self._world
        ]

    def _width(self, part: Part) -> int:
        return sum(self._tables[part.table].column_range(column).size for column in part.columns)

    def _batch(self, ids: Tensor, asked: Sequence[Sequence[int]]) -> tuple[Batch, list[int]]:
        """What others asked for, as lookups of this rank's engine; and the floats of the answer to each of them."""
        mine = self._parts[self._me]
        counts = [count for of_rank in asked for count in of_rank]
        parts = mine * sum(len(of_node) for of_node in self._nodes)
        firsts = [node.low for of_node in self._nodes for node in of_node for _ in mine]
        blocks = [
            (self._number_of[Shard(part.table, part.row, column)], first, count, piece)
            for part, first, count, piece in zip(parts, firsts, counts, torch.split(ids, counts), strict=True)
            for column in part.columns
        ]
        values = ids if len(blocks) == len(parts) else torch.cat([piece for *_, piece in blocks])
        batch = Batch(
            table_of_block=tuple(table for table, *_ in blocks),
            bags_of_block=tuple(count for _, _, count, _ in blocks),
            slice_of_block=tuple(first for _, first, _, _ in blocks),
            lengths=torch.ones(len(values), dtype=torch.int32),
            values=values,
            pooling=Pooling.NONE,
        )
        widths = [self._width(part) for part in mine]
        return batch, [
            sum(count * widths[place % len(mine)] for place, count in enumerate(of_rank)) for of_rank in asked
        ]

    def _assembled(self, nodes: Sequence[Node], found: Tensor) -> list[dict[int, Tensor]]:
        """Puts rows together from their row and column shards."""
        shards = {table: (self._tables[table].row_shards, self._tables[table].column_shards) for table in self._numbers}
        whole = {table for table, counts in shards.items() if counts == (1, 1)}
        rows = [
            {
                table: torch.empty(len(node.distinct[table]), self._tables[table].dim, device=self._device)
                for table in self._numbers
                if table not in whole
            }
            for node in nodes
        ]
        start = 0
        for number, part, first, end, columns in self._answers(nodes):
            values = found[start : start + (end - first) * columns.size].view(end - first, columns.size)
            start += values.numel()
            if part.table in whole:
                rows[number][part.table] = values
            else:
                rows[number][part.table][first:end, columns.low : columns.high] = values
        return rows


def _dealt_ids(values: Tensor, shards: int) -> tuple[Tensor, Tensor, list[int]]:
    """The distinct ids of a dynamic table by row shard, rising in each; where each value is among them; and where each
    shard begins, with the end of the last one.
    """
    ids, inverse = torch.unique(values.to(torch.int64), return_inverse=True)
    order, counts = by_shard(shards_of_ids(ids, shards), shards)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return ids[order], place[inverse], [0, *itertools.accumulate(counts)]


def slice_ranges(slices: Slices, sizes: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """This rank's slices by node: the number of each, and the range of its samples among the rank's samples.

    `sizes`: samples in each of its slices.
    """
    parts = dict(zip(range(*slices.own), slices.parts(sizes), strict=True))
    return [
        [(number, parts[number].start, parts[number].stop) for number in range(*node)]
        for node in slices.nodes_of(slices.rank)
    ]


def summer(settings: Settings, numbers: Sequence[int]) -> EmbeddingEngine:
    """An engine that can sum gradients of these tables' rows. It has no rows."""
    specs = []
    for table in (settings.tables[number] for number in numbers):
        # A batch may have more ids than a dynamic table has rows.
        count = table.rows if table.ids is None else MAX_ROW_COUNT
        specs.append(ShardSpec(name=table.name, row_count=count, dim=table.dim))
    return EmbeddingEngine(
        specs,
        OptimizerSpec(kind=Optimizer.SGD),
        implementation_name=settings.implementation_name,
        device=settings.device,
        threads=settings.threads,
        memory=[
            ShardMemory(spec=spec, weight=torch.empty(0, spec.dim, device=settings.device), states={}) for spec in specs
        ],
    )


def _parts_on(settings: Settings, numbers: Sequence[int], rank: int) -> list[Part]:
    found = []
    for table in numbers:
        for row in range(settings.tables[table].row_shards):
            columns = tuple(
                column
                for column in range(settings.tables[table].column_shards)
                if settings.placement.owner_of[Shard(table, row, column)] in (rank, EVERYWHERE)
            )
            if columns:
                found.append(Part(table, row, columns))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookups:
    """A rank's own ids in some slices, as a batch of the kernels: slice after slice in each table."""

    batch: Batch
    pieces: tuple[tuple[int, slice], ...]
    """The feature of each block, and the block's range among the lookups of this feature."""

    def gathered(self, of_feature: Mapping[int, Tensor], device: torch.device) -> Tensor:
        """The values of each lookup, flat, on `device`, in the order of the batch. `of_feature`: [lookups, n]."""
        parts = [of_feature[feature][piece].reshape(-1) for feature, piece in self.pieces]
        return joined(parts, torch.float32, device)


def lookups_of(
    ids: Outgoing, tables: Sequence[tuple[int, Sequence[int]]], slices: Sequence[tuple[int, int, int]]
) -> Lookups:
    """The ids in these `slices` (number, first sample, end), for tables of an engine and the features of each."""
    starts = torch.zeros(ids.lengths.shape[0], ids.sample_count + 1, dtype=torch.int64)
    torch.cumsum(ids.lengths, 1, out=starts[:, 1:])
    of_feature = torch.split(ids.values, ids.counts)
    blocks = [
        (table, feature, number, first, end)
        for table, features in tables
        for number, first, end in slices
        for feature in features
    ]
    borders = sorted({place for _, first, end in slices for place in (first, end)})
    starts_at = dict(zip(borders, starts[:, borders].t().tolist(), strict=True))
    pieces = [
        (feature, slice(starts_at[first][feature], starts_at[end][feature])) for _, feature, _, first, end in blocks
    ]
    lengths = [ids.lengths[feature, first:end] for _, feature, _, first, end in blocks]
    values = [of_feature[feature][piece] for feature, piece in pieces]
    return Lookups(
        batch=Batch(
            table_of_block=tuple(table for table, *_ in blocks),
            bags_of_block=tuple(end - first for *_, first, end in blocks),
            slice_of_block=tuple(number for _, _, number, _, _ in blocks),
            lengths=joined(lengths, ids.lengths.dtype),
            values=joined(values, ids.values.dtype),
            pooling=Pooling.NONE,
        ),
        pieces=tuple(pieces),
    )
