# SPDX-License-Identifier: Apache-2.0
"""Device functions of attention: which tiles a sequence has, who attends to whom, and scores of a tile.

Tiles have positions of one sequence. `rules` are (its positions, those of its history, those of its context, window).
"""

import triton
import triton.language as tl

from sennit.runtime.kernels.reference_attention import (
    COEFFICIENTS,
    LANES,
    LEAST,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    MOST,
    TO_INTEGER,
)
from sennit.runtime.kernels.triton_fused import fused, narrowed, operand, products

_LANES = tl.constexpr(LANES)
_LEAST = tl.constexpr(LEAST)
_MOST = tl.constexpr(MOST)
_LOG2_E = tl.constexpr(LOG2_E)
_LN2_HIGH = tl.constexpr(LN2_HIGH)
_LN2_LOW = tl.constexpr(LN2_LOW)
_TO_INTEGER = tl.constexpr(TO_INTEGER)
_P0, _P1, _P2, _P3, _P4 = (tl.constexpr(one) for one in COEFFICIENTS)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def sequence_of(offsets, tile, sequence_count, sequence_bits, BLOCK: tl.constexpr):
    """The sequence that a tile belongs to, and the tile's first position in it, which may be behind its end.

    Sequence b has the tiles from offsets[b] // BLOCK + b on. So their number is known where lengths are not.
    2^sequence_bits is more than `sequence_count`.
    """
    sequence = tile * 0
    step = 1 << sequence_bits
    for _ in tl.range(0, sequence_bits):
        step = step >> 1
        further = sequence + step
        inside = further < sequence_count
        start = tl.load(offsets + further, mask=inside, other=0) // BLOCK + further
        sequence = tl.where(inside & (start <= tile), further, sequence)
    first = (tile - (tl.load(offsets + sequence) // BLOCK + sequence)) * BLOCK
    return sequence, first.to(tl.int32)


@triton.jit
def rules_of(offsets, targets, sequence, context, window):
    """The row at which a sequence begins, and its `rules`."""
    begin = tl.load(offsets + sequence)
    count = (tl.load(offsets + sequence + 1) - begin).to(tl.int32)
    history = count
    if targets is not None:
        history = count - tl.load(targets + sequence).to(tl.int32)
    return begin, (count, history, tl.minimum(context, history), window)


@triton.jit
def places(position, rules):
    """Those of the context share place 0, all candidates are one place behind the history."""
    return tl.maximum(tl.minimum(position, rules[1]) - tl.maximum(rules[2] - 1, 0), 0)


@triton.jit
def attends(i, j, rules, CAUSAL: tl.constexpr):
    """[rows, columns]: whether position i attends to position j, of [rows, 1] and [1, columns]."""
    count, history, context, window = rules
    near = tl.abs(places(i, rules) - places(j, rules)) <= window
    if CAUSAL:
        near = near & (j <= i)
    return (((near | (i < context)) & (j < history)) | (i == j)) & (i < count) & (j < count)


@triton.jit
def columns_of(first, rules, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tiles of columns that the rows from `first` on attend to: (first tile, how many, first other, how many).

    The others have the candidates among these rows, which attend to themselves. They are behind.
    """
    count, history, context, window = rules
    last = tl.minimum(first + ROWS, count) - 1
    behind = tl.maximum(context - 1, 0)
    low = places(first, rules) - window
    begin = tl.where(low <= 0, 0, low + behind)
    end = places(last, rules) + window + behind + 1
    if CAUSAL:
        end = last + 1
    end = tl.minimum(tl.where(first < context, history, end), history)
    tile, stop = begin // COLUMNS, tl.cdiv(end, COLUMNS)
    other = tl.maximum(stop, tl.maximum(first, history) // COLUMNS)
    others = tl.where(last >= history, tl.maximum(last // COLUMNS + 1 - other, 0), 0)
    return tile, tl.maximum(stop - tile, 0), other, others


@triton.jit
def rows_of(first, rules, CAUSAL: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """The tiles of rows that attend to the columns from `first` on: (first tile, how many, first other, how many).

    The first ones have the context. The others are behind.
    """
    count, history, context, window = rules
    last = tl.minimum(first + COLUMNS, count) - 1
    behind = tl.maximum(context - 1, 0)
    begin = first
    if not CAUSAL:
        low = places(first, rules) - window
        begin = tl.where(low <= 0, 0, low + behind)
    # Of the last column of the history: candidates have one place, so all of them are near or none.
    high = places(tl.minimum(last, history - 1), rules) + window
    end = tl.where(places(history, rules) <= high, count, tl.minimum(high + behind + 1, history))
    # Candidates attend to themselves.
    begin = tl.where(first >= history, first, begin)
    end = tl.where(last >= history, tl.maximum(end, last + 1), end)
    of_context = tl.where(first < history, tl.cdiv(context, ROWS), 0)
    other = tl.maximum(begin // ROWS, of_context)
    return 0, of_context, other, tl.maximum(tl.cdiv(end, ROWS) - other, 0)


@triton.jit
def tile_at(number, tiles):
    """The tile with this number of those that `columns_of` or `rows_of` returned."""
    return tl.where(number < tiles[1], tiles[0] + number, tiles[2] + number - tiles[1])


@triton.jit
def load_tile(rows, begin, position, row_stride, column, width, count):
    """[positions, columns] of a head's rows, 0 beyond their ends."""
    at = rows + (begin + position)[:, None] * row_stride + column[None, :]
    return operand(tl.load(at, mask=(position < count)[:, None] & (column < width)[None, :], other=0.0))


@triton.jit
def inner_products(
    left, left_stride, i, right, right_stride, j, begin, count, dim,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """[rows, columns]: left[i] . right[j], over `dim` columns."""
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, dim, DEPTH):
        column = start + tl.arange(0, DEPTH)
        of_left = load_tile(left, begin, i, left_stride, column, dim, count)
        of_right = load_tile(right, begin, j, right_stride, column, dim, count)
        sums = products(of_left, tl.trans(of_right), sums)
    return sums


@triton.jit
def time_buckets(times, boundaries, begin, i, j, count, boundary_count, boundary_bits):
    """Int32 [rows, columns]: how many boundaries are at most the difference of the times of i and j."""
    of_i = tl.load(times + begin + i, mask=i < count, other=0)
    of_j = tl.load(times + begin + j, mask=j < count, other=0)
    return buckets(tl.abs(of_i[:, None] - of_j[None, :]), boundaries, boundary_count, boundary_bits)


@triton.jit
def buckets(apart, boundaries, boundary_count, boundary_bits):
    """Int32, like `apart`. 2^boundary_bits is more than `boundary_count`."""
    bucket = tl.zeros(apart.shape, tl.int32)
    step = 1 << boundary_bits
    for _ in tl.range(0, boundary_bits):
        step = step >> 1
        further = bucket + step
        inside = further <= boundary_count
        least = tl.load(boundaries + further - 1, mask=inside, other=0)
        bucket = tl.where(inside & (least <= apart), further, bucket)
    return bucket


@triton.jit
def scaled(
    sums, scale, position_bias, position_count, time_bias, times, boundaries, boundary_count, boundary_bits,
    begin, i, j, rules,
):  # fmt: skip
    """Scores [rows, columns] of products. The biases are those of the head."""
    if (position_bias is None) and (time_bias is None):
        return sums * scale
    bias = tl.zeros(sums.shape, tl.float32)
    count = rules[0]
    if position_bias is not None:
        distance = tl.abs(places(i, rules)[:, None] - places(j, rules)[None, :])
        bias = bias + tl.load(position_bias + tl.minimum(distance, position_count - 1))
    if time_bias is not None:
        bucket = time_buckets(times, boundaries, begin, i, j, count, boundary_count, boundary_bits)
        bias = bias + tl.load(time_bias + bucket)
    return fused(sums, tl.zeros(sums.shape, tl.float32) + scale, bias)


@triton.jit
def exponential(x):
    """e^x to 1 unit in the last place, of numbers between -87 and 87. NaN stays NaN."""
    x = tl.where(x > _MOST, _MOST, tl.where(x < _LEAST, _LEAST, x))
    none = tl.zeros(x.shape, tl.float32)
    n = fused(x, none + _LOG2_E, none + _TO_INTEGER) - _TO_INTEGER
    r = fused(n, none + _LN2_LOW, fused(n, none + _LN2_HIGH, x))
    p = fused(none + _P0, r, none + _P1)
    p = fused(p, r, none + _P2)
    p = fused(p, r, none + _P3)
    p = fused(p, r, none + _P4)
    p = fused(p * r, r, r) + 1.0
    power = ((tl.where(n == n, n, 0.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return p * power


@triton.jit
def logistic(x):
    return reciprocal(1.0 + exponential(0.0 - x))


@triton.jit
def reciprocal(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def add_to_lanes(lanes, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[rows, 16] and [rows, columns] -> [rows, 16]: column j is added to lane j mod 16, one after another."""
    parts: tl.constexpr = COLUMNS // _LANES
    return _add_parts(lanes, tl.reshape(x, [ROWS, parts, _LANES]), ROWS, parts)


@triton.jit
def _add_parts(lanes, x, ROWS: tl.constexpr, PARTS: tl.constexpr):
    half: tl.constexpr = PARTS // 2
    if half == 0:
        return lanes + tl.reshape(x, [ROWS, _LANES])
    else:
        halves = tl.permute(tl.reshape(x, [ROWS, 2, half, _LANES]), (0, 2, 3, 1))
        first, second = tl.split(halves)
        return _add_parts(_add_parts(lanes, first, ROWS, half), second, ROWS, half)


@triton.jit
def add_pairs(weights, mask, rows, sums, M: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr):
    """[M, K], [M, K], [K, N], [M, N] -> [M, N]: adds weights[m, k] · rows[k] where `mask` is set, k after k.

    A product with 0 changes nothing but the sign of a zero, if the row is finite. If one is not, sums go pair by pair.
    """
    weights = tl.where(mask, weights, 0.0)
    bits = rows.to(tl.float32).to(tl.int32, bitcast=True)
    not_finite = ((bits & _INFINITY) == _INFINITY).to(tl.int32)
    if tl.max(tl.max(not_finite, axis=1), axis=0) > 0:
        sums = _pair_by_pair(weights, mask, rows, sums, K, HALF)
    else:
        sums = products(narrowed(weights) if HALF else weights, rows, sums)
    return sums


@triton.jit
def _pair_by_pair(weights, mask, rows, sums, K: tl.constexpr, HALF: tl.constexpr):
    if HALF:
        weights = narrowed(weights).to(tl.float32)
    rows = rows.to(tl.float32)
    number = tl.arange(0, K)
    for k in tl.range(0, K):
        is_k = number == k
        # One number and zeros: no order of the sum changes it, but the sign of a zero.
        weight = tl.sum(tl.where(is_k[None, :], weights, 0.0), axis=1)
        row = tl.sum(tl.where(is_k[:, None], rows, 0.0), axis=0)
        here = tl.max((mask & is_k[None, :]).to(tl.int32), axis=1) > 0
        added = fused(tl.broadcast_to(weight[:, None], sums.shape), tl.broadcast_to(row[None, :], sums.shape), sums)
        sums = tl.where(here[:, None], added, sums)
    return sums


@triton.jit
def lane_sums(lanes, ROWS: tl.constexpr):
    """[rows, 16] to [rows]: upper halves of the lanes are added to lower ones."""
    return _halved(lanes, ROWS, _LANES)


@triton.jit
def _halved(x, ROWS: tl.constexpr, COUNT: tl.constexpr):
    half: tl.constexpr = COUNT // 2
    if half == 0:
        return tl.reshape(x, [ROWS])
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, [ROWS, 2, half]), (0, 2, 1)))
        return _halved(low + high, ROWS, half)
