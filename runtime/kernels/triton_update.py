# SPDX-License-Identifier: Apache-2.0
"""Kernels that write: gradients of equal rows are summed, and each row is updated once, in place.

A program sums and updates some rows at a time (`update_kernel`). Long rows (`triton_runs`) are summed before, by many
programs: their segments are cut into pieces of CHUNKS chunks, each of which is a subtree. A program sums the chunks of
a piece side by side (`sum_long_kernel`), and one adds the pieces of a segment up (`combine_kernel`). Only the device
knows how much work there is, so programs take it by stride. Which program takes what changes no sum.
"""

import triton
import triton.language as tl

from sennit.runtime.kernels.triton_rows import dims_of, load_rows, pair_tree, table_field, weights_of
from sennit.runtime.kernels.triton_step import step_rows
from sennit.runtime.kernels.triton_tables import FIRST_KEY

_FIRST_KEY = tl.constexpr(FIRST_KEY)


@triton.jit
def _gradients(
    places,
    live,
    dim,
    columns,
    gradient,
    weights,
    shares,
    starts,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    VECTOR_ALIGN: tl.constexpr,
):
    """Float32 [places, columns] of the lookups at `places` of the sorted order; +0 where they are not `live`."""
    start = tl.load(starts + places, mask=live, other=0)
    if VECTOR_ALIGN > 1:
        start = tl.multiple_of(start, [VECTOR_ALIGN])
    mask = (columns < dim[:, None]) & live[:, None]
    g = tl.load(gradient + start[:, None] + columns, mask=mask, other=0.0)
    if WEIGHTED:
        g = tl.where(mask, tl.load(weights + places, mask=live, other=0.0)[:, None] * g, 0.0)
    if MEAN:
        g = tl.where(mask, tl.load(shares + places, mask=live, other=0.0)[:, None] * g, 0.0)
    return g


@triton.jit
def _no_halves(x, LEVELS: tl.constexpr):
    """A zero for each level."""
    halves = ()
    for _ in tl.static_range(LEVELS):
        halves = halves + (tl.zeros_like(x),)  # noqa: RUF005 - the language has no unpacking
    return halves


@triton.jit
def _next_slice(x, halves, crossed, LEVELS: tl.constexpr):
    """Ends the slice with the sum `x` [rows, columns], before lookups of another one. Returns the next `x`, `halves`.

    `crossed` int32 [rows]: the bits in which the two slices' numbers differ; 0 where there is no other slice.
    `halves`: for each level of the tree over slices the left half that waits for its right one, or +0. The two slices
    meet at the highest of the bits. What waits below it is complete. Sums are never -0, so +0 may be added to them.
    """
    kept = ()
    for level in tl.static_range(LEVELS):
        rest = (crossed >> level)[:, None]
        half = halves[level]
        kept = kept + (tl.where(rest > 1, 0.0, tl.where(rest == 1, x, half)),)  # noqa: RUF005
        x = tl.where(rest > 1, half + x, x)
    return tl.where((crossed != 0)[:, None], 0.0, x), kept


@triton.jit
def _crossed(keys, place, live):
    """The bits in which the key at each place differs from the one before, of the same row; 0 if not `live`."""
    key = tl.load(keys + place, mask=live, other=0)
    return (key ^ tl.load(keys + place - 1, mask=live, other=0)).to(tl.int32)


