# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention: outputs, gradients of queries, gradients of keys and values.

A program has a tile of rows (or of columns), a head, and a block of columns of the result. No sum is shared by
programs, so there is nothing atomic, and no tile's size changes a bit.
"""

import triton
import triton.language as tl

from sennit.runtime.kernels.reference_attention import LANES
from sennit.runtime.kernels.triton_fused import fused, narrowed
from sennit.runtime.kernels.triton_sequence import (
    add_pairs,
    add_to_lanes,
    attends,
    columns_of,
    exponential,
    inner_products,
    lane_sums,
    load_tile,
    logistic,
    reciprocal,
    rows_of,
    rules_of,
    scaled,
    sequence_of,
    tile_at,
)

_LANES = tl.constexpr(LANES)


@triton.jit
def _scores(
    query, query_stride, key, key_stride, dim, scale, position_bias, position_count, time_bias, times, boundaries,
    boundary_count, boundary_bits, begin, i, j, rules,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """[rows, columns]: scores, and whether i attends to j."""
    sums = inner_products(query, query_stride, i, key, key_stride, j, begin, rules[0], dim, ROWS, COLUMNS, DEPTH)
    scores = scaled(
        sums, scale, position_bias, position_count, time_bias, times, boundaries, boundary_count, boundary_bits,
        begin, i, j, rules,
    )  # fmt: skip
    return scores, attends(i[:, None], j[None, :], rules, CAUSAL)


@triton.jit
def _store_tile(rows, begin, position, row_stride, column, width, count, x, HALF: tl.constexpr):
    at = rows + (begin + position)[:, None] * row_stride + column[None, :]
    # Zeros have one sign, whatever masks added to them.
    x = x + 0.0
    if HALF:
        x = narrowed(x)
    tl.store(at, x, mask=(position < count)[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["sequence_count", "sequence_bits", "first_tile", "context", "window"])
def attend_kernel(
    output, statistics, query, key, value, offsets, targets, position_bias, time_bias, times, boundaries,
    sequence_count, sequence_bits, first_tile, heads, dim, width, query_row, query_head, key_row, key_head, value_row,
    value_head, context, window, scale, share, position_count, boundary_count, boundary_bits,
    SOFTMAX: tl.constexpr, CAUSAL: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Outputs [rows, heads, width], and with softmax the statistics [rows, heads, 2]."""
    sequence, first = sequence_of(offsets, tl.program_id(0) + first_tile, sequence_count, sequence_bits, ROWS)
    begin, rules = rules_of(offsets, targets, sequence, context, window)
    count = rules[0]
    if first >= count:
        return
    head = tl.program_id(1)
    query += head * query_head
    key += head * key_head
    value += head * value_head
    if position_bias is not None:
        position_bias += head * position_count
    if time_bias is not None:
        time_bias += head * (boundary_count + 1)
    i = first + tl.arange(0, ROWS)
    tiles = columns_of(first, rules, CAUSAL, ROWS, COLUMNS)
    all_tiles = tiles[1] + tiles[3]
    if SOFTMAX:
        most = tl.full([ROWS], float("-inf"), tl.float32)
        for number in tl.range(0, all_tiles):
            j = tile_at(number, tiles) * COLUMNS + tl.arange(0, COLUMNS)
            scores, mask = _scores(
                query, query_row, key, key_row, dim, scale, position_bias, position_count, time_bias, times,
                boundaries, boundary_count, boundary_bits, begin, i, j, rules, CAUSAL, ROWS, COLUMNS, DEPTH,
            )  # fmt: skip
            most = tl.maximum(most, tl.max(tl.where(mask, scores, float("-inf")), axis=1))
        lanes = tl.zeros([ROWS, _LANES], tl.float32)
        for number in tl.range(0, all_tiles):
            j = tile_at(number, tiles) * COLUMNS + tl.arange(0, COLUMNS)
            scores, mask = _scores(
                query, query_row, key, key_row, dim, scale, position_bias, position_count, time_bias, times,
                boundaries, boundary_count, boundary_bits, begin, i, j, rules, CAUSAL, ROWS, COLUMNS, DEPTH,
            )  # fmt: skip
            powers = tl.where(mask, exponential(scores - most[:, None]), 0.0)
            lanes = add_to_lanes(lanes, powers, ROWS, COLUMNS)
        # Rows beyond the end attend to nothing.
        part = reciprocal(tl.where(i < count, lane_sums(lanes, ROWS), 1.0))
        of_row = statistics + ((begin + i) * heads + head) * 2
        is_first = (i < count) & (tl.program_id(2) == 0)
        tl.store(of_row, most, mask=is_first)
        tl.store(of_row + 1, part, mask=is_first)
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for number in tl.range(0, all_tiles):
        j = tile_at(number, tiles) * COLUMNS + tl.arange(0, COLUMNS)
        scores, mask = _scores(
            query, query_row, key, key_row, dim, scale, position_bias, position_count, time_bias, times, boundaries,
            boundary_count, boundary_bits, begin, i, j, rules, CAUSAL, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        powers = exponential(scores - most[:, None]) if SOFTMAX else scores * logistic(scores)
        weights = powers * (part[:, None] if SOFTMAX else share)
        values = load_tile(value, begin, j, value_row, column, width, count)
        sums = add_pairs(weights, mask, values, sums, ROWS, COLUMNS, HALF)
    _store_tile(output + head * width, begin, i, heads * width, column, width, count, sums, HALF)


@triton.jit(do_not_specialize=["sequence_count", "sequence_bits", "first_tile", "context", "window"])
def query_gradient_kernel(
    of_query, means, of_scores, score_places, gradient, statistics, query, key, value, offsets, targets,
    position_bias, time_bias, times, boundaries, sequence_count, sequence_bits, first_tile, heads, dim, width,
    query_row, query_head, key_row, key_head, value_row, value_head, gradient_row, gradient_head, context, window,
    scale, share, position_count, boundary_count, boundary_bits,
    SOFTMAX: tl.constexpr, CAUSAL: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of queries; with softmax the `means` [rows, heads]; gradients of scores, if biases want them.

    `of_scores` has [rows, columns up to the last one of the sequence] for each head of each tile, from
    `score_places[tile]` on.
    """
    tile = tl.program_id(0) + first_tile
    sequence, first = sequence_of(offsets, tile, sequence_count, sequence_bits, ROWS)
    begin, rules = rules_of(offsets, targets, sequence, context, window)
    count = rules[0]
    if first >= count:
        return
    head = tl.program_id(1)
    query += head * query_head
    key += head * key_head
    value += head * value_head
    gradient += head * gradient_head
    if position_bias is not None:
        position_bias += head * position_count
    if time_bias is not None:
        time_bias += head * (boundary_count + 1)
    i = first + tl.arange(0, ROWS)
    tiles = columns_of(first, rules, CAUSAL, ROWS, COLUMNS)
    all_tiles = tiles[1] + tiles[3]
    if SOFTMAX:
        of_row = (begin + i) * heads + head
        most = tl.load(statistics + of_row * 2, mask=i < count, other=0.0)
        part = tl.load(statistics + of_row * 2 + 1, mask=i < count, other=0.0)
        lanes = tl.zeros([ROWS, _LANES], tl.float32)
        for number in tl.range(0, all_tiles):
            j = tile_at(number, tiles) * COLUMNS + tl.arange(0, COLUMNS)
            scores, mask = _scores(
                query, query_row, key, key_row, dim, scale, position_bias, position_count, time_bias, times,
                boundaries, boundary_count, boundary_bits, begin, i, j, rules, CAUSAL, ROWS, COLUMNS, DEPTH,
            )  # fmt: skip
            arriving = inner_products(
                gradient, gradient_row, i, value, value_row, j, begin, count, width, ROWS, COLUMNS, DEPTH
            )
            weights = exponential(scores - most[:, None]) * part[:, None]
            lanes = add_to_lanes(lanes, tl.where(mask, weights * arriving, 0.0), ROWS, COLUMNS)
        mean = lane_sums(lanes, ROWS)
        tl.store(means + of_row, mean, mask=(i < count) & (tl.program_id(2) == 0))
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for number in tl.range(0, all_tiles):
        j = tile_at(number, tiles) * COLUMNS + tl.arange(0, COLUMNS)
        scores, mask = _scores(
            query, query_row, key, key_row, dim, scale, position_bias, position_count, time_bias, times, boundaries,
            boundary_count, boundary_bits, begin, i, j, rules, CAUSAL, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        arriving = inner_products(
            gradient, gradient_row, i, value, value_row, j, begin, count, width, ROWS, COLUMNS, DEPTH
        )
        if SOFTMAX:
            weights = exponential(scores - most[:, None]) * part[:, None]
            changes = weights * (arriving - mean[:, None])
        else:
            changes = arriving * _slope(scores, logistic(scores)) * share
        if of_scores is not None:
            place = tl.load(score_places + tile) + head * ROWS * count
            at = of_scores + place + (i - first)[:, None] * count + j[None, :]
            tl.store(at, changes, mask=mask & (tl.program_id(2) == 0))
        keys = load_tile(key, begin, j, key_row, column, dim, count)
        sums = add_pairs(changes * scale, mask, keys, sums, ROWS, COLUMNS, HALF)
    _store_tile(of_query + head * dim, begin, i, heads * dim, column, dim, count, sums, HALF)


@triton.jit
def _slope(scores, y):
    """Of x · sigmoid(x), where y is sigmoid(x)."""
    one = tl.full(scores.shape, 1.0, tl.float32)
    return y * fused(scores, 1.0 - y, one)


@triton.jit(do_not_specialize=["sequence_count", "sequence_bits", "first_tile", "context", "window"])
def key_gradient_kernel(
    of_key, of_value, means, gradient, statistics, query, key, value, offsets, targets, position_bias, time_bias,
    times, boundaries, sequence_count, sequence_bits, first_tile, heads, dim, width, query_row, query_head, key_row,
    key_head, value_row, value_head, gradient_row, gradient_head, context, window, scale, share, position_count,
    boundary_count, boundary_bits,
    SOFTMAX: tl.constexpr, CAUSAL: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. Tiles of the grid are columns: COLUMNS of them."""
    sequence, first = sequence_of(offsets, tl.program_id(0) + first_tile, sequence_count, sequence_bits, COLUMNS)
    begin, rules = rules_of(offsets, targets, sequence, context, window)
    count = rules[0]
    if first >= count:
        return
    head = tl.program_id(1)
    query += head * query_head
    key += head * key_head
    value += head * value_head
    gradient += head * gradient_head
    if position_bias is not None:
        position_bias += head * position_count
    if time_bias is not None:
        time_bias += head * (boundary_count + 1)
    j = first + tl.arange(0, COLUMNS)
    tiles = rows_of(first, rules, CAUSAL, COLUMNS, ROWS)
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    key_sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    value_sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for number in tl.range(0, tiles[1] + tiles[3]):
        i = tile_at(number, tiles) * ROWS + tl.arange(0, ROWS)
        scores, mask = _scores(
            query, query_row, key, key_row, dim, scale, position_bias, position_count, time_bias, times, boundaries,
            boundary_count, boundary_bits, begin, i, j, rules, CAUSAL, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        arriving = inner_products(
            gradient, gradient_row, i, value, value_row, j, begin, count, width, ROWS, COLUMNS, DEPTH
        )
        if SOFTMAX:
            of_row = (begin + i) * heads + head
            most = tl.load(statistics + of_row * 2, mask=i < count, other=0.0)
            part = tl.load(statistics + of_row * 2 + 1, mask=i < count, other=0.0)
            mean = tl.load(means + of_row, mask=i < count, other=0.0)
            weights = exponential(scores - most[:, None]) * part[:, None]
            changes = weights * (arriving - mean[:, None])
        else:
            y = logistic(scores)
            weights = scores * y * share
            changes = arriving * _slope(scores, y) * share
        turned = tl.trans(mask)
        queries = load_tile(query, begin, i, query_row, column, dim, count)
        key_sums = add_pairs(tl.trans(changes * scale), turned, queries, key_sums, COLUMNS, ROWS, HALF)
        gradients = load_tile(gradient, begin, i, gradient_row, column, width, count)
        value_sums = add_pairs(tl.trans(weights), turned, gradients, value_sums, COLUMNS, ROWS, HALF)
    _store_tile(of_key + head * dim, begin, j, heads * dim, column, dim, count, key_sums, HALF)
    _store_tile(of_value + head * width, begin, j, heads * width, column, width, count, value_sums, HALF)
