# SPDX-License-Identifier: Apache-2.0
"""Checks batches before rows are touched, and gradients after."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sennit.runtime.kernels import _kernels
from sennit.runtime.kernels.batch import Batch, Block
from sennit.runtime.kernels.spec import Bounds, Pooling, ShardSpec
from sennit.transport.errors import ArgumentError, SennitError

IGNORED = -1
"""Replaces an ignored id. Kernels accept ids in [0, row_count) and this value."""


class IdError(ArgumentError, IndexError):
    """An id is outside its table. The message names table, position, id and the allowed range."""


class GradientError(SennitError, ArithmeticError):
    """A row's gradient has an infinite or undefined element. The message names the first table and row.

    Such rows, weights and states, are unchanged. All other rows of the step have been updated.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class BadGradients:
    """Rows of one table that were skipped because their summed gradient was not finite."""

    table: int
    row_count: int
    first_row: int
    """The lowest of these rows."""


def check_lengths(lengths: Tensor, id_count: int) -> None:
    """Raises `ArgumentError` unless all lengths are at least 0 and their sum is the number of ids."""
    if len(lengths):
        least = int(lengths.min())
        if least < 0:
            bag = int((lengths < 0).nonzero()[0])
            raise ArgumentError(f"bag {bag} has length {int(lengths[bag])}; allowed: 0 or more")
    total = int(lengths.sum(dtype=torch.int64))
    if total != id_count:
        raise ArgumentError(f"lengths of {total} lookups in all, but {id_count} ids")


def check_gradient(batch: Batch, gradient: Tensor, tables: tuple[ShardSpec, ...], device: torch.device) -> None:
    """Raises `ArgumentError` unless `gradient` has the shape and dtype of the lookup's result, and is on `device`."""
    size = batch.output_size(tables)
    if gradient.dtype is not torch.float32 or gradient.shape != (size,) or not gradient.is_contiguous():
        raise ArgumentError(
            f"gradient is {gradient.dtype} of shape {tuple(gradient.shape)}; allowed: contiguous float32 of ({size},)"
        )
    if gradient.device != device:
        raise ArgumentError(f"gradient is on {gradient.device}, the tables on {device}")


def resolve(batch: Batch, tables: Sequence[ShardSpec], bounds: Bounds) -> tuple[Batch, dict[int, int]]:
    """Returns the batch as kernels take it, and the number of ids out of range, by table.

    Checks block numbers, lengths and ids. The batch is returned unchanged unless ids were out of range. Then its ids
    are a new int64 tensor in which they are wrapped, or `IGNORED`.
    """
    for number, table in enumerate(batch.table_of_block):
        if not 0 <= table < len(tables):
            raise ArgumentError(f"block {number} is for table {table}; allowed: 0 to {len(tables) - 1}")
    if _is_sound(batch, tables):
        return batch, {}
    check_lengths(batch.lengths, len(batch.values))
    outside: dict[int, int] = {}
    values = batch.values
    for block in batch.blocks():
        ids, row_count = batch.values[block.lookups], tables[block.table].row_count
        if not len(ids):
            continue
        low, high = (int(bound) for bound in ids.aminmax())
        if low >= 0 and high < row_count:
            continue
        ids = ids.to(torch.int64)
        wrong = (ids < 0) | (ids >= row_count)
        if bounds is Bounds.ERROR or (bounds is Bounds.WRAP and row_count == 0):
            place = int(wrong.nonzero()[0])
            raise IdError(
                f"table {tables[block.table].name}: id {int(ids[place])} at position {block.first_lookup + place}; "
                f"allowed: [0, {row_count})"
            )
        if values is batch.values:
            values = batch.values.to(torch.int64, copy=True)
        values[block.lookups] = torch.remainder(ids, row_count) if bounds is Bounds.WRAP else ids.where(~wrong, IGNORED)
        outside[block.table] = outside.get(block.table, 0) + int(wrong.sum())
    return (batch if values is batch.values else dataclasses.replace(batch, values=values)), outside


def _is_sound(batch: Batch, tables: Sequence[ShardSpec]) -> bool:
    """Whether a batch on the CPU is valid, in one pass. If not, the slow checks find out what is wrong."""
    if batch.lengths.device.type != "cpu":
        return False
    return _kernels.is_sound(
        [tables[table].row_count for table in batch.table_of_block],
        batch.bags_of_block,
        (batch.lengths.data_ptr(), batch.lengths.dtype is torch.int64),
        (batch.values.data_ptr(), batch.values.dtype is torch.int64),
        len(batch.values),
    )


def places_of_outputs(batch: Batch, tables: Sequence[ShardSpec]) -> list[tuple[Block, slice]]:
    """Yields each block with its part of the flat result."""
    found, start = [], 0
    for block in batch.blocks():
        vectors = block.lookup_count if batch.pooling is Pooling.NONE else block.bag_count
        end = start + vectors * tables[block.table].dim
        found.append((block, slice(start, end)))
        start = end
    return found


def check_entries(entries: Tensor) -> None:
    """Raises `ArgumentError` unless `entries` can be those of a directory or a sketch of ids."""
    if entries.dtype is not torch.int64 or entries.ndim != 2 or entries.shape[1] != 2:
        raise ArgumentError(f"entries are {entries.dtype} of {tuple(entries.shape)}; allowed: int64 of (rows, 2)")
    if not entries.is_contiguous() or entries.device.type != "cpu":
        raise ArgumentError("entries; allowed: contiguous, in host memory")
