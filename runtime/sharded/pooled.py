# SPDX-License-Identifier: Apache-2.0
"""Pooled lookups of shards on other ranks: ids go out, sums of bags come back, and gradients go out again.

Each of the three is one AlltoAll. With whole tables nothing is rearranged on the way: the owner looks up what arrived
in its order, and what comes back is the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.sharded.batch_parts import joined
from sennit.runtime.sharded.dealing import dealt, dealt_order
from sennit.runtime.sharded.engines import Settings
from sennit.runtime.sharded.exchange import Exchange, Given, Ready
from sennit.runtime.sharded.features import Outgoing, features_of
from sennit.runtime.sharded.owner import Owner, PooledArrived, Source, folded
from sennit.runtime.sharded.routes import Columns, Part, Sum, blocks_of, routes
from sennit.runtime.sharded.shards import Shards
from sennit.runtime.sharded.slices import GlobalBatch
from sennit.runtime.sharded.tables import Shard
from sennit.runtime.sharded.wire import Wire
from sennit.transport.plans.tree import balanced, combinations


class Packed(NamedTuple):
    """A rank's ids in the order of the wire."""

    counts: list[int]
    """The number of ids for each peer."""

    lengths: Tensor
    values: Tensor
    weights: Tensor | None


class PooledExchange(Exchange[PooledArrived]):
    """Lookups that return the sum, or the mean, of the rows of each bag."""

    poolings = (Pooling.SUM, Pooling.MEAN)

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
        self._table_of = [self._tables[number] for _, number in features_of(self._tables)]
        self._routes = routes(self._tables, settings.placement, self._features, peers)
        self._owner = Owner(
            self._tables,
            shards,
            number_of,
            parts=self._routes.parts[self._me],
            sums=self._routes.sums[self._me],
            gradients=self._routes.gradients[self._me],
        )
        self._sums = [one for sums in self._routes.sums for one in sums]
        self._even = _Even(
            parts=len({len(parts) for parts in self._routes.parts}) == 1,
            sums=len(set(self._floats(self._routes.sums))) == 1,
            gradients=len(set(self._floats(self._routes.gradients))) == 1,
        )
        wide = any(self._table_of[feature].has_wide_ids for feature in self._features)
        self._id_dtype = torch.int64 if wide else torch.int32
        self._codec = wire.codec_of(
            table.column_range(column).size
            for table in map(self._table_of.__getitem__, self._features)
            for column in range(table.column_shards)
        )

    @staticmethod
    def result_rows(outgoing: Outgoing) -> list[int]:
        return [outgoing.sample_count] * len(outgoing.counts)

    def ready(self, outgoing: Outgoing, sizes: Sequence[int]) -> Ready:
        packed = self._packed(outgoing)

        def send(counts: Sequence[int], batch: GlobalBatch) -> PooledArrived:
            return self._send(outgoing, packed, counts, batch)

        return Ready(packed.counts, send)

    def _packed(self, outgoing: Outgoing) -> Packed:
        values_of = torch.split(outgoing.values, outgoing.counts)
        weights_of = None if outgoing.host_weights is None else torch.split(outgoing.host_weights, outgoing.counts)
        by_part: dict[Part, tuple[Tensor, Tensor, Tensor | None]] = {}
        for feature in self._features:
            table, weights = self._table_of[feature], None if weights_of is None else weights_of[feature]
            lengths = outgoing.lengths[feature]
            if table.row_shards == 1:
                by_part[Part(feature, 0)] = (lengths, values_of[feature], weights)
                continue
            for row, part in enumerate(dealt(table, lengths, values_of[feature], weights)):
                by_part[Part(feature, row)] = part
        chosen = [[by_part[part] for part in parts] for parts in self._routes.parts]
        flat = [part for parts in chosen for part in parts]
        weighted = [weights for *_, weights in flat if weights is not None]
        return Packed(
            counts=[sum(len(part[1]) for part in parts) for parts in chosen],
            lengths=joined([part[0] for part in flat], torch.int32),
            values=joined([part[1] for part in flat], self._id_dtype),
            weights=None if weights_of is None else joined(weighted, torch.float32),
        )

    def _send(self, outgoing: Outgoing, packed: Packed, counts: Sequence[int], batch: GlobalBatch) -> PooledArrived:
        sources = [
            Source(first_slice=self._slices.of(rank).low, sizes=tuple(batch.sizes(rank))) for rank in self._peers
        ]
        mine = sources[self._me].sample_count
        send = [len(parts) * mine for parts in self._routes.parts]
        receive = [self._owner.part_count * source.sample_count for source in sources]
        even = self._even.parts and _is_even(sources)
        lengths = self._wire.all_to_all("lengths", packed.lengths, receive, send, even=even)
        values = self._wire.all_to_all("ids", packed.values, counts, packed.counts)
        weights = packed.weights
        if weights is not None:
            weights = self._wire.all_to_all("weights", weights, counts, packed.counts)
        return PooledArrived(
            announced=self._owner.announce(sources, lengths, values, weights),
            sources=tuple(sources),
            lengths={
                feature: self._divisors(outgoing, feature) for feature in self._features if self._has_mean(feature)
            },
            weighted=outgoing if outgoing.weights is not None and outgoing.weights.requires_grad else None,
        )

    def _has_mean(self, feature: int) -> bool:
        return self._table_of[feature].pooling is Pooling.MEAN

    def _divisors(self, outgoing: Outgoing, feature: int) -> Tensor:
        lengths = outgoing.given_lengths[feature]
        return lengths.clamp(min=1).to(torch.float32).unsqueeze(1).to(self._device)

    def results(self, arrived: PooledArrived) -> dict[int, Tensor]:
        """[samples, dim]. Sums of whole tables are views of what arrived."""
        found = self._bags(self._answers(arrived), arrived.sources[self._me].sample_count)
        for feature, lengths in arrived.lengths.items():
            found[feature] = found[feature] / lengths
        return found

    def give(self, arrived: PooledArrived, gradients: Mapping[int, Tensor]) -> tuple[Given, dict[int, Tensor]]:
        of_sums = dict(gradients)
        for feature, lengths in arrived.lengths.items():
            of_sums[feature] = (torch.ones(()) / lengths) * of_sums[feature]
        found = self._exchanged(arrived, of_sums)
        of_weights = {} if arrived.weighted is None else self._weight_gradients(arrived.weighted, arrived, found)
        return Given(arrived.announced, *self._owner.by_slice(arrived, found)), of_weights

    def _answers(self, arrived: PooledArrived) -> Tensor:
        """Looks up what arrived, and returns the sums that all owners made for this rank, in the order of the wire."""
        samples = [source.sample_count for source in arrived.sources]
        mine = samples[self._me]
        send = [self._owner.answer_size(count) for count in samples]
        receive = [mine * count for count in self._floats(self._routes.sums)]
        even = self._even.sums and _is_even(arrived.sources)
        return self._wire.all_to_all("sums", self._owner.answer(arrived), receive, send, codec=self._codec, even=even)

    def _bags(self, answers: Tensor, samples: int) -> dict[int, Tensor]:
        """The sums of bags by feature, [samples, dim]. Of whole tables they are views of `answers`. Not collective."""
        found: dict[tuple[int, int], list[tuple[Sum, Tensor]]] = {}
        sizes = [samples * self._columns(one.feature, one.column) for one in self._sums]
        for one, values in zip(self._sums, torch.split(answers, sizes), strict=True):
            sums = values.view(samples, self._columns(one.feature, one.column))
            found.setdefault((one.feature, one.column), []).append((one, sums))
        result = {}
        for feature in self._features:
            table = self._table_of[feature]
            columns = [_whole(found[feature, column], table.row_shards) for column in range(table.column_shards)]
            result[feature] = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
        return result

    def _exchanged(self, arrived: PooledArrived, gradients: Mapping[int, Tensor]) -> Tensor:
        """Sends gradients of bags, [samples, dim] by feature, to the owners of their rows.

        Returns those for this rank's shards, flat, as `Owner.by_slice` takes them.
        """
        samples = [source.sample_count for source in arrived.sources]
        mine = samples[self._me]
        send = [mine * count for count in self._floats(self._routes.gradients)]
        receive = [self._owner.gradient_size(count) for count in samples]
        even = self._even.gradients and _is_even(arrived.sources)
        flat = [
            self._part_of_gradient(one, gradients[one.feature]) for places in self._routes.gradients for one in places
        ]
        own = joined(flat, torch.float32, self._device)
        return self._wire.all_to_all("gradients", own, receive, send, codec=self._codec, even=even)

    def _weight_gradients(self, ids: Outgoing, arrived: PooledArrived, gradient: Tensor) -> dict[int, Tensor]:
        """The gradients of this rank's weights by feature, [ids]. `gradient`: what `_exchanged` returned.

        An owner returns a gradient for each column shard. This rank adds them up in the tree over column shards, so
        bits do not depend on owners.
        """
        values_of = torch.split(ids.values, ids.counts)
        order_of: dict[int, Tensor] = {}
        counts: dict[Part, int] = {}
        for feature in self._features:
            order_of[feature], of_rows = dealt_order(self._table_of[feature], values_of[feature])
            counts |= {Part(feature, row): count for row, count in enumerate(of_rows)}
        blocks = [blocks_of(sums, self._tables) for sums in self._routes.sums]
        sizes = [[counts[Part(block.feature, block.shard.row)] for block in of_rank] for of_rank in blocks]
        own, send = self._owner.weight_gradient(arrived, gradient)
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

    def _part_of_gradient(self, one: Columns, gradient: Tensor) -> Tensor:
        columns = self._table_of[one.feature].column_range(one.column)
        return gradient[:, columns.low : columns.high]

    def _floats(self, places: Sequence[Sequence[Sum | Columns]]) -> list[int]:
        """The floats of one sample that each rank gives or gets."""
        return [sum(self._columns(one.feature, one.column) for one in of_rank) for of_rank in places]

    def _columns(self, feature: int, column: int) -> int:
        return self._table_of[feature].column_range(column).size


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
