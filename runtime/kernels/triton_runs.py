# SPDX-License-Identifier: Apache-2.0
"""Kernels that find the lookups of each row: sort keys, and where rows begin among the sorted ones.

A key is a lookup's row, counted through all tables, and below it the bits in which slices differ. So lookups of one row
are neighbours in sorted order, by slice. A row of more than CHUNK lookups is *long*. Its lookups in one slice are a
*segment*, which is cut into pieces for `triton_update`. Lists are written in two launches with a sum over tiles between
them: how many of each thing begin in a tile, then the things themselves. Nothing depends on the order of programs.

Kernels that sum would go from a place of the sorted order to its lookup, from there to its bag, its block and its
table. Each of these loads waits for the one before. So what they need of a lookup is listed by place.
"""

import triton
import triton.language as tl

from sennit.runtime.kernels.triton_rows import owner_of, table_field
from sennit.runtime.kernels.triton_tables import DIM, FIRST_KEY

_FIRST_KEY = tl.constexpr(FIRST_KEY)
_DIM = tl.constexpr(DIM)


@triton.jit(
    do_not_specialize=["owner_count", "owner_bits", "lookup_count", "slice_bits", "ignored_key"],
    do_not_specialize_on_alignment=["values", "block_of_bag"],
)
def keys_kernel(
    keys,
    owners,
    values,
    bounds,
    block_of_bag,
    blocks,
    tables,
    owner_count,
    owner_bits,
    lookup_count,
    slice_bits,
    ignored_key,
    SEQUENCE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The key of each lookup, for ignored ids `ignored_key`, which is above all others; and its bag.

    SEQUENCE: its block in place of its bag.
    """
    lookup = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = lookup < lookup_count
    owner = owner_of(bounds, lookup, live, owner_count, owner_bits)
    block = owner if SEQUENCE else tl.load(block_of_bag + owner, mask=live, other=0)
    table = tl.load(blocks + block * 2)
    row = tl.load(values + lookup, mask=live, other=-1).to(tl.int64)
    in_slice = tl.load(blocks + block * 2 + 1) & ((tl.full([TILE], 1, tl.int64) << slice_bits) - 1)
    key = ((table_field(tables, table, _FIRST_KEY) + row) << slice_bits) | in_slice
    key = tl.where(row >= 0, key, ignored_key)
    tl.store(keys + lookup, key.to(keys.dtype.element_ty), mask=live)
    tl.store(owners + lookup, owner, mask=live)


@triton.jit
def _begins(
    keys,
    first_keys,
    place,
    count,
    search_bits,
    slice_bits,
    pieces,
    SLICED: tl.constexpr,
    CLASSES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """For each place of the sorted order: its key, whether a row and whether a segment begins there; the segment's end,
    and its pieces."""
    live = place < count
    key = tl.load(keys + place, mask=live, other=0)
    row = key >> slice_bits
    before = tl.load(keys + place - 1, mask=live & (place > 0), other=-1)
    is_row = live & (row != (before >> slice_bits))
    if SLICED:
        tl.static_assert(CHUNK == 32)
        is_segment = live & (key != before)
        # The row's first place, if it is less than 2 · CHUNK before; otherwise one that far.
        first = place
        for step in tl.static_range(6):
            earlier = first - (CHUNK >> step)
            found = is_segment & (earlier >= 0)
            found = found & ((tl.load(keys + earlier, mask=found, other=-1) >> slice_bits) == row)
            first = tl.where(found, earlier, first)
    else:
        is_segment = is_row
        first = place
    ahead = tl.load(keys + first + CHUNK, mask=is_segment & (first < count - CHUNK), other=-1) >> slice_bits
    is_long = is_segment & (ahead == row) & (key < tl.load(first_keys + CLASSES) << slice_bits)
    # The last place of the segment, by ever smaller steps.
    last = place
    step = 1 << search_bits
    for _ in tl.range(0, tl.where(tl.max(is_long.to(tl.int32), axis=0) > 0, search_bits, 0)):
        step = step >> 1
        inside = is_long & (last < count - step)
        inside = inside & (tl.load(keys + last + step, mask=inside, other=-1) == key)
        last = tl.where(inside, last + step, last)
    piece = tl.zeros_like(place) + pieces[0]
    for number in tl.static_range(1, CLASSES):
        piece = tl.where(key >= tl.load(first_keys + number) << slice_bits, pieces[number], piece)
    piece_count = tl.where(is_long, (last - place + piece) // piece, 0)
    return key, before, is_row.to(tl.int32), is_long.to(tl.int32), last + 1, piece_count


@triton.jit(do_not_specialize=["count", "tile_count", "search_bits", "slice_bits"])
def count_runs_kernel(
    counts,
    keys,
    first_keys,
    count,
    tile_count,
    search_bits,
    slice_bits,
    pieces,
    SLICED: tl.constexpr,
    CLASSES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """`counts` int32 [3, tiles]: rows, segments and pieces that begin in each tile. `pieces`: lookups of a piece, by
    class. 2^search_bits is more than `count`."""
    tile = tl.program_id(0)
    place = tile * TILE + tl.arange(0, TILE)
    _, _, is_row, is_long, _, piece_count = _begins(
        keys, first_keys, place, count, search_bits, slice_bits, pieces, SLICED, CLASSES, CHUNK
    )
    tl.store(counts + tile, tl.sum(is_row, axis=0))
    tl.store(counts + tile_count + tile, tl.sum(is_long, axis=0))
    tl.store(counts + 2 * tile_count + tile, tl.sum(piece_count, axis=0))


@triton.jit
def _before(until, number: tl.constexpr, tile, tile_count):
    """What begins in earlier tiles."""
    return tl.load(until + number * tile_count + tile - 1, mask=tile > 0, other=0)


@triton.jit
def _store_border(borders, number, mask, rows, segments, pieces):
    at = borders + number * 3 + tl.zeros_like(rows)
    tl.store(at, rows, mask=mask)
    tl.store(at + 1, segments, mask=mask)
    tl.store(at + 2, pieces, mask=mask)


@triton.jit
def _write_places(
    places,
    table_of_place,
    place_weights,
    shares,
    owners,
    weights,
    lengths,
    block_of_bag,
    blocks,
    bases,
    tables,
    place,
    live,
    SEQUENCE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
):
    """`places` has lookups, and gets where their gradients begin."""
    lookup = tl.load(places + place, mask=live, other=0)
    owner = tl.load(owners + lookup, mask=live, other=0)
    block = owner if SEQUENCE else tl.load(block_of_bag + owner, mask=live, other=0)
    vector = lookup if SEQUENCE else owner.to(tl.int64)
    table = tl.load(blocks + block * 2)
    tl.store(places + place, tl.load(bases + block) + vector * table_field(tables, table, _DIM), mask=live)
    tl.store(table_of_place + place, table.to(tl.int32), mask=live)
    if WEIGHTED:
        tl.store(place_weights + place, tl.load(weights + lookup, mask=live, other=0.0), mask=live)
    if MEAN:
        length = tl.load(lengths + owner, mask=live, other=1).to(tl.float32)
        tl.store(shares + place, tl.div_rn(tl.full(length.shape, 1.0, tl.float32), length), mask=live)


@triton.jit(
    do_not_specialize=["count", "tile_count", "segment_room", "search_bits", "slice_bits"],
    do_not_specialize_on_alignment=["weights", "lengths", "block_of_bag"],
)
def write_runs_kernel(
    rows,
    segments,
    borders,
    places,
    table_of_place,
    place_weights,
    shares,
    until,
    keys,
    owners,
    weights,
    lengths,
    block_of_bag,
    blocks,
    bases,
    tables,
    first_keys,
    count,
    tile_count,
    segment_room,
    search_bits,
    slice_bits,
    pieces,
    SEQUENCE: tl.constexpr,
    SLICED: tl.constexpr,
    CLASSES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes the lists of `triton_operator.Runs`. `until` int32 [3, tiles]: sums of `counts` up to each tile.

    Ignored lookups are a last row, of no class.
    """
    tile = tl.program_id(0)
    place = tile * TILE + tl.arange(0, TILE)
    _write_places(
        places,
        table_of_place,
        place_weights,
        shares,
        owners,
        weights,
        lengths,
        block_of_bag,
        blocks,
        bases,
        tables,
        place,
        place < count,
        SEQUENCE,
        place_weights is not None,
        shares is not None,
    )
    key, before, is_row, is_long, end, piece_count = _begins(
        keys, first_keys, place, count, search_bits, slice_bits, pieces, SLICED, CLASSES, CHUNK
    )
    row_until = _before(until, 0, tile, tile_count) + tl.cumsum(is_row, axis=0)
    segment_until = _before(until, 1, tile, tile_count) + tl.cumsum(is_long, axis=0)
    piece_until = _before(until, 2, tile, tile_count) + tl.cumsum(piece_count, axis=0)
    row, segment, piece = row_until - is_row, segment_until - is_long, piece_until - piece_count
    tl.store(rows + row, place, mask=is_row > 0)
    tl.store(rows + count + 1 + row, segment, mask=is_row > 0)
    tl.store(segments + segment, place, mask=is_long > 0)
    tl.store(segments + segment_room + segment, end, mask=is_long > 0)
    tl.store(segments + 2 * segment_room + segment, piece, mask=is_long > 0)
    is_last = place == count - 1
    for number in tl.static_range(CLASSES + 1):
        bound = tl.load(first_keys + number) << slice_bits
        _store_border(borders, number, (place < count) & (key >= bound) & (before < bound), row, segment, piece)
        _store_border(borders, number, is_last & (key < bound), row_until, segment_until, piece_until)
    tl.store(rows + row_until, place + 1, mask=is_last)
    tl.store(rows + count + 1 + row_until, segment_until, mask=is_last)
    tl.store(segments + 2 * segment_room + segment_until, piece_until, mask=is_last)
