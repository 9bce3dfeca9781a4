# SPDX-License-Identifier: Apache-2.0
"""Kernels that write: gradients of equal rows are summed, and each row is updated once, in place.

A run is the lookups of one row. A program sums and updates many runs of one chunk (`update_short_kernel`). Longer runs
are cut into pieces of CHUNKS chunks, each of which is a subtree. A program sums the chunks of a piece side by side
(`sum_long_kernel`). If a run has one piece, it is updated there. The sums of other pieces go to a buffer, are added up
some levels of the tree per launch (`combine_kernel`), and these runs are updated with the short ones. Only the device
knows how much work there is, so programs take it by stride. Which program takes what changes no sum.
"""

import triton
import triton.language as tl

from sennit.runtime.kernels.triton_rows import dims_of, pair_tree
from sennit.runtime.kernels.triton_step import step_rows


@triton.jit
def _gradients(
    places,
    live,
    dim,
    columns,
    gradient,
    weights,
    lengths,
    lookups,
    vector_of_lookup,
    block_of_vector,
    blocks,
    SEQUENCE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Float32 [places, columns] of the lookups at `places` of the sorted order; +0 where they are not `live`."""
    lookup = tl.load(lookups + places, mask=live, other=0)
    vector = lookup if SEQUENCE else tl.load(vector_of_lookup + lookup, mask=live, other=0)
    vector = vector.to(tl.int64)
    block = tl.load(block_of_vector + vector, mask=live, other=0)
    start = tl.load(blocks + block * 2 + 1) + vector * dim
    if ALIGN > 1:
        start = tl.multiple_of(start, [ALIGN])
    mask = (columns < dim[:, None]) & live[:, None]
    g = tl.load(gradient + start[:, None] + columns, mask=mask, other=0.0)
    if WEIGHTED:
        g = tl.where(mask, tl.load(weights + lookup, mask=live, other=0.0)[:, None] * g, 0.0)
    if MEAN:
        length = tl.load(lengths + vector, mask=live, other=1).to(tl.float32)
        g = tl.where(mask, tl.div_rn(tl.full(length.shape, 1.0, tl.float32), length)[:, None] * g, 0.0)
    return g


@triton.jit
def _table_and_row(place, live, values, lookups, vector_of_lookup, block_of_vector, blocks, SEQUENCE: tl.constexpr):
    """The table and the row of the lookups at `place` [..] of the sorted order."""
    lookup = tl.load(lookups + place, mask=live, other=0)
    vector = lookup if SEQUENCE else tl.load(vector_of_lookup + lookup, mask=live, other=0)
    table = tl.load(blocks + tl.load(block_of_vector + vector, mask=live, other=0) * 2)
    return table, tl.load(values + lookup, mask=live, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["step", "seed_low", "seed_high"])
def update_short_kernel(
    gradient,
    values,
    weights,
    lengths,
    lookups,
    vector_of_lookup,
    block_of_vector,
    blocks,
    tables,
    bad,
    constants,
    step,
    seed_low,
    seed_high,
    run_starts,
    totals,
    sums,
    leads,
    out,
    SEQUENCE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    ONE_DIM: tl.constexpr,
    PRECISIONS: tl.constexpr,
    ALIGN: tl.constexpr,
    KIND: tl.constexpr,
    CLIPPED: tl.constexpr,
    DECAY: tl.constexpr,
    DECAY_AFTER: tl.constexpr,
    KEEP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    RUNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Updates runs of one chunk, and runs of several pieces whose sums are there; RUNS at a time.

    KIND "none" writes their sums to `out` [runs, WIDTH] and updates nothing. With `leads` int8 [runs] the sums of all
    rows are there, at the first run of each.
    """
    piece: tl.constexpr = CHUNK * CHUNKS
    run_count = tl.load(totals)
    columns = tl.arange(0, WIDTH)[None, :]
    for first in tl.range(tl.program_id(0) * RUNS, run_count, tl.num_programs(0) * RUNS):
        run = first + tl.arange(0, RUNS)
        live = run < run_count
        begin = tl.load(run_starts + run, mask=live, other=0)
        length = tl.load(run_starts + run + 1, mask=live, other=0) - begin
        if leads is None:
            summed = length > piece
            live = live & ((length <= CHUNK) | summed)
            slot = 2 * begin.to(tl.int64) // piece
        else:
            live = live & (tl.load(leads + run, mask=live, other=0) != 0)
            summed = live
            slot = run.to(tl.int64)
        table, row = _table_and_row(begin, live, values, lookups, vector_of_lookup, block_of_vector, blocks, SEQUENCE)
        dim = dims_of(tables, table, ONE_DIM)
        g = tl.load(sums + slot[:, None] * WIDTH + columns, mask=(live & summed)[:, None] & (columns >= 0), other=0.0)
        length = tl.where(live & (summed == 0), length, 0)
        for place in tl.range(0, tl.max(length, axis=0), loop_unroll_factor=UNROLL):
            g = g + _gradients(
                begin + place,
                place < length,
                dim,
                columns,
                gradient,
                weights,
                lengths,
                lookups,
                vector_of_lookup,
                block_of_vector,
                blocks,
                SEQUENCE,
                WEIGHTED,
                MEAN,
                ALIGN,
            )
        if KIND == "none":
            at = out + run.to(tl.int64)[:, None] * WIDTH + columns
            tl.store(at, g, mask=live[:, None] & (columns >= 0))
        else:
            step_rows(
                g,
                live,
                table,
                row,
                tables,
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
                RUNS,
                WIDTH,
                ONE_DIM,
                PRECISIONS,
                ALIGN,
                STOCHASTIC,
            )


@triton.jit(do_not_specialize=["step", "seed_low", "seed_high"])
def sum_long_kernel(
    gradient,
    values,
    weights,
    lengths,
    lookups,
    vector_of_lookup,
    block_of_vector,
    blocks,
    tables,
    bad,
    constants,
    step,
    seed_low,
    seed_high,
    run_starts,
    long_runs,
    pieces_until,
    long_of_piece,
    long_count,
    sums,
    out,
    SEQUENCE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    ONE_DIM: tl.constexpr,
    PRECISIONS: tl.constexpr,
    ALIGN: tl.constexpr,
    KIND: tl.constexpr,
    CLIPPED: tl.constexpr,
    DECAY: tl.constexpr,
    DECAY_AFTER: tl.constexpr,
    KEEP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sums runs of several chunks, a piece at a time, and updates those of one piece."""
    piece: tl.constexpr = CHUNK * CHUNKS
    columns = tl.arange(0, WIDTH)[None, :]
    for item in tl.range(tl.program_id(0), tl.load(pieces_until + long_count), tl.num_programs(0)):
        long = tl.load(long_of_piece + item)
        number = item - tl.load(pieces_until + long)
        run = tl.load(long_runs + long)
        begin = tl.load(run_starts + run)
        end = tl.load(run_starts + run + 1)
        everywhere = tl.full([1], 1, tl.int1)
        first = begin + tl.zeros([1], tl.int32)
        table, row = _table_and_row(
            first, everywhere, values, lookups, vector_of_lookup, block_of_vector, blocks, SEQUENCE
        )
        dim = dims_of(tables, table, ONE_DIM)
        chunk = begin + number * piece + tl.arange(0, CHUNKS) * CHUNK
        g = tl.zeros([CHUNKS, WIDTH], tl.float32)
        for place in tl.range(0, CHUNK, loop_unroll_factor=UNROLL):
            g = g + _gradients(
                chunk + place,
                chunk + place < end,
                dim,
                columns,
                gradient,
                weights,
                lengths,
                lookups,
                vector_of_lookup,
                block_of_vector,
                blocks,
                SEQUENCE,
                WEIGHTED,
                MEAN,
                ALIGN,
            )
        g = pair_tree(g, CHUNKS, WIDTH)
        if end - begin > piece:
            slot = 2 * begin.to(tl.int64) // piece + number
            tl.store(sums + slot * WIDTH + columns, g)
        elif KIND == "none":
            tl.store(out + run.to(tl.int64) * WIDTH + columns, g)
        else:
            step_rows(
                g,
                everywhere,
                table,
                row,
                tables,
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
                1,
                WIDTH,
                ONE_DIM,
                PRECISIONS,
                ALIGN,
                STOCHASTIC,
            )


@triton.jit(do_not_specialize=["stride"])
def combine_kernel(
    sums,
    run_starts,
    long_runs,
    pieces_until,
    long_of_piece,
    long_count,
    stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Adds CHUNKS sums of the pieces 0, stride, 2·stride, … of a run at a time, and stores the result at the first of
    them.

    A run that begins at place b of the sorted order has its sums from slot 2b // piece on. It has more than one piece,
    so twice its length in pieces is never less than the slots that it needs.
    """
    piece: tl.constexpr = CHUNK * CHUNKS
    columns = tl.arange(0, WIDTH)[None, :]
    for item in tl.range(tl.program_id(0), tl.load(pieces_until + long_count), tl.num_programs(0)):
        long = tl.load(long_of_piece + item)
        before = tl.load(pieces_until + long)
        number = item - before
        count = tl.load(pieces_until + long + 1) - before
        if (count > stride) & (number % (stride * CHUNKS) == 0):
            begin = tl.load(run_starts + tl.load(long_runs + long))
            each = number + tl.arange(0, CHUNKS) * stride
            at = sums + (2 * begin.to(tl.int64) // piece + each)[:, None] * WIDTH + columns
            x = tl.load(at, mask=(each < count)[:, None] & (columns >= 0), other=0.0)
            slot = 2 * begin.to(tl.int64) // piece + number
            tl.store(sums + slot * WIDTH + columns, pair_tree(x, CHUNKS, WIDTH))


@triton.jit(do_not_specialize=["count"])
def add_halves_kernel(sums, rights, count, RUNS: tl.constexpr, WIDTH: tl.constexpr):
    """Adds the right halves of nodes to the left ones.

    `rights` int64 [count]: where in `sums` [count, WIDTH] the right half is; -1 for what is no left half.
    """
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    columns = tl.arange(0, WIDTH)[None, :]
    right = tl.load(rights + run, mask=run < count, other=-1)
    mask = (right >= 0)[:, None] & (columns >= 0)
    at = sums + run[:, None] * WIDTH + columns
    x = tl.load(at, mask=mask) + tl.load(sums + right[:, None] * WIDTH + columns, mask=mask)
    tl.store(at, x, mask=mask)
