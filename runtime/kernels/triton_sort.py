# SPDX-License-Identifier: Apache-2.0
"""Kernels that bring lookups of equal rows together: a stable radix sort, then runs.

Radix sort starts with the least digit (Knuth, TAOCP 3, 5.2.5). Each pass sorts by one digit in three steps. It counts
digits by tile. It adds up the counts, by digit and then tile. It puts each key behind the keys with the same digit of
earlier tiles and of its own tile. A key's place in its tile is a prefix sum over a tile of ones, so nothing depends on
the order in which threads run.
"""

import triton
import triton.language as tl

from sennit.runtime.kernels.triton_rows import table_field
from sennit.runtime.kernels.triton_tables import FIRST_KEY

_FIRST_KEY = tl.constexpr(FIRST_KEY)


@triton.jit(do_not_specialize=["lookup_count", "ignored_key"])
def keys_kernel(
    keys,
    lookups,
    values,
    vector_of_lookup,
    block_of_vector,
    blocks,
    tables,
    lookup_count,
    ignored_key,
    SEQUENCE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Keys (rows counted through all tables; `ignored_key`, the last, for ignored ids) and the lookups' numbers."""
    lookup = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = lookup < lookup_count
    vector = lookup if SEQUENCE else tl.load(vector_of_lookup + lookup, mask=live, other=0)
    table = tl.load(blocks + tl.load(block_of_vector + vector, mask=live, other=0) * 2)
    row = tl.load(values + lookup, mask=live, other=-1).to(tl.int64)
    key = tl.where(row >= 0, table_field(tables, table, _FIRST_KEY) + row, ignored_key)
    tl.store(keys + lookup, key.to(keys.dtype.element_ty), mask=live)
    tl.store(lookups + lookup, lookup, mask=live)


@triton.jit
def _ones(key, live, shift, DIGITS: tl.constexpr):
    """[keys, DIGITS]: one at each key's digit, zero elsewhere."""
    digit = (key >> shift) & (DIGITS - 1)
    return ((digit[:, None] == tl.arange(0, DIGITS)[None, :]) & live[:, None]).to(tl.int32)


@triton.jit(do_not_specialize=["count", "tile_count", "shift"])
def count_digits_kernel(counts, keys, count, tile_count, shift, DIGITS: tl.constexpr, TILE: tl.constexpr):
    """`counts` int32 [DIGITS, tiles]."""
    tile = tl.program_id(0)
    place = tile * TILE + tl.arange(0, TILE)
    key = tl.load(keys + place, mask=place < count, other=0)
    ones = _ones(key, place < count, shift, DIGITS)
    tl.store(counts + tl.arange(0, DIGITS) * tile_count + tile, tl.sum(ones, axis=0))


@triton.jit(do_not_specialize=["count", "tile_count", "shift"])
def scatter_kernel(
    keys_out,
    lookups_out,
    keys,
    lookups,
    starts,
    count,
    tile_count,
    shift,
    DIGITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Runs one pass.

    `starts` int32 [DIGITS, tiles] counts the keys with lower digits, or with the same in earlier tiles.
    """
    tile = tl.program_id(0)
    place = tile * TILE + tl.arange(0, TILE)
    live = place < count
    key = tl.load(keys + place, mask=live, other=0)
    lookup = tl.load(lookups + place, mask=live, other=0)
    ones = _ones(key, live, shift, DIGITS)
    start = tl.load(starts + tl.arange(0, DIGITS) * tile_count + tile)
    target = tl.sum(ones * (tl.cumsum(ones, axis=0) - 1 + start[None, :]), axis=1)
    tl.store(keys_out + target, key, mask=live)
    tl.store(lookups_out + target, lookup, mask=live)


@triton.jit
def _run_starts(keys, place, count, ignored_key, CHUNK: tl.constexpr):
    """Where runs of equal keys start, and which have more than CHUNK keys; each int32 [places]."""
    live = place < count
    key = tl.load(keys + place, mask=live, other=0)
    before = tl.load(keys + place - 1, mask=live & (place > 0), other=-1)
    ahead = tl.load(keys + place + CHUNK, mask=place < count - CHUNK, other=-1)
    starts = live & (key != before)
    long = starts & (key == ahead) & (key != ignored_key)
    return starts.to(tl.int32), long.to(tl.int32)


@triton.jit(do_not_specialize=["count", "tile_count", "ignored_key"])
def count_runs_kernel(counts, keys, count, tile_count, ignored_key, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """`counts` int32 [2, tiles]: runs, and long runs, that start in each tile."""
    tile = tl.program_id(0)
    starts, long = _run_starts(keys, tile * TILE + tl.arange(0, TILE), count, ignored_key, CHUNK)
    tl.store(counts + tile, tl.sum(starts, axis=0))
    tl.store(counts + tile_count + tile, tl.sum(long, axis=0))


@triton.jit(do_not_specialize=["count", "tile_count", "ignored_key"])
def write_runs_kernel(
    run_starts,
    long_runs,
    totals,
    keys,
    before,
    count,
    tile_count,
    ignored_key,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes `run_starts` [runs + 1], `long_runs` (the numbers of long runs), and how many there are of each.

    `run_starts` ends with the end of the last run. `before` int32 [2, tiles] counts those of earlier tiles. Ignored
    lookups are the last run and are not counted.
    """
    tile = tl.program_id(0)
    place = tile * TILE + tl.arange(0, TILE)
    starts, long = _run_starts(keys, place, count, ignored_key, CHUNK)
    runs = tl.load(before + tile) + tl.cumsum(starts, axis=0)
    longs = tl.load(before + tile_count + tile) + tl.cumsum(long, axis=0)
    tl.store(run_starts + runs - 1, place, mask=starts > 0)
    tl.store(long_runs + longs - 1, runs - 1, mask=long > 0)
    last = place == count - 1
    is_ignored = tl.load(keys + place, mask=last, other=0) == ignored_key
    tl.store(run_starts + runs, place + 1, mask=last)
    tl.store(totals + tl.zeros_like(place), runs - is_ignored.to(tl.int32), mask=last)
    tl.store(totals + 1 + tl.zeros_like(place), longs, mask=last)
