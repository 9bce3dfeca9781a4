# SPDX-License-Identifier: Apache-2.0
"""Device functions that read, sum and write rows. Tiles are [rows, columns]; each row may be of another table.

Tables have numbers. One int64 tensor holds what kernels need to know of them (`Tables.fields`, triton_tables.py). Every
operation that rounds is one IEEE operation. So divisions and roots are `div_rn` and `sqrt_rn`, because `/` and `sqrt`
are approximations on a GPU. There is no fused multiply-add (launches say `enable_fp_fusion=False`), and no `tl.sum`
over more than two elements, because the compiler chooses its order.
"""

import triton
import triton.language as tl

from sennit.runtime.kernels.triton_tables import (
    BF16,
    DIM,
    FIELDS,
    FIRST_ROW,
    FP16,
    FP32,
    PRECISION,
    ROW_NUMBERS,
    STREAM,
    WEIGHT,
)

_FIELDS = tl.constexpr(FIELDS)
_WEIGHT = tl.constexpr(WEIGHT)
_DIM = tl.constexpr(DIM)
_PRECISION = tl.constexpr(PRECISION)
_FIRST_ROW = tl.constexpr(FIRST_ROW)
_ROW_NUMBERS = tl.constexpr(ROW_NUMBERS)
_STREAM = tl.constexpr(STREAM)
_FP32 = tl.constexpr(FP32)
_FP16 = tl.constexpr(FP16)
_BF16 = tl.constexpr(BF16)

# Bits of float32.
_INFINITY = tl.constexpr(0x7F800000)
_LEAST_NORMAL_HALF = tl.constexpr(0x38800000)  # 2^-14
_BEYOND_HALF = tl.constexpr(0x47800000)  # 2^16
_HALF_EXPONENT_STEP = tl.constexpr(112 << 10)  # the exponents' biases differ by 112


@triton.jit
def table_field(tables, table, field: tl.constexpr):
    """One field of each table of `table` [rows]."""
    return tl.load(tables + table * _FIELDS + field)


@triton.jit
def owner_of(bounds, place, live, owner_count, owner_bits):
    """Int32, like `place`: the owner whose lookups are from `bounds[owner]` to `bounds[owner + 1]`, where `live`.

    `bounds` int64 [owner_count + 1], rising from 0. 2^owner_bits is more than `owner_count`.
    """
    owner = tl.zeros(place.shape, tl.int32)
    step = 1 << owner_bits
    for _ in tl.range(0, owner_bits):
        step = step >> 1
        further = owner + step
        inside = live & (further < owner_count)
        owner = tl.where(inside & (tl.load(bounds + further, mask=inside, other=0) <= place), further, owner)
    return owner


@triton.jit
def dims_of(tables, table, ONE_DIM: tl.constexpr):
    """The columns of each table; a constant if all tables have the same number."""
    if ONE_DIM > 0:
        return tl.full(table.shape, ONE_DIM, tl.int64)
    return table_field(tables, table, _DIM)


@triton.jit
def element_pointers(address, row, dim, columns, element: tl.constexpr, ALIGN: tl.constexpr):
    """[rows, columns] pointers from base addresses.

    ALIGN divides all dims. If it is not 1, addresses are multiples of 16.
    """
    offset = row * dim
    base = address.to(tl.pointer_type(element))
    if ALIGN > 1:
        base = tl.multiple_of(base, [16])
        offset = tl.multiple_of(offset, [ALIGN])
    return base[:, None] + offset[:, None] + columns


@triton.jit
def weights_of(tables, table):
    """Addresses and precisions of each table's weights, for `load_rows` and `store_rows`."""
    return table_field(tables, table, _WEIGHT), table_field(tables, table, _PRECISION)[:, None]


