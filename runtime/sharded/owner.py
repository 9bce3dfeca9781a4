# SPDX-License-Identifier: Apache-2.0
"""What a rank does as the owner of shards: it turns ids that arrived into sums of bags, and gradients into updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.sharded.routes import Block, Columns, Part, Sum, blocks_of
from sennit.runtime.sharded.tables import Shard, Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The samples of one rank, of which the owner got parts."""

    first_slice: int
    sizes: tuple[int, ...]
    """Samples in each of its slices."""

    @property
    def sample_count(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """Ids of one step, as lookups of the owner's engine."""

    batch: Batch
    sources: tuple[Source, ...]


class Owner:
    """The shards of one engine on this rank. Parts, sums and gradients are in the order of the wire (`routes`)."""

    def __init__(
        self,
        tables: Sequence[Table],
        engine: EmbeddingEngine,
        table_of_shard: dict[Shard, int],
        *,
        parts: Sequence[Part],
        sums: Sequence[Sum],
        gradients: Sequence[Columns],
    ) -> None:
        """`table_of_shard`: the number of each shard in the engine."""
        self.engine = engine
        self._parts, self._sums, self._gradients = list(parts), list(sums), list(gradients)
        self._blocks = blocks_of(sums, tables)
        self._table_of_block = [table_of_shard[block.shard] for block in self._blocks]
        self._dim_of_block = [engine.specs[table].dim for table in self._table_of_block]
        self._part_of_block = [_part(parts, block) for block in self._blocks]
        self._gradient_of_block = [
            self._gradients.index(Columns(block.feature, block.shard.column)) for block in self._blocks
        ]
        # With whole tables everything is used as it comes.
        self._parts_are_blocks = self._part_of_block == list(range(len(parts)))
        self._gradients_are_blocks = self._gradient_of_block == list(range(len(gradients)))
        self._has_shared_tables = len(set(self._table_of_block)) < len(self._table_of_block)
        self._blocks_are_sums = len(self._blocks) == len(self._sums)
        self._dim_of_sum = [
            engine.specs[table_of_shard[Shard(_table(self._blocks, one), one.node.low, one.column)]].dim for one in sums
        ]

    @property
    def part_count(self) -> int:
        return len(self._parts)

    def answer_size(self, samples: int) -> int:
        """Floats of the answer to a rank with so many samples."""
        return samples * sum(self._dim_of_sum)

    def gradient_size(self, samples: int) -> int:
        """Floats of the gradients from a rank with so many samples."""
        dims = dict(zip(self._gradient_of_block, self._dim_of_block, strict=True))
        return samples * sum(dims.values())

    def arrive(
        self, sources: Sequence[Source], lengths: Tensor, values: Tensor, weights: Tensor | None = None
    ) -> Arrived:
        """Takes ids by source, part, sample: `lengths` int32 [bags], `values` [ids], and perhaps `weights` [ids]."""
        if not self._parts_are_blocks:
            bags = [source.sample_count for source in sources for _ in self._parts]
            by_part = torch.split(lengths, bags)
            counts = [int(part.sum()) for part in by_part]
            order = [place * len(self._parts) + part for place in range(len(sources)) for part in self._part_of_block]
            lengths = _joined(by_part, order)
            values = _joined(torch.split(values, counts), order)
            if weights is not None:
                weights = _joined(torch.split(weights, counts), order)
        return Arrived(
            sources=tuple(sources),
            batch=Batch(
                table_of_block=tuple(
                    table for source in sources for table in self._table_of_block for _ in source.sizes
                ),
                bags_of_block=tuple(size for source in sources for _ in self._table_of_block for size in source.sizes),
                lengths=lengths,
                values=values,
                weights=weights,
            ),
        )

    def answer(self, arrived: Arrived) -> Tensor:
        """Float32, flat: for each source and sum [samples, columns]."""
        found = self.engine.lookup(arrived.batch)
        if self._blocks_are_sums:
            return found
        sizes = [source.sample_count * dim for source in arrived.sources for dim in self._dim_of_block]
        blocks = iter(torch.split(found, sizes))
        answer = found.new_empty(sum(self.answer_size(source.sample_count) for source in arrived.sources))
        out_sizes = [source.sample_count * dim for source in arrived.sources for dim in self._dim_of_sum]
        outputs = iter(torch.split(answer, out_sizes))
        for _ in arrived.sources:
            for one in self._sums:
                tree_sum([next(blocks) for _ in range(one.node.low, one.node.high)], next(outputs))
        return answer

    def by_slice(self, arrived: Arrived, gradient: Tensor) -> tuple[Batch, Tensor]:
        """The batch and its gradient with the slice of each block (docs/reference/embedding.md, rule 4)."""
        batch, gradient = arrived.batch, self._by_block(arrived, gradient)
        places = [
            (source.first_slice + number, block)
            for source in arrived.sources
            for block in range(len(self._blocks))
            for number in range(len(source.sizes))
        ]
        order = list(range(len(places)))
        if self._has_shared_tables:
            # Two features of a table: slices rise only where both features take turns.
            order.sort(key=places.__getitem__)
            dims = [self._dim_of_block[block] for _, block in places]
            gradient = _joined(
                torch.split(gradient, [bags * dim for bags, dim in zip(batch.bags_of_block, dims, strict=True)]), order
            )
            lengths = torch.split(batch.lengths, list(batch.bags_of_block))
            counts = [int(part.sum()) for part in lengths]
            weights = batch.weights
            batch = dataclasses.replace(
                batch,
                lengths=_joined(lengths, order),
                values=_joined(torch.split(batch.values, counts), order),
                weights=None if weights is None else _joined(torch.split(weights, counts), order),
            )
        return (
            dataclasses.replace(
                batch,
                table_of_block=tuple(self._table_of_block[places[place][1]] for place in order),
                bags_of_block=tuple(batch.bags_of_block[place] for place in order),
                slice_of_block=tuple(places[place][0] for place in order),
            ),
            gradient,
        )

    def _by_block(self, arrived: Arrived, gradient: Tensor) -> Tensor:
        """The gradient as the engine takes it: what row shards share is there for each of them."""
        if self._gradients_are_blocks:
            return gradient
        dims = dict(zip(self._gradient_of_block, self._dim_of_block, strict=True))
        sizes = [source.sample_count * dims[number] for source in arrived.sources for number in sorted(dims)]
        parts = torch.split(gradient, sizes)
        order = [
            place * len(self._gradients) + number
            for place in range(len(arrived.sources))
            for number in self._gradient_of_block
        ]
        return _joined(parts, order)


def tree_sum(terms: Sequence[Tensor], out: Tensor) -> None:
    """Adds terms in the canonical tree (docs/reference/plans.md, rule 1) over 0 … n - 1. May overwrite terms."""
    if len(terms) == 1:
        out.copy_(terms[0])
        return
    torch.add(_folded(terms[: _left(terms)]), _folded(terms[_left(terms) :]), out=out)


def _folded(terms: Sequence[Tensor]) -> Tensor:
    if len(terms) == 1:
        return terms[0]
    return _folded(terms[: _left(terms)]).add_(_folded(terms[_left(terms) :]))


def _left(terms: Sequence[Tensor]) -> int:
    """The terms of the left half: the largest power of two below their number."""
    return 1 << ((len(terms) - 1).bit_length() - 1)


def _part(parts: Sequence[Part], block: Block) -> int:
    return list(parts).index(Part(block.feature, block.shard.row))


def _table(blocks: Sequence[Block], one: Sum) -> int:
    return next(block.shard.table for block in blocks if block.feature == one.feature)


def _joined(parts: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    return torch.cat([parts[number] for number in order])
