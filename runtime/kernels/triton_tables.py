# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels' view of tables and of a batch: small integer tensors on the device."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.layout import ShardMemory
from sennit.runtime.kernels.spec import Pooling, Precision, ShardSpec
from sennit.runtime.kernels.uploads import Kept

# Fields of a table, one row of int64 each.
WEIGHT: Final = 0
"""The address of the weights."""
STATE0: Final = 1
STATE1: Final = 2
"""Addresses of the optimizer states, in the order of `OptimizerSpec.states`; 0 if there is none."""
DIM: Final = 3
PADDED: Final = 4
"""Columns after padding for sums over columns."""
PRECISION: Final = 5
FIRST_KEY: Final = 6
"""Rows of all tables before it in the order of keys: class after class. So numbered, rows are the sort keys."""
FIRST_ROW: Final = 7
STREAM: Final = 8
ROW_NUMBERS: Final = 9
"""The address of the global number of each row; 0 if they count from FIRST_ROW."""
CLASS: Final = 10
FIELDS: Final = 11

# Precisions are bits, so that a number is a set of them.
FP32: Final = 1
FP16: Final = 2
BF16: Final = 4
_PRECISIONS: Final = {Precision.FP32: FP32, Precision.FP16: FP16, Precision.BF16: BF16}

_LANES: Final = 16

MOST_CLASSES: Final = 3
_ODD, _NARROW, _WIDE = range(MOST_CLASSES)
_NARROW_PART: Final = 4

# A thread moves 16 bytes at most: 4 floats, or 8 numbers of 16 bits.
_MOST_ALIGN: Final = 8
_FLOATS: Final = 4


def padded(dim: int) -> int:
    """Columns with padding: a power of two, at least 16."""
    return max(_LANES, 1 << (dim - 1).bit_length())


@dataclass(frozen=True, kw_only=True, slots=True)
class WidthClass:
    """Tables that kernels take in one launch, because tiles of one width suit them."""

    tables: tuple[int, ...]
    """The numbers of the tables."""

    width: int
    """Columns of the widest table, padded."""

    one_dim: int
    """The dim of all tables, or 0 if dims differ."""

    precisions: int
    """The precisions that occur."""

    align: int
    """Divides all dims: 8, 4 or 1. Unless it is 1, all addresses are multiples of 16 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """All tables of an operator."""

    fields: Tensor
    """Int64 [tables · FIELDS]."""

    first_keys: Tensor
    """Int64 [classes + 1]: the first key of each class, and the number of all rows."""

    none_bad: Tensor
    """Int64 [tables, 2]: for each table no skipped row, and no lowest one."""

    first_key_by_key: Tensor
    """Int64 [tables]: the first key of each table, class after class."""

    first_key_of_table: tuple[int, ...]

    row_count: int
    """Rows of all tables."""

    classes: tuple[WidthClass, ...]
    """At most MOST_CLASSES."""


def describe(tables: Sequence[ShardMemory], device: torch.device) -> Tables:
    """The tables as kernels take them. Copied to the device when a table is new or has moved."""
    addresses = tuple(
        (table.weight.data_ptr(), *(state.data_ptr() for state in table.states.values())) for table in tables
    )
    numbers = tuple(0 if table.row_numbers is None else table.row_numbers.data_ptr() for table in tables)
    about, kept = _describe(tuple(table.spec for table in tables), addresses, numbers, device)
    fields, first_keys, first_key_by_key, none_bad = kept.take()
    return dataclasses.replace(
        about, fields=fields, first_keys=first_keys, first_key_by_key=first_key_by_key, none_bad=none_bad
    )


@lru_cache(maxsize=64)
def _describe(
    specs: tuple[ShardSpec, ...], addresses: tuple[tuple[int, ...], ...], numbers: tuple[int, ...], device: torch.device
) -> tuple[Tables, Kept]:
    aligned = tuple(all(address % 16 == 0 for address in table) for table in addresses)
    classes = classes_of(specs, aligned)
    rows, first_key = [[0] * FIELDS for _ in specs], 0
    first_keys = []
    for number, one in enumerate(classes):
        first_keys.append(first_key)
        for table in one.tables:
            spec = specs[table]
            weight, state0, state1 = (*addresses[table], 0, 0)[:3]
            rows[table] = [
                weight,
                state0,
                state1,
                spec.dim,
                padded(spec.dim),
                _PRECISIONS[spec.precision],
                first_key,
                spec.first_row,
                spec.stream,
                numbers[table],
                number,
            ]
            first_key += spec.row_count
    parts = (
        list(itertools.chain.from_iterable(rows)),
        [*first_keys, first_key],
        [rows[table][FIRST_KEY] for one in classes for table in one.tables],
        [[0, np.iinfo(np.int64).max] for _ in specs],
    )
    kept = Kept([np.array(part, dtype=np.int64) for part in parts], device)
    fields, there, by_key, none_bad = kept.take()
    about = Tables(
        fields=fields,
        first_keys=there,
        first_key_by_key=by_key,
        none_bad=none_bad,
        first_key_of_table=tuple(row[FIRST_KEY] for row in rows),
        row_count=first_key,
        classes=classes,
    )
    return about, kept


def classes_of(specs: Sequence[ShardSpec], aligned: Sequence[bool]) -> tuple[WidthClass, ...]:
    """Classes of tables: those that 16-byte accesses cannot read, narrow ones, wide ones.

    `aligned` [tables]: whether a table's memory begins at multiples of 16 bytes. A table is narrow if the widest that
    is not of the first class has at least four times its width.
    """
    is_even = [whole and spec.dim % _FLOATS == 0 for spec, whole in zip(specs, aligned, strict=True)]
    widest = max((padded(spec.dim) for spec, even in zip(specs, is_even, strict=True) if even), default=0)
    members: list[list[int]] = [[] for _ in range(MOST_CLASSES)]
    for table, (spec, even) in enumerate(zip(specs, is_even, strict=True)):
        is_wide = padded(spec.dim) * _NARROW_PART > widest
        members[(_WIDE if is_wide else _NARROW) if even else _ODD].append(table)
    found = []
    for kind, tables in enumerate(members):
        dims = {specs[table].dim for table in tables}
        if not dims:
            continue
        common = math.gcd(_MOST_ALIGN, *dims)
        dims_align = common if common >= _FLOATS else 1
        found.append(
            WidthClass(
                tables=tuple(tables),
                width=max(map(padded, dims)),
                one_dim=next(iter(dims)) if len(dims) == 1 else 0,
                precisions=sum({_PRECISIONS[specs[table].precision] for table in tables}),
                align=1 if kind == _ODD else dims_align,
            )
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vectors:
    """The vectors of a batch's result: bags, or lookups without pooling. Vector v starts at float base + v · dim."""

    count: int

    bounds: Tensor
    """Int64 [owners + 1]: the lookups before each owner, and all. Owners are bags; without pooling they are blocks."""

    block_of_bag: Tensor | None
    """Int32 [bags], or one more; None without pooling."""

    blocks: Tensor
    """Int64 [blocks · 2]: the table and the slice of each block."""

    bases: Tensor
    """Int64 [blocks]."""

    aligns: tuple[int, ...]
    """[tables]: 4 if all vectors of the table begin at multiples of 4 floats and have such dims, otherwise 1."""

    @property
    def owners(self) -> tuple[int, int]:
        """How many owners there are, and the bits of that number: what a search of `bounds` asks for."""
        count = len(self.bounds) - 1
        return count, count.bit_length()

    def align(self, tables: Sequence[int]) -> int:
        """The alignment that all vectors of these tables have, in floats: 4 or 1."""
        return min(self.aligns[table] for table in tables)


