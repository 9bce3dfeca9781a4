# SPDX-License-Identifier: Apache-2.0
"""The kernels that sum gradients of scores into those of biases, in the order of the reference.

An entry's sum is one chain: row after row, in each of them column after column. So a program has entries side by side.
Columns that share an entry are at most two spans of a row: places fall towards both sides of it, and times of a history
never fall.
"""

import triton
import triton.language as tl

from sennit.runtime.kernels.triton_sequence import places, rules_of

_UNROLL = tl.constexpr(4)


@triton.jit
def _attended(i, rules, CAUSAL: tl.constexpr):
    """The columns of the history that row i attends to: from, up to."""
    _, history, context, window = rules
    behind = tl.maximum(context - 1, 0)
    low = places(i, rules) - window
    begin = tl.where(low <= 0, 0, low + behind)
    end = places(i, rules) + window + behind + 1
    if CAUSAL:
        end = i + 1
    whole = i < context
    return tl.where(whole, 0, begin), tl.minimum(tl.where(whole, history, end), history)


@triton.jit
def _first_later(times, low, high, most, column_bits):
    """The first column from `low` on, and below `high`, whose time is above `most` [entries]; `high` if there is none.

    2^column_bits is more than `high - low`.
    """
    at = low + tl.zeros(most.shape, tl.int32)
    step = 1 << column_bits
    for _ in tl.range(0, column_bits):
        step = step >> 1
        further = at + step
        inside = further <= high
        time = tl.load(times + further - 1, mask=inside, other=0)
        at = tl.where(inside & (time <= most), further, at)
    return at


@triton.jit
def _add_span(sums, row, begin, end):
    """Adds the numbers of a row from `begin` [entries] to `end`, one after another."""
    for number in tl.range(0, tl.max(end - begin, axis=0), _UNROLL):
        for more in tl.static_range(0, _UNROLL):
            at = begin + number + more
            sums = sums + tl.load(row + at, mask=at < end, other=0.0)
    return sums


@triton.jit(do_not_specialize=["first_tile", "stop_tile", "context", "window", "column_bits"])
def bias_gradient_kernel(
    of_bias, of_scores, score_places, offsets, targets, times, boundaries, first_tile, stop_tile, heads, entries,
    first_entry, entry_count, context, window, boundary_count, column_bits,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Adds to float32 [sequences, heads, entries] what the tiles from `first_tile` to `stop_tile` give.

    A program has entries of one bias, which has `entry_count` from `first_entry` on: that by times if there are some.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, rules = rules_of(offsets, targets, sequence, context, window)
    count, history, context, window = rules
    first = (tl.load(offsets + sequence) // ROWS).to(tl.int32) + sequence
    row_begin = tl.maximum(first_tile - first, 0) * ROWS
    row_end = tl.minimum((stop_tile - first) * ROWS, count)
    if row_begin >= row_end:
        return
    entry = tl.program_id(2) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < entry_count
    is_last = entry == entry_count - 1
    of_entry = of_bias + (sequence.to(tl.int64) * heads + head) * entries + first_entry + entry
    sums = tl.load(of_entry, mask=inside, other=0.0)
    behind = tl.maximum(context - 1, 0)
    if times is not None:
        times += begin
        least = tl.load(boundaries + entry - 1, mask=inside & (entry > 0), other=0)
        most = tl.load(boundaries + entry, mask=entry < boundary_count, other=0)
    for i in tl.range(row_begin, row_end):
        tile = first + i // ROWS
        row = of_scores + tl.load(score_places + tile) + (head * ROWS + i % ROWS).to(tl.int64) * count
        low, high = _attended(i, rules, CAUSAL)
        if times is None:
            place = places(i, rules)
            # All columns whose place is at most that of the row less the entry, and of these the ones at that place.
            before = place - entry
            left_end = tl.where(before < 0, 0, before + behind + 1)
            left = tl.where(is_last | (before <= 0), 0, before + behind)
            after = place + entry + behind
            right = tl.where(is_last, tl.maximum(after, left_end), after)
            right_end = tl.where(is_last, high, tl.where(entry > 0, after + 1, after))
        else:
            now = tl.load(times + i)
            middle = _first_later(times, low, high, now + tl.zeros([ENTRIES], tl.int64), column_bits)
            left = tl.where(is_last, low, _first_later(times, low, middle, now - most, column_bits))
            left_end = _first_later(times, low, middle, now - least, column_bits)
            right = _first_later(times, middle, high, now + least - 1, column_bits)
            right_end = tl.where(is_last, high, _first_later(times, middle, high, now + most - 1, column_bits))
        left, left_end = tl.maximum(left, low), tl.minimum(left_end, high)
        right, right_end = tl.maximum(right, low), tl.minimum(right_end, high)
        sums = _add_span(sums, row, left, tl.where(inside, left_end, left))
        sums = _add_span(sums, row, right, tl.where(inside, right_end, right))
        if i >= history:
            sums = tl.where(entry == 0, sums + tl.load(row + i), sums)
    tl.store(of_entry, sums, mask=inside)


@triton.jit(do_not_specialize=["sequence_count"])
def sum_sequences_kernel(result, parts, sequence_count, count, BLOCK: tl.constexpr):
    """[count]: sums over [sequence_count, count], one after another."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for _ in tl.range(0, sequence_count):
        sums = sums + tl.load(parts + at, mask=at < count, other=0.0)
        parts += count
    tl.store(result + at, sums, mask=at < count)