@triton.jit
def load_rows(address, precision, row, dim, columns, mask, PRECISIONS: tl.constexpr, ALIGN: tl.constexpr):
    """Float32 [rows, columns] of the weights; +0 where `mask` is not set. PRECISIONS: those of the tables."""
    if PRECISIONS == _FP32:
        return tl.load(element_pointers(address, row, dim, columns, tl.float32, ALIGN), mask=mask, other=0.0)
    x = tl.zeros(mask.shape, tl.float32)
    if _FP32 & PRECISIONS:
        own = mask & (precision == _FP32)
        x = tl.load(element_pointers(address, row, dim, columns, tl.float32, ALIGN), mask=own, other=0.0)
    bits = tl.load(
        element_pointers(address, row, dim, columns, tl.uint16, ALIGN), mask=mask & (precision != _FP32), other=0
    )
    if _FP16 & PRECISIONS:
        x = tl.where(precision == _FP16, bits.to(tl.float16, bitcast=True).to(tl.float32), x)
    if _BF16 & PRECISIONS:
        x = tl.where(precision == _BF16, (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def store_rows(
    tables,
    table,
    address,
    precision,
    row,
    dim,
    columns,
    mask,
    x,
    step,
    seed_low,
    seed_high,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISIONS: tl.constexpr,
    ALIGN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Writes float32 [ROWS, WIDTH] to the weights in each table's precision, where `mask` is set."""
    if PRECISIONS == _FP32:
        tl.store(element_pointers(address, row, dim, columns, tl.float32, ALIGN), x, mask=mask)
    else:
        if _FP32 & PRECISIONS:
            own = mask & (precision == _FP32)
            tl.store(element_pointers(address, row, dim, columns, tl.float32, ALIGN), x, mask=own)
        if STOCHASTIC:
            words = random_words(tables, table, row, step, seed_low, seed_high, ROWS, WIDTH)
        else:
            words = tl.zeros([ROWS, WIDTH], tl.uint32)
        bits = tl.zeros([ROWS, WIDTH], tl.uint16)
        if _FP16 & PRECISIONS:
            bits = tl.where(precision == _FP16, _half(x, words, STOCHASTIC), bits)
        if _BF16 & PRECISIONS:
            bits = tl.where(precision == _BF16, _bfloat(x, words, STOCHASTIC), bits)
        low = element_pointers(address, row, dim, columns, tl.uint16, ALIGN)
        tl.store(low, bits, mask=mask & (precision != _FP32))


@triton.jit
def lane_tree(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] to [ROWS]: upper halves of the columns are added to lower ones until one is left."""
    half: tl.constexpr = WIDTH // 2
    if half == 0:
        return tl.reshape(x, [ROWS])
    else:
        return lane_tree(tl.sum(tl.reshape(x, [ROWS, 2, half]), axis=1), ROWS, half)


@triton.jit
def pair_tree(x, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """[COUNT, WIDTH] to [1, WIDTH]: neighbours are added, level by level. Missing rows are +0."""
    half: tl.constexpr = COUNT // 2
    if half == 0:
        return x
    else:
        return pair_tree(tl.sum(tl.reshape(x, [half, 2, WIDTH]), axis=1), half, WIDTH)


@triton.jit
def random_words(tables, table, row, step, seed_low, seed_high, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Uint32 [ROWS, WIDTH], WIDTH 64 or more, by Philox4x32-10: counters as in docs/reference/embedding.md."""
    tl.static_assert(WIDTH % 64 == 0, "a block of 16 lanes makes the words of 64 columns")
    groups: tl.constexpr = WIDTH // 64
    numbers = table_field(tables, table, _ROW_NUMBERS)
    listed = tl.load(numbers.to(tl.pointer_type(tl.int64)) + row, mask=numbers != 0, other=0)
    global_row = tl.where(numbers != 0, listed, table_field(tables, table, _FIRST_ROW) + row)
    low = (global_row & 0xFFFFFFFF).to(tl.uint32)[:, None]
    high = ((global_row >> 32) << 16).to(tl.uint32)[:, None]
    stream = table_field(tables, table, _STREAM).to(tl.uint32)[:, None]
    block = tl.arange(0, groups * 16).to(tl.uint32)[None, :]
    none = tl.zeros([ROWS, groups * 16], tl.uint32)
    seed = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | seed_low.to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = tl.philox(seed, none | low, high | block, none | step.to(tl.uint32, bitcast=True), none | stream)
    # Columns are [group, word, lane]. Each join adds a bit of word behind the lane: first its high bit, then its low
    # one.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    words = tl.permute(tl.reshape(words, [ROWS, groups, 16, 4]), (0, 1, 3, 2))
    return tl.reshape(words, [ROWS, WIDTH])


@triton.jit
def _bfloat(x, words, STOCHASTIC: tl.constexpr):
    """The bits of a float32 as bf16. The interpreter's own conversion truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    moved = magnitude + (words & 0xFFFF) if STOCHASTIC else magnitude + 0x7FFF + ((magnitude >> 16) & 1)
    kept = tl.where(magnitude < _INFINITY, moved >> 16, 0x7F80) | ((bits >> 31) << 15)
    return tl.where(magnitude > _INFINITY, 0x7FC0, kept).to(tl.uint16)


@triton.jit
def _half(x, words, STOCHASTIC: tl.constexpr):
    """The bits of a float32 as fp16."""
    if not STOCHASTIC:
        return x.to(tl.float16).to(tl.uint16, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    moved = magnitude + (words & 0x1FFF)
    normal = tl.where(moved < _BEYOND_HALF, (moved >> 13) - _HALF_EXPONENT_STEP, 0x7C00)
    # Subnormal fp16 numbers have the unit 2^-24: the mantissa, with its leading one, is shifted by 14 or more.
    shift = 126 - tl.minimum(magnitude >> 23, 126)
    shifted = tl.minimum(shift, 31)
    mantissa = (magnitude & 0x7FFFFF) | 0x800000
    one = tl.full(x.shape, 1, tl.uint32)
    subnormal = tl.where(shift <= 31, (mantissa + (words & ((one << shifted) - 1))) >> shifted, 0)
    kept = tl.where(magnitude < _LEAST_NORMAL_HALF, subnormal, normal) | ((bits >> 31) << 15)
    return tl.where(magnitude > _INFINITY, 0x7E00, kept).to(tl.uint16)