def vectors_of(batch: Batch, tables: Sequence[ShardMemory]) -> Vectors:
    """The positions of a batch's vectors. Does not wait for the device."""
    shape = _shape_of(
        batch.table_of_block,
        batch.bags_of_block,
        batch.slice_of_block,
        tuple(table.spec.dim for table in tables),
        batch.lengths.device,
    )
    blocks, bases, first_bags, steps, pairs = shape.kept.take()
    offsets = torch.zeros(len(batch.lengths) + 1, dtype=torch.int64, device=batch.lengths.device)
    torch.cumsum(batch.lengths, 0, dtype=torch.int64, out=offsets[1:])
    if batch.pooling is not Pooling.NONE:
        return Vectors(
            count=len(batch.lengths),
            bounds=offsets,
            block_of_bag=pairs.view(torch.int32),
            blocks=blocks,
            bases=bases,
            aligns=shape.aligns,
        )
    bounds = offsets[first_bags]
    if shape.has_dims:
        # The sum over earlier blocks of lookups · dim, less this block's first lookup · dim, by parts.
        bases = (bounds[:-1] * steps).cumsum(0)
    return Vectors(
        count=len(batch.values),
        bounds=bounds,
        block_of_bag=None,
        blocks=blocks,
        bases=bases,
        aligns=shape.aligns_of_sequences,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """What depends on the tables, bags and slices of a batch's blocks alone."""

    kept: Kept
    """`Vectors.blocks`; `Vectors.bases` where bags are pooled, or where all dims are equal; the bags before each block,
    and all; the dim of the block before less its own; the block of each bag, two int32 in one number."""

    has_dims: bool
    """Whether blocks have different dims."""

    aligns: tuple[int, ...]
    aligns_of_sequences: tuple[int, ...]


@lru_cache(maxsize=16)
def _shape_of(
    table_of_block: tuple[int, ...],
    bags_of_block: tuple[int, ...],
    slice_of_block: tuple[int, ...] | None,
    dim_of_table: tuple[int, ...],
    device: torch.device,
) -> _Shape:
    """Cached, because batches of one shape often follow each other."""
    dims = [dim_of_table[table] for table in table_of_block]
    first_bag = [0, *itertools.accumulate(bags_of_block)]
    starts = [0, *itertools.accumulate(bags * dim for bags, dim in zip(bags_of_block, dims, strict=True))]
    aligns = [_FLOATS if dim % _FLOATS == 0 else 1 for dim in dim_of_table]
    of_sequences = min((aligns[table] for table in table_of_block), default=1)
    for table, start, bags in zip(table_of_block, starts, bags_of_block, strict=False):
        if bags and start % _FLOATS:
            aligns[table] = 1
    slices = slice_of_block or (0,) * len(dims)
    block_of_bag = np.repeat(np.arange(len(dims), dtype=np.int32), bags_of_block)
    parts = [
        np.array([table_of_block, slices], dtype=np.int64).T.ravel(),
        np.array([start - bag * dim for start, bag, dim in zip(starts, first_bag, dims, strict=False)], dtype=np.int64),
        np.array(first_bag, dtype=np.int64),
        np.array([before - dim for before, dim in itertools.pairwise([0, *dims])], dtype=np.int64),
        np.concatenate((block_of_bag, block_of_bag[: len(block_of_bag) % 2])).view(np.int64),
    ]
    return _Shape(
        kept=Kept(parts, device),
        has_dims=len(set(dims)) > 1,
        aligns=tuple(aligns),
        aligns_of_sequences=(of_sequences,) * len(dim_of_table),
    )
