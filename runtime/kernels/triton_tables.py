# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels' view of tables and of a batch: small integer tensors on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.layout import ShardMemory
from sennit.runtime.kernels.spec import Pooling, Precision, ShardSpec

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
"""Rows of all previous tables. Row numbers counted through all tables are the sort keys."""
FIRST_ROW: Final = 7
STREAM: Final = 8
ROW_NUMBERS: Final = 9
"""The address of the global number of each row; 0 if they count from FIRST_ROW."""
FIELDS: Final = 10

# Bits, so that a number is a set of them.
FP32: Final = 1
FP16: Final = 2
BF16: Final = 4
_PRECISIONS: Final = {Precision.FP32: FP32, Precision.FP16: FP16, Precision.BF16: BF16}

_LANES: Final = 16


def padded(dim: int) -> int:
    """Columns with padding: a power of two, at least 16."""
    return max(_LANES, 1 << (dim - 1).bit_length())


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """All tables of an operator."""

    fields: Tensor
    """Int64 [tables, FIELDS]."""

    row_count: int
    """Rows of all tables."""

    width: int
    """Columns of the widest table, padded."""

    one_dim: int
    """The dim of all tables, or 0 if dims differ."""

    precisions: int
    """The precisions that occur."""

    align: int
    """Divides all dims. Unless it is 1, all addresses are multiples of 16 bytes."""


def describe(tables: Sequence[ShardMemory], device: torch.device) -> Tables:
    """The tables as kernels take them. Copied to the device when a table is new or has moved."""
    addresses = tuple(
        (table.weight.data_ptr(), *(state.data_ptr() for state in table.states.values())) for table in tables
    )
    numbers = tuple(0 if table.row_numbers is None else table.row_numbers.data_ptr() for table in tables)
    return _describe(tuple(table.spec for table in tables), addresses, numbers, device)


@lru_cache(maxsize=64)
def _describe(
    specs: tuple[ShardSpec, ...], addresses: tuple[tuple[int, ...], ...], numbers: tuple[int, ...], device: torch.device
) -> Tables:
    rows, first_key = [], 0
    for spec, (weight, *states), row_numbers in zip(specs, addresses, numbers, strict=True):
        state0, state1 = (*states, 0, 0)[:2]
        precision = _PRECISIONS[spec.precision]
        rows.append(
            [
                weight,
                state0,
                state1,
                spec.dim,
                padded(spec.dim),
                precision,
                first_key,
                spec.first_row,
                spec.stream,
                row_numbers,
            ]
        )
        first_key += spec.row_count
    dims = {spec.dim for spec in specs}
    aligned = all(address % 16 == 0 for table in addresses for address in table)
    return Tables(
        fields=torch.tensor(rows, dtype=torch.int64).reshape(-1, FIELDS).to(device),
        row_count=first_key,
        width=max((padded(dim) for dim in dims), default=_LANES),
        one_dim=dims.pop() if len(dims) == 1 else 0,
        precisions=sum({_PRECISIONS[spec.precision] for spec in specs}),
        align=math.gcd(16, *(spec.dim for spec in specs)) if aligned else 1,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Vectors:
    """The vectors of a batch's result: bags, or lookups without pooling."""

    count: int

    block_of_vector: Tensor
    """Int32 [count]."""

    blocks: Tensor
    """Int64 [blocks, 2]: the block's table, and the base of its vectors in the result.

    Vector v starts at float base + v · dim.
    """


def vectors_of(batch: Batch, tables: Sequence[ShardMemory], offsets: Tensor) -> Vectors:
    """The positions of a batch's vectors.

    `offsets` int64 [bags + 1]: lookups before each bag. Does not wait for the device.
    """
    dims = tuple(tables[table].spec.dim for table in batch.table_of_block)
    shape = _block_shape(batch.table_of_block, batch.bags_of_block, dims, batch.lengths.device)
    if batch.pooling is not Pooling.NONE:
        owner = _block_of_bag(batch.bags_of_block, batch.lengths.device)
        return Vectors(count=len(batch.lengths), block_of_vector=owner, blocks=shape.blocks)
    first_lookup = offsets[shape.first_bag]
    counts = first_lookup.diff()
    starts = (counts * shape.dims).cumsum(0) - counts * shape.dims
    return Vectors(
        count=len(batch.values),
        block_of_vector=torch.repeat_interleave(shape.numbers, counts, output_size=len(batch.values)),
        blocks=torch.stack((shape.blocks[:, 0], starts - first_lookup[:-1] * shape.dims), 1),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _BlockShape:
    """What depends on the tables and bags of a batch's blocks alone."""

    numbers: Tensor
    """Int32 [blocks]: 0, 1, …"""

    dims: Tensor
    """Int64 [blocks]."""

    first_bag: Tensor
    """Int64 [blocks + 1]."""

    blocks: Tensor
    """`Vectors.blocks` where bags are pooled."""


@lru_cache(maxsize=16)
def _block_shape(
    table_of_block: tuple[int, ...], bags_of_block: tuple[int, ...], dims: tuple[int, ...], device: torch.device
) -> _BlockShape:
    """Cached, because batches of one shape follow each other."""
    bags, dim = torch.tensor(bags_of_block, dtype=torch.int64), torch.tensor(dims, dtype=torch.int64)
    first_bag = torch.tensor([0, *bags_of_block]).cumsum(0)
    starts = (bags * dim).cumsum(0) - bags * dim
    tables = torch.tensor(table_of_block, dtype=torch.int64)
    return _BlockShape(
        numbers=torch.arange(len(dims), dtype=torch.int32, device=device),
        dims=dim.to(device),
        first_bag=first_bag.to(device),
        blocks=torch.stack((tables, starts - first_bag[:-1] * dim), 1).to(device),
    )


@lru_cache(maxsize=16)
def _block_of_bag(bags_of_block: tuple[int, ...], device: torch.device) -> Tensor:
    """Int32 [bags]."""
    blocks = torch.arange(len(bags_of_block), dtype=torch.int32)
    return torch.repeat_interleave(blocks, torch.tensor(bags_of_block, dtype=torch.int64)).to(device)
