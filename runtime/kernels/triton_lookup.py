# SPDX-License-Identifier: Apache-2.0
"""Kernels that read: bags of rows of all tables, and the gradient of per-lookup weights."""

import triton
import triton.language as tl

from sennit.runtime.kernels.triton_rows import dims_of, lane_tree, load_rows, owner_of, table_field, weights_of
from sennit.runtime.kernels.triton_tables import CLASS, PADDED

_CLASS = tl.constexpr(CLASS)
_PADDED = tl.constexpr(PADDED)


@triton.jit(
    do_not_specialize=["owner_count", "owner_bits", "of_class", "vector_count"],
    do_not_specialize_on_alignment=["values", "weights", "block_of_bag"],
)
def lookup_kernel(
    result,
    values,
    weights,
    bounds,
    block_of_bag,
    blocks,
    bases,
    tables,
    owner_count,
    owner_bits,
    of_class,
    vector_count,
    SEQUENCE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    ONE_DIM: tl.constexpr,
    PRECISIONS: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR_ALIGN: tl.constexpr,
    ALONE: tl.constexpr,
    VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """A program computes those of VECTORS vectors of the result that are of its class; all, if a class is ALONE.

    It adds a bag's rows one after another, in the order of `values`.
    """
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    live = vector < vector_count
    if SEQUENCE:
        block = owner_of(bounds, vector, live, owner_count, owner_bits)
    else:
        block = tl.load(block_of_bag + vector, mask=live, other=0)
    table = tl.load(blocks + block * 2)
    if not ALONE:
        live = live & (table_field(tables, table, _CLASS) == of_class)
    address, precision = weights_of(tables, table)
    dim = dims_of(tables, table, ONE_DIM)
    start = tl.load(bases + block) + vector * dim
    if VECTOR_ALIGN > 1:
        start = tl.multiple_of(start, [VECTOR_ALIGN])
    columns = tl.arange(0, WIDTH)[None, :]
    inside = columns < dim[:, None]
    if SEQUENCE:
        row = tl.load(values + vector, mask=live, other=-1).to(tl.int64)
        x = load_rows(address, precision, row, dim, columns, inside & (row >= 0)[:, None], PRECISIONS, ALIGN)
    else:
        first = tl.load(bounds + vector, mask=live, other=0)
        length = tl.load(bounds + vector + 1, mask=live, other=0) - first
        x = tl.zeros([VECTORS, WIDTH], tl.float32)
        for place in tl.range(0, tl.max(length, axis=0), loop_unroll_factor=UNROLL):
            here = place < length
            row = tl.load(values + first + place, mask=here, other=-1).to(tl.int64)
            each = load_rows(address, precision, row, dim, columns, inside & (row >= 0)[:, None], PRECISIONS, ALIGN)
            if WEIGHTED:
                weight = tl.load(weights + first + place, mask=here, other=0.0)[:, None]
                each = tl.where((row >= 0)[:, None], weight * each, 0.0)
            x = x + each
        if MEAN:
            x = tl.div_rn(x, tl.broadcast_to(tl.maximum(length, 1).to(tl.float32)[:, None], [VECTORS, WIDTH]))
    tl.store(result + start[:, None] + columns, x, mask=inside & live[:, None])


@triton.jit(
    do_not_specialize=["of_class", "lookup_count"],
    do_not_specialize_on_alignment=["values", "bag_of_lookup", "block_of_bag"],
)
def weight_gradient_kernel(
    result,
    gradient,
    values,
    bag_of_lookup,
    block_of_bag,
    blocks,
    bases,
    tables,
    of_class,
    lookup_count,
    ONE_DIM: tl.constexpr,
    PRECISIONS: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR_ALIGN: tl.constexpr,
    ALONE: tl.constexpr,
    LOOKUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program computes LOOKUPS dot products of a lookup's row and its bag's gradient, those of its class."""
    lookup = tl.program_id(0).to(tl.int64) * LOOKUPS + tl.arange(0, LOOKUPS)
    live = lookup < lookup_count
    vector = tl.load(bag_of_lookup + lookup, mask=live, other=0).to(tl.int64)
    block = tl.load(block_of_bag + vector, mask=live, other=0)
    table = tl.load(blocks + block * 2)
    if not ALONE:
        live = live & (table_field(tables, table, _CLASS) == of_class)
    address, precision = weights_of(tables, table)
    dim = dims_of(tables, table, ONE_DIM)
    start = tl.load(bases + block) + vector * dim
    if VECTOR_ALIGN > 1:
        start = tl.multiple_of(start, [VECTOR_ALIGN])
    row = tl.load(values + lookup, mask=live, other=-1).to(tl.int64)
    columns = tl.arange(0, WIDTH)[None, :]
    mask = (columns < dim[:, None]) & (row >= 0)[:, None]
    x = load_rows(address, precision, row, dim, columns, mask, PRECISIONS, ALIGN)
    product = tl.load(gradient + start[:, None] + columns, mask=mask, other=0.0) * x
    # A row is padded with +0 to its own table's padded width, and from there to WIDTH with -0. Adding -0 changes no
    # sum, not even a sum of -0.
    product = tl.where(columns < table_field(tables, table, _PADDED)[:, None], product, -0.0)
    dot = lane_tree(product, LOOKUPS, WIDTH)
    tl.store(result + lookup, tl.where(row >= 0, dot, 0.0), mask=live)
