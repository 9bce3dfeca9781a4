# SPDX-License-Identifier: Apache-2.0
"""What a rank does as the owner of shards: it turns ids that arrived into sums of bags, and gradients into updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch, sums_of_runs
from sennit.runtime.sharded.batch_parts import chosen_blocks, joined
from sennit.runtime.sharded.exchange import Arrived
from sennit.runtime.sharded.features import Outgoing
from sennit.runtime.sharded.routes import Block, Columns, Part, Sum, blocks_of
from sennit.runtime.sharded.shards import Announced, Shards
from sennit.runtime.sharded.tables import Shard, Table
from sennit.transport.plans.tree import balanced


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The samples of one rank, whose ids came to this owner."""

    first_slice: int
    sizes: tuple[int, ...]
    """Samples in each of its slices."""

    @property
    def sample_count(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledArrived(Arrived):
    """Ids whose rows are to be pooled."""

    sources: tuple[Source, ...]
    """The samples of each peer."""

    lengths: dict[int, Tensor]
    """Float32 [samples, 1] by feature, where the table takes means: what sums are divided by, at least 1."""

    weighted: Outgoing | None
    """This rank's own ids, if their weights require gradients."""


class Owner:
    """The shards of one engine on this rank. Parts, sums and gradients are in the order of the wire (`routes`)."""

    def __init__(
        self,
        tables: Sequence[Table],
        shards: Shards,
        table_of_shard: Mapping[Shard, int],
        *,
        parts: Sequence[Part],
        sums: Sequence[Sum],
        gradients: Sequence[Columns],
    ) -> None:
        """`table_of_shard`: the number of each shard in the engine."""
        self._shards = shards
        self._parts, self._sums, self._gradients = list(parts), list(sums), list(gradients)
        self._blocks = blocks_of(sums, tables)
        self._table_of_block = [table_of_shard[block.shard] for block in self._blocks]
        self._dim_of_block = [shards.specs[table].dim for table in self._table_of_block]
        self._part_of_block = [self._parts.index(Part(block.feature, block.shard.row)) for block in self._blocks]
        self._gradient_of_block = [
            self._gradients.index(Columns(block.feature, block.shard.column)) for block in self._blocks
        ]
        # With whole tables everything is used as it comes.
        self._parts_are_blocks = self._part_of_block == list(range(len(parts)))
        self._gradients_are_blocks = self._gradient_of_block == list(range(len(gradients)))
        self._has_shared_tables = len(set(self._table_of_block)) < len(self._table_of_block)
        self._blocks_are_sums = len(self._blocks) == len(self._sums)
        self._dim_of_sum = [
            shards.specs[table_of_shard[Shard(_table(self._blocks, one), one.node.low, one.column)]].dim for one in sums
        ]

    @property
    def part_count(self) -> int:
        return len(self._parts)

    def answer_size(self, samples: int) -> int:
        """The floats in the answer to a rank with this many samples."""
        return samples * sum(self._dim_of_sum)

    def gradient_size(self, samples: int) -> int:
        """The floats in the gradients from a rank with this many samples."""
        dims = dict(zip(self._gradient_of_block, self._dim_of_block, strict=True))
        return samples * sum(dims.values())

    def announce(
        self, sources: Sequence[Source], lengths: Tensor, values: Tensor, weights: Tensor | None = None
    ) -> Announced:
        """Takes ids in the order source, part, sample: `lengths` int32 [bags], `values` and `weights` [ids]."""
        if not self._parts_are_blocks:
            bags = [source.sample_count for source in sources for _ in self._parts]
            counts = sums_of_runs(lengths, bags)
            by_part = torch.split(lengths, bags)
            order = [place * len(self._parts) + part for place in range(len(sources)) for part in self._part_of_block]
            lengths = joined([by_part[part] for part in order], lengths.dtype)
            ids = torch.split(values, counts)
            values = joined([ids[part] for part in order], values.dtype)
            if weights is not None:
                of_ids = torch.split(weights, counts)
                weights = joined([of_ids[part] for part in order], weights.dtype)
        tables = self._table_of_block
        return self._shards.announce(
            Batch(
                table_of_block=tuple(table for source in sources for table in tables for _ in source.sizes),
                bags_of_block=tuple(size for source in sources for _ in tables for size in source.sizes),
                lengths=lengths,
                values=values,
                weights=weights,
            )
        )

    def answer(self, arrived: PooledArrived) -> Tensor:
        """Float32, flat: for each source and sum [samples, columns]."""
        found = self._shards.lookup(arrived.announced)
        if self._blocks_are_sums:
            return found
        sizes = [source.sample_count * dim for source in arrived.sources for dim in self._dim_of_block]
        blocks = iter(torch.split(found, sizes))
        sums = [
            folded([next(blocks) for _ in range(*one.node)], balanced(one.node.high - one.node.low))
            for _ in arrived.sources
            for one in self._sums
        ]
        return joined(sums, found.dtype, found.device)

    def weight_gradient(self, arrived: PooledArrived, gradient: Tensor) -> tuple[Tensor, list[int]]:
        """Returns the gradients of the weights that arrived, and how many of them each source gets.

        They are float32, flat: for each source and block [ids]. `gradient`: that of the answer. Rows are read as they
        are now.
        """
        bags = [source.sample_count * len(self._blocks) for source in arrived.sources]
        counts = sums_of_runs(arrived.announced.batch.lengths, bags)
        return self._shards.weight_gradient(arrived.announced, self._by_block(arrived, gradient)), counts

    def by_slice(self, arrived: PooledArrived, gradient: Tensor) -> tuple[Batch, Tensor]:
        """The batch and its gradient with the slice of each block (docs/reference/embedding.md, rule 4)."""
        batch, gradient = arrived.announced.batch, self._by_block(arrived, gradient)
        slices = [
            source.first_slice + number
            for source in arrived.sources
            for _ in self._blocks
            for number in range(len(source.sizes))
        ]
        if self._has_shared_tables:
            # Two features of a table: slices rise only where both features take turns.
            order = sorted(range(len(slices)), key=slices.__getitem__)
            dims = [spec.dim for spec in self._shards.specs]
            batch, gradient = chosen_blocks(batch, gradient, order, dims)
            slices.sort()
        return dataclasses.replace(batch, slice_of_block=tuple(slices)), gradient

    def _by_block(self, arrived: PooledArrived, gradient: Tensor) -> Tensor:
        """The gradient as the engine takes it: repeated for each of the row shards that share it."""
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
        return joined([parts[number] for number in order], gradient.dtype, gradient.device)


def folded(terms: Sequence[Tensor], program: Sequence[int]) -> Tensor:
    """Adds terms in the order of a `program` of `transport.tree`. Writes over the terms."""
    stack: list[Tensor] = []
    for term, count in zip(terms, program, strict=True):
        stack.append(term)
        for _ in range(count):
            right = stack.pop()
            stack[-1].add_(right)
    return stack[0]


def _table(blocks: Sequence[Block], one: Sum) -> int:
    return next(block.shard.table for block in blocks if block.feature == one.feature)