@triton.jit(do_not_specialize=["slice_bits", "of_class", "count", "segment_room", "step", "seed_low", "seed_high"])
def update_kernel(
    gradient,
    weights,
    shares,
    starts,
    table_of_place,
    tables,
    keys,
    slice_bits,
    rows,
    segments,
    borders,
    sums,
    of_class,
    count,
    segment_room,
    bad,
    constants,
    step,
    seed_low,
    seed_high,
    out,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    ONE_DIM: tl.constexpr,
    PRECISIONS: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR_ALIGN: tl.constexpr,
    LEVELS: tl.constexpr,
    KIND: tl.constexpr,
    CLIPPED: tl.constexpr,
    DECAY: tl.constexpr,
    DECAY_AFTER: tl.constexpr,
    KEEP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sums and updates the rows of one class, ROWS at a time. The sums of long rows' segments are in `sums`.

    KIND "none" writes sums to `out` [rows of the class, WIDTH] and updates nothing.
    """
    first_row = tl.load(borders + of_class * 3)
    row_end = tl.load(borders + of_class * 3 + 3)
    first_piece = tl.load(borders + of_class * 3 + 2)
    columns = tl.arange(0, WIDTH)[None, :]
    for first in tl.range(first_row + tl.program_id(0) * ROWS, row_end, tl.num_programs(0) * ROWS):
        number = first + tl.arange(0, ROWS)
        live = number < row_end
        begin = tl.load(rows + number, mask=live, other=0)
        length = tl.load(rows + number + 1, mask=live, other=0) - begin
        segment = tl.load(rows + count + 1 + number, mask=live, other=0)
        segment_count = tl.load(rows + count + 2 + number, mask=live, other=0) - segment
        length = tl.where(segment_count > 0, 0, length)
        table = tl.load(table_of_place + begin, mask=live, other=0)
        row = (tl.load(keys + begin, mask=live, other=0) >> slice_bits) - table_field(tables, table, _FIRST_KEY)
        dim = dims_of(tables, table, ONE_DIM)
        address, precision = weights_of(tables, table)
        if KIND != "none":
            # Before the gradients, which may be added meanwhile.
            w = load_rows(
                address, precision, row, dim, columns, (columns < dim[:, None]) & live[:, None], PRECISIONS, ALIGN
            )
        # Most rows have one lookup, whose gradient is loaded beside the weights.
        g = 0.0 + _gradients(
            begin, length > 0, dim, columns, gradient, weights, shares, starts, WEIGHTED, MEAN, VECTOR_ALIGN
        )
        halves = _no_halves(g, LEVELS)
        for place in tl.range(1, tl.max(length, axis=0), loop_unroll_factor=UNROLL):
            here = place < length
            if LEVELS > 0:
                g, halves = _next_slice(g, halves, _crossed(keys, begin + place, here), LEVELS)
            g = g + _gradients(
                begin + place, here, dim, columns, gradient, weights, shares, starts, WEIGHTED, MEAN, VECTOR_ALIGN
            )
        for place in tl.range(0, tl.max(segment_count, axis=0)):
            here = place < segment_count
            if LEVELS > 0:
                begin = tl.load(segments + segment + place, mask=here, other=0)
                g, halves = _next_slice(g, halves, _crossed(keys, begin, here & (place > 0)), LEVELS)
            slot = tl.load(segments + 2 * segment_room + segment + place, mask=here, other=0) - first_piece
            at = sums + slot.to(tl.int64)[:, None] * WIDTH + columns
            g = g + tl.load(at, mask=here[:, None] & (columns >= 0), other=0.0)
        for level in tl.static_range(LEVELS):
            g = halves[level] + g
        if KIND == "none":
            at = out + (number - first_row).to(tl.int64)[:, None] * WIDTH + columns
            tl.store(at, g, mask=live[:, None] & (columns >= 0))
        else:
            step_rows(
                g,
                w,
                live,
                table,
                row,
                tables,
                address,
                precision,
                dim,
                bad,
                constants,
                step,
                seed_low,
                seed_high,
                KIND,
                CLIPPED,
                DECAY,
                DECAY_AFTER,
                KEEP,
                ROWS,
                WIDTH,
                PRECISIONS,
                ALIGN,
                STOCHASTIC,
            )


@triton.jit(do_not_specialize=["of_class", "segment_room"])
def sum_long_kernel(
    gradient,
    weights,
    shares,
    starts,
    table_of_place,
    tables,
    segments,
    borders,
    sums,
    of_class,
    segment_room,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    ONE_DIM: tl.constexpr,
    VECTOR_ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Writes the sum of each piece of a class to `sums` [pieces, WIDTH]."""
    piece: tl.constexpr = CHUNK * CHUNKS
    columns = tl.arange(0, WIDTH)[None, :]
    first_segment = tl.load(borders + of_class * 3 + 1)
    segment_end = tl.load(borders + of_class * 3 + 4)
    first_piece = tl.load(borders + of_class * 3 + 2)
    piece_end = tl.load(borders + of_class * 3 + 5)
    first_pieces = segments + 2 * segment_room
    for item in tl.range(first_piece + tl.program_id(0), piece_end, tl.num_programs(0)):
        # The last segment whose first piece is not after this one.
        low = first_segment
        high = segment_end
        while high - low > 1:
            middle = (low + high) // 2
            is_after = tl.load(first_pieces + middle) > item
            high = tl.where(is_after, middle, high)
            low = tl.where(is_after, low, middle)
        begin = tl.load(segments + low) + (item - tl.load(first_pieces + low)) * piece
        end = tl.load(segments + segment_room + low)
        table = tl.load(table_of_place + begin + tl.zeros([1], tl.int32))
        dim = dims_of(tables, table, ONE_DIM)
        chunk = begin + tl.arange(0, CHUNKS) * CHUNK
        g = tl.zeros([CHUNKS, WIDTH], tl.float32)
        for place in tl.range(0, tl.minimum(CHUNK, end - begin), loop_unroll_factor=UNROLL):
            g = g + _gradients(
                chunk + place,
                chunk + place < end,
                dim,
                columns,
                gradient,
                weights,
                shares,
                starts,
                WEIGHTED,
                MEAN,
                VECTOR_ALIGN,
            )
        slot = (item - first_piece).to(tl.int64)
        tl.store(sums + slot * WIDTH + columns, pair_tree(g, CHUNKS, WIDTH))


@triton.jit(do_not_specialize=["of_class", "segment_room"])
def combine_kernel(sums, segments, borders, of_class, segment_room, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    """Adds the pieces of each segment of a class up, PIECES neighbours at a time, at its first one.

    A program takes a whole segment, level after level, and waits for its own stores between them.
    """
    columns = tl.arange(0, WIDTH)[None, :]
    first_segment = tl.load(borders + of_class * 3 + 1)
    segment_end = tl.load(borders + of_class * 3 + 4)
    first_piece = tl.load(borders + of_class * 3 + 2)
    first_pieces = segments + 2 * segment_room
    for segment in tl.range(first_segment + tl.program_id(0), segment_end, tl.num_programs(0)):
        first = tl.load(first_pieces + segment)
        count = tl.load(first_pieces + segment + 1) - first
        stride = count * 0 + 1
        while stride < count:
            for group in tl.range(0, count, stride * PIECES):
                each = group + tl.arange(0, PIECES) * stride
                slot = (first - first_piece + each).to(tl.int64)
                at = sums + slot[:, None] * WIDTH + columns
                x = tl.load(at, mask=(each < count)[:, None] & (columns >= 0), other=0.0)
                to = (first - first_piece + group).to(tl.int64)
                tl.store(sums + to * WIDTH + columns, pair_tree(x, PIECES, WIDTH))
            tl.debug_barrier()
            stride = stride * PIECES
