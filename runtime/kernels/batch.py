# SPDX-License-Identifier: Apache-2.0
"""The lookups of one call, in the combined format: blocks of bags, lengths, ids.

Neo (Mudigere et al., ISCA 2022, section 4.4) keeps lengths instead of offsets, and the ids of all tables in one tensor.
A block is a run of bags for one table. Several blocks may name one table (shared tables, or parts from several ranks),
and blocks may have different numbers of bags. So the output of an AlltoAll is a batch without rearranging.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sennit.runtime.kernels.spec import Pooling, ShardSpec
from sennit.runtime.kernels.uploads import Upload, Uploads
from sennit.transport.errors import ArgumentError

_INTEGERS = (torch.int32, torch.int64)

MAX_SLICES: Final = 1 << 16
"""Slices of a global batch: the kernels number them with 16 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """K blocks with `bags_of_block.sum()` bags and `lengths.sum()` lookups. All tensors on one device, contiguous."""

    table_of_block: tuple[int, ...]
    """[K]: the table of each block."""

    bags_of_block: tuple[int, ...]
    """[K]: the number of bags of each block."""

    lengths: Tensor
    """Int32 or int64 [bags]: lookups per bag, block after block."""

    values: Tensor
    """Int32 or int64 [lookups]: ids within the block's table, bag after bag."""

    weights: Tensor | None = None
    """Float32 [lookups], not without pooling: each row is multiplied by its weight. A mean divides by the number of
    lookups, whatever the weights."""

    pooling: Pooling = Pooling.SUM

    slice_of_block: tuple[int, ...] | None = None
    """[K]: the slice of the global batch that each block's samples belong to; None: slice 0.

    Gradients of a row are summed slice by slice (docs/reference/embedding.md, rule 4). Within a table slices do not
    fall from block to block.
    """

    upload: Upload | None = None
    """Copies of the tensors, on their way to a device. `to` takes them, if they are still those of this batch."""

    def __post_init__(self) -> None:
        if len(self.table_of_block) != len(self.bags_of_block):
            raise ArgumentError(
                f"{len(self.table_of_block)} tables of blocks, but {len(self.bags_of_block)} numbers of bags"
            )
        for block, bags in enumerate(self.bags_of_block):
            if bags < 0:
                raise ArgumentError(f"block {block} has {bags} bags; allowed: 0 or more")
        self._check_slices()
        for name in ("lengths", "values"):
            tensor = getattr(self, name)
            if tensor.dtype not in _INTEGERS:
                raise ArgumentError(f"{name} are {tensor.dtype}; allowed: int32, int64")
        if self.weights is not None:
            if self.weights.dtype is not torch.float32:
                raise ArgumentError(f"weights are {self.weights.dtype}; allowed: float32")
            if self.pooling is Pooling.NONE:
                raise ArgumentError(f"weights with pooling {self.pooling.value}; allowed: sum, mean")
            if self.weights.shape != self.values.shape:
                raise ArgumentError(f"{len(self.weights)} weights for {len(self.values)} ids")
        for name in ("lengths", "values", "weights"):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tensor.dim() != 1 or not tensor.is_contiguous():
                raise ArgumentError(f"{name} have shape {tuple(tensor.shape)}; allowed: one dimension, contiguous")
            if tensor.device != self.lengths.device:
                raise ArgumentError(f"{name} are on {tensor.device}, lengths on {self.lengths.device}")
        if sum(self.bags_of_block) != len(self.lengths):
            raise ArgumentError(f"blocks of {sum(self.bags_of_block)} bags in all, but {len(self.lengths)} lengths")

    def _check_slices(self) -> None:
        if self.slice_of_block is None:
            return
        if len(self.slice_of_block) != len(self.table_of_block):
            raise ArgumentError(f"{len(self.slice_of_block)} slices of {len(self.table_of_block)} blocks")
        before: dict[int, int] = {}
        for block, (table, number) in enumerate(zip(self.table_of_block, self.slice_of_block, strict=True)):
            if not before.get(table, 0) <= number < MAX_SLICES:
                raise ArgumentError(
                    f"block {block} of table {table} is in slice {number}; "
                    f"allowed: {before.get(table, 0)} (that of the table's block before) to {MAX_SLICES - 1}"
                )
            before[table] = number

    def output_size(self, tables: tuple[ShardSpec, ...]) -> int:
        """Floats that a lookup returns. Reads `lengths` if sequences have different dims."""
        dims = [tables[table].dim for table in self.table_of_block]
        if self.pooling is not Pooling.NONE:
            return sum(bags * dim for bags, dim in zip(self.bags_of_block, dims, strict=True))
        if len(set(dims)) <= 1:
            return len(self.values) * (dims[0] if dims else 0)
        return sum(block.lookup_count * dim for block, dim in zip(self.blocks(), dims, strict=True))

    @property
    def _tensors(self) -> list[Tensor]:
        return [self.lengths, self.values, *([] if self.weights is None else [self.weights])]

    def uploaded(self, uploads: Uploads) -> Batch:
        """The batch, which is in host memory, with copies on their way. Does not wait for them."""
        return dataclasses.replace(self, upload=uploads.begin(self._tensors))

    def to(self, device: torch.device) -> Batch:
        """The batch in the memory of `device`; itself if it is there. Does not wait for the copies."""
        if self.lengths.device == device:
            return self
        if self.upload is not None and self.upload.is_of(self._tensors, device):
            lengths, values, *weights = self.upload.take()
        else:
            lengths, values, *weights = (one.to(device, non_blocking=True) for one in self._tensors)
        return dataclasses.replace(
            self, lengths=lengths, values=values, weights=weights[0] if weights else None, upload=None
        )

    def blocks(self) -> Iterator[Block]:
        """Iterates over the blocks in order. Reads `lengths`."""
        bag = lookup = 0
        counts = sums_of_runs(self.lengths, self.bags_of_block)
        for table, bags, count in zip(self.table_of_block, self.bags_of_block, counts, strict=True):
            yield Block(table=table, first_bag=bag, bag_count=bags, first_lookup=lookup, lookup_count=count)
            bag, lookup = bag + bags, lookup + count


def sums_of_runs(numbers: Tensor, sizes: Sequence[int]) -> list[int]:
    """Sums of consecutive runs of `numbers`, [n]. `sizes`: how many numbers each run has, n in all. Reads `numbers`."""
    until = torch.zeros(len(numbers) + 1, dtype=torch.int64, device=numbers.device)
    torch.cumsum(numbers, 0, dtype=torch.int64, out=until[1:])
    sums: list[int] = until[list(itertools.accumulate(sizes, initial=0))].diff().tolist()
    return sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The position of one block in a batch."""

    table: int
    first_bag: int
    bag_count: int
    first_lookup: int
    lookup_count: int

    @property
    def bags(self) -> slice:
        return slice(self.first_bag, self.first_bag + self.bag_count)

    @property
    def lookups(self) -> slice:
        return slice(self.first_lookup, self.first_lookup + self.lookup_count)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSums:
    """The summed gradients of rows of one table."""

    table: int

    rows: Tensor
    """Int64 [n], rising."""

    sums: Tensor
    """Float32 [n, dim]."""
