# SPDX-License-Identifier: Apache-2.0
"""Pooled lookups of shards on other ranks: ids go out, sums of bags come back, and gradients go out again.

Each of the three is one AlltoAll. With whole tables nothing is rearranged on the way: the owner looks up what arrived
in its order, and what comes back is the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sennit.runtime.sharded.batch_parts import dealt, dealt_order, joined
from sennit.runtime.sharded.features import Outgoing, features_of
from sennit.runtime.sharded.owner import Arrived, Owner, Source, folded
from sennit.runtime.sharded.placement import Placement
from sennit.runtime.sharded.routes import Columns, Part, Sum, blocks_of, routes
from sennit.runtime.sharded.shards import Shards
from sennit.runtime.sharded.slices import Slices
from sennit.runtime.sharded.tables import Shard, Table
from sennit.runtime.sharded.wire import Wire
from sennit.transport.plans.tree import balanced, combinations


class Exchange:
    """The pooled lookups of the features whose tables are in one engine. Exchanges are collective."""

    def __init__(
        self,
        tables: Sequence[Table],
        chosen: Sequence[int],
        placement: Placement,
        slices: Slices,
        shards: Shards,
        table_of_shard: dict[Shard, int],
        wire: Wire,
    ) -> None:
        """`chosen`: numbers of the features. `table_of_shard`: this rank's shards in the engine."""
        self._tables, self._slices = tables, slices
        self._table_of = [tables[number] for _, number in features_of(tables)]
        self.routes = routes(tables, placement, chosen)
        own = slices.rank
        self.owner = Owner(
            tables,
            shards,
            table_of_shard,
            parts=self.routes.parts[own],
            sums=self.routes.sums[own],
            gradients=self.routes.gradients[own],
        )
        self._wire, self._device = wire, shards.engine.device
        self.features = sorted({part.feature for parts in self.routes.parts for part in parts})
        self._sum_places = [(rank, one) for rank, sums in enumerate(self.routes.sums) for one in sums]
        self._even = _Even(
            parts=len({len(parts) for parts in self.routes.parts}) == 1,
            sums=len(set(self._floats(self.routes.sums))) == 1,
            gradients=len(set(self._floats(self.routes.gradients))) == 1,
        )
        wide = any(self._table_of[feature].rows > 1 << 31 for feature in self.features)
        self._id_dtype = torch.int64 if wide else torch.int32
        self._codec = wire.codec_of(
            table.column_range(column).size
            for table in map(self._table_of.__getitem__, self.features)
            for column in range(table.column_shards)
        )

    def outgoing(self, ids: Outgoing) -> Packed:
        """This rank's ids by destination. Not collective."""
        values_of = torch.split(ids.values, ids.counts)
        weights_of = None if ids.host_weights is None else torch.split(ids.host_weights, ids.counts)
        by_part: dict[Part, tuple[Tensor, Tensor, Tensor | None]] = {}
        for feature in self.features:
            table, weights = self._table_of[feature], None if weights_of is None else weights_of[feature]
            if table.row_shards == 1:
                by_part[Part(feature, 0)] = (ids.lengths[feature], values_of[feature], weights)
                continue
            for row, part in enumerate(dealt(ids.lengths[feature], values_of[feature], table.row_borders, weights)):
                by_part[Part(feature, row)] = part
        chosen = [[by_part[part] for part in parts] for parts in self.routes.parts]
        flat = [part for parts in chosen for part in parts]
        weighted = [weights for *_, weights in flat if weights is not None]
        return Packed(
            counts=[sum(len(part[1]) for part in parts) for parts in chosen],
            lengths=joined([part[0] for part in flat], torch.int32),
            values=joined([part[1] for part in flat], self._id_dtype),
            weights=None if weights_of is None else joined(weighted, torch.float32),
        )

    def source(self, rank: int, global_batch: int) -> Source:
        """The samples of a rank, slice by slice."""
        span = self._slices.of(rank)
        return Source(first_slice=span.low, sizes=tuple(self._slices.sizes(span, global_batch)))

    def send(self, outgoing: Packed, counts: Sequence[int], global_batch: int) -> Arrived:
        """Sends ids to their owners. `counts`: how many ids each rank sends to this one."""
        sources = [self.source(rank, global_batch) for rank in range(self._slices.world_size)]
        mine = sources[self._slices.rank].sample_count
        send = [len(parts) * mine for parts in self.routes.parts]
        receive = [self.owner.part_count * source.sample_count for source in sources]
        even = self._even.parts and _is_even(sources)
        lengths = self._wire.all_to_all("lengths", outgoing.lengths, receive, send, even=even)
        values = self._wire.all_to_all("ids", outgoing.values, counts, outgoing.counts)
        weights = None
        if outgoing.weights is not None:
            weights = self._wire.all_to_all("weights", outgoing.weights, counts, outgoing.counts)
        return self.owner.arrive(sources, lengths, values, weights)

    def answers(self, arrived: Arrived) -> Tensor:
        """Looks up what arrived, and returns the sums that all owners made for this rank, in the order of the wire."""
        samples = [source.sample_count for source in arrived.sources]
        mine = samples[self._slices.rank]
        send = [self.owner.answer_size(count) for count in samples]
        receive = [mine * count for count in self._floats(self.routes.sums)]
        even = self._even.sums and _is_even(arrived.sources)
        return self._wire.all_to_all("sums", self.owner.answer(arrived), receive, send, codec=self._codec, even=even)

    def bags(self, answers: Tensor, samples: int) -> dict[int, Tensor]:
        """The sums of bags by feature, [samples, dim]. Of whole tables they are views of `answers`. Not collective."""
        found: dict[tuple[int, int], list[tuple[Sum, Tensor]]] = {}
        sizes = [samples * self._columns(one.feature, one.column) for _, one in self._sum_places]
        for (_, one), values in zip(self._sum_places, torch.split(answers, sizes), strict=True):
            sums = values.view(samples, self._columns(one.feature, one.column))
            found.setdefault((one.feature, one.column), []).append((one, sums))
        result = {}
        for feature in self.features:
            table = self._table_of[feature]
            columns = [_whole(found[feature, column], table.row_shards) for column in range(table.column_shards)]
            result[feature] = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
        return result

    def return_gradients(self, arrived: Arrived, gradients: dict[int, Tensor]) -> Tensor:
        """Sends gradients of bags, [samples, dim] by feature, to the owners of their rows.

        Returns those for this rank's shards, flat, as `Owner.by_slice` takes them.
        """
        samples = [source.sample_count for source in arrived.sources]
        mine = samples[self._slices.rank]
        send = [mine * count for count in self._floats(self.routes.gradients)]
        receive = [self.owner.gradient_size(count) for count in samples]
        even = self._even.gradients and _is_even(arrived.sources)
        packed = self.packed(gradients)
        return self._wire.all_to_all("gradients", packed, receive, send, codec=self._codec, even=even)

    def weight_gradients(self, ids: Outgoing, arrived: Arrived, gradient: Tensor) -> dict[int, Tensor]:
        """The gradients of this rank's weights by feature, [ids]. `gradient`: what `return_gradients` returned.

        An owner returns a gradient for each column shard. This rank adds them up in the tree over column shards, so
        bits do not depend on owners.
        """
        values_of = torch.split(ids.values, ids.counts)
        order_of: dict[int, Tensor] = {}
        counts: dict[Part, int] = {}
        for feature in self.features:
            order_of[feature], of_rows = dealt_order(values_of[feature], self._table_of[feature].row_borders)
            counts |= {Part(feature, row): count for row, count in enumerate(of_rows)}
        blocks = [blocks_of(sums, self._tables) for sums in self.routes.sums]
        sizes = [[counts[Part(block.feature, block.shard.row)] for block in of_rank] for of_rank in blocks]
        own, send = self.owner.weight_gradient(arrived, gradient)
        found = torch.split(
            self._wire.all_to_all("weight gradients", own, list(map(sum, sizes)), send),
            [size for of_rank in sizes for size in of_rank],
        )
        piece_of = {
            (block.feature, block.shard.row, block.shard.column): piece
            for block, piece in zip([block for of_rank in blocks for block in of_rank], found, strict=True)
        }
        result = {}
        for feature, order in order_of.items():
            table = self._table_of[feature]
            program = balanced(table.column_shards)
            rows = [
                folded([piece_of[feature, row, column] for column in range(table.column_shards)], program)
                for row in range(table.row_shards)
            ]
            result[feature] = torch.empty(len(order), device=self._device).scatter_(
                0, order.to(self._device), torch.cat(rows)
            )
        return result

    def packed(self, gradients: dict[int, Tensor]) -> Tensor:
        """The gradients of bags in the order of the wire. Not collective."""
        flat = [
            self._part_of_gradient(one, gradients[one.feature]) for places in self.routes.gradients for one in places
        ]
        return joined(flat, torch.float32, self._device)

    def _part_of_gradient(self, one: Columns, gradient: Tensor) -> Tensor:
        columns = self._table_of[one.feature].column_range(one.column)
        return gradient[:, columns.low : columns.high]

    def _floats(self, places: Sequence[Sequence[Sum | Columns]]) -> list[int]:
        """The floats of one sample that each rank gives or gets."""
        return [sum(self._columns(one.feature, one.column) for one in of_rank) for of_rank in places]

    def _columns(self, feature: int, column: int) -> int:
        return self._table_of[feature].column_range(column).size


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A rank's ids, in the order of the wire."""

    counts: list[int]
    """The number of ids for each rank."""

    lengths: Tensor
    values: Tensor
    weights: Tensor | None


class _Even(NamedTuple):
    """Which exchanges are equally large for all ranks, if all ranks have the same number of samples."""

    parts: bool
    sums: bool
    gradients: bool


def _is_even(sources: Sequence[Source]) -> bool:
    return len({source.sample_count for source in sources}) == 1


def _whole(sums: Sequence[tuple[Sum, Tensor]], row_shards: int) -> Tensor:
    """Adds sums of nodes up to the sum over all row shards."""
    ordered = sorted(sums, key=lambda entry: entry[0].node)
    program = combinations(tuple(one.node for one, _ in ordered), row_shards)
    return folded([values for _, values in ordered], program)
