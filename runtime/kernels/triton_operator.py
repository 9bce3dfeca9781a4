# SPDX-License-Identifier: Apache-2.0
"""The operator in Triton: on an NVIDIA GPU, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1), for tests."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, ParamSpec, cast

import torch
from torch import Tensor
from triton import knobs

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.checks import BadGradients
from sennit.runtime.kernels.layout import TableMemory
from sennit.runtime.kernels.optimizers import Optimizer, StepConstants
from sennit.runtime.kernels.reference import CHUNK
from sennit.runtime.kernels.spec import Pooling, Rounding
from sennit.runtime.kernels.triton_lookup import lookup_kernel, weight_gradient_kernel
from sennit.runtime.kernels.triton_sort import (
    count_digits_kernel,
    count_runs_kernel,
    keys_kernel,
    scatter_kernel,
    write_runs_kernel,
)
from sennit.runtime.kernels.triton_step import CLIP_NORM, CLIP_VALUE
from sennit.runtime.kernels.triton_tables import FP32, Tables, Vectors, describe, vectors_of
from sennit.runtime.kernels.triton_update import combine_kernel, sum_long_kernel, update_short_kernel
from sennit.transport.errors import ArgumentError, Unsupported

P = ParamSpec("P")

# Keys that a program sorts, and bits of a digit. A tile of ones is [TILE, 2^DIGIT_BITS].
TILE: Final = 1024
DIGIT_BITS: Final = 4

MAX_LOOKUPS: Final = (1 << 31) - (1 << 16)
"""The most lookups of one call: they are numbered with 32 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """How work is split for one width of rows. The split changes no bit of the results."""

    vectors: int
    """Vectors of the result that a program looks up."""

    vector_warps: int

    runs: int
    """Runs of at most one chunk that a program sums and updates at a time."""

    run_warps: int

    chunks: int
    """Chunks per piece of a longer run: a power of two, because a piece has to be a subtree."""

    chunk_warps: int

    programs: int
    """The most programs that are started if only the device knows the amount of work."""

    unroll: int
    """How many steps of a fold are loaded before the first row is added."""


def tiles_for(width: int, device: torch.device) -> Tiles:
    """The tiles for a device. They are large in the interpreter, where operations cost and elements do not."""
    if device.type == "cpu":
        return Tiles(vectors=64, vector_warps=1, runs=64, run_warps=1, chunks=8, chunk_warps=1, programs=2, unroll=1)
    return tiles_of_gpu(width, torch.cuda.get_device_properties(device).multi_processor_count)


def tiles_of_gpu(width: int, multiprocessors: int) -> Tiles:
    """One warp for 128 columns of a row. Chunks side by side until a thread holds 16 elements, or 32 of wide rows."""
    chunks = max(2, min(16, 8192 // width))
    return Tiles(
        vectors=max(1, 512 // width),
        vector_warps=max(4, min(8, width // 128)),
        runs=max(1, 128 // width),
        run_warps=max(1, min(8, width // 128)),
        chunks=chunks,
        chunk_warps=max(1, min(8, chunks * width // 512)),
        programs=32 * multiprocessors,
        unroll=4,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """The lookups of a batch sorted by row, and the runs of equal rows. All int32; all counts stay on the device."""

    lookups: Tensor
    """[lookups]: numbers of lookups by row, then in the order of the batch; ignored ones last."""

    starts: Tensor
    """[lookups + 1]: where each run starts in `lookups`, and where the last one ends."""

    long: Tensor
    """[lookups / 33]: the runs of more than one chunk."""

    totals: Tensor
    """[2]: the numbers of runs and of long runs."""


def _on_its_device(method: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Makes the device of a method's batch current, because Triton launches kernels on the current device."""

    @functools.wraps(method)
    def launch(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        batch = cast(Batch, args[2])
        with torch.cuda.device_of(batch.lengths):  # type: ignore[no-untyped-call]
            return method(*args, **kwargs)

    return launch


class TritonOperator:
    """The functions of `reference`, with the same bits (docs/reference/embedding.md). Keeps nothing between calls."""

    def __init__(self) -> None:
        if not torch.cuda.is_available() and not knobs.runtime.interpret:
            raise Unsupported("implementation triton", "no CUDA device, and TRITON_INTERPRET=1 is not set")
        # The interpreter dereferences the tables' addresses on the CPU.
        self.device_type = "cpu" if knobs.runtime.interpret else "cuda"

    @_on_its_device
    def lookup(self, tables: Sequence[TableMemory], batch: Batch) -> Tensor:
        result = torch.empty(
            batch.output_size(tuple(table.spec for table in tables)), dtype=torch.float32, device=_device(batch)
        )
        if len(result) == 0:
            return result
        about, offsets = describe(tables, _device(batch)), _offsets(batch)
        vectors, tiles = vectors_of(batch, tables, offsets), tiles_for(about.width, _device(batch))
        lookup_kernel[(_parts(vectors.count, tiles.vectors),)](
            result,
            batch.values,
            batch.weights,
            offsets,
            vectors.block_of_vector,
            vectors.blocks,
            about.fields,
            vectors.count,
            SEQUENCE=batch.pooling is Pooling.NONE,
            WEIGHTED=batch.weights is not None,
            MEAN=batch.pooling is Pooling.MEAN,
            **_shape(about),
            VECTORS=tiles.vectors,
            WIDTH=about.width,
            UNROLL=tiles.unroll,
            num_warps=tiles.vector_warps,
            enable_fp_fusion=False,
        )
        return result

    @_on_its_device
    def weight_gradient(self, tables: Sequence[TableMemory], batch: Batch, gradient: Tensor) -> Tensor:
        count = len(batch.values)
        result = torch.empty(count, dtype=torch.float32, device=_device(batch))
        if count == 0:
            return result
        about = describe(tables, _device(batch))
        vectors, tiles = vectors_of(batch, tables, _offsets(batch)), tiles_for(about.width, _device(batch))
        weight_gradient_kernel[(_parts(count, tiles.vectors),)](
            result,
            gradient,
            batch.values,
            _vector_of_lookup(batch),
            vectors.block_of_vector,
            vectors.blocks,
            about.fields,
            count,
            **_shape(about),
            LOOKUPS=tiles.vectors,
            WIDTH=about.width,
            num_warps=tiles.vector_warps,
            enable_fp_fusion=False,
        )
        return result

    def update(
        self,
        tables: Sequence[TableMemory],
        batch: Batch,
        gradient: Tensor,
        *,
        kind: Optimizer,
        constants: StepConstants,
        rounding: Rounding,
        seed: int,
    ) -> list[BadGradients]:
        bad = self.launch_update(
            tables, batch, gradient, kind=kind, constants=constants, rounding=rounding, seed=seed
        ).tolist()
        return [
            BadGradients(table=table, row_count=count, first_row=row)
            for table, (count, row) in enumerate(bad)
            if count > 0
        ]

    @_on_its_device
    def launch_update(
        self,
        tables: Sequence[TableMemory],
        batch: Batch,
        gradient: Tensor,
        *,
        kind: Optimizer,
        constants: StepConstants,
        rounding: Rounding,
        seed: int,
    ) -> Tensor:
        """`update` without waiting for the device. Returns int64 [tables, 2]: rows skipped, and the lowest of them."""
        device, count = _device(batch), len(batch.values)
        bad = torch.zeros(len(tables), 2, dtype=torch.int64, device=device)
        bad[:, 1] = torch.iinfo(torch.int64).max
        if count > MAX_LOOKUPS:
            raise ArgumentError(f"{count} lookups; allowed: {MAX_LOOKUPS}")
        if count == 0:
            return bad
        about, offsets = describe(tables, device), _offsets(batch)
        vectors = vectors_of(batch, tables, offsets)
        del offsets
        is_sequence = batch.pooling is Pooling.NONE
        owner = None if is_sequence else _vector_of_lookup(batch)
        runs = sorted_runs(about, batch, vectors, owner)
        stochastic = rounding is Rounding.STOCHASTIC and about.precisions != FP32
        width = max(64, about.width) if stochastic else about.width
        tiles = tiles_for(width, device)
        piece = CHUNK * tiles.chunks
        sums = torch.empty((2 * count // piece + 1 if count > piece else 1, width), device=device)
        arguments = (
            gradient,
            batch.values,
            batch.weights,
            batch.lengths,
            runs.lookups,
            owner,
            vectors.block_of_vector,
            vectors.blocks,
            about.fields,
            bad,
            constants.floats,
            _word(constants.step),
            _word(seed),
            _word(seed >> 32),
            runs.starts,
        )
        chosen: dict[str, object] = {
            "SEQUENCE": is_sequence,
            "WEIGHTED": batch.weights is not None,
            "MEAN": batch.pooling is Pooling.MEAN,
            **_shape(about),
            "KIND": kind.value,
            "CLIPPED": (CLIP_VALUE if math.isfinite(constants.max_gradient) else 0)
            | (CLIP_NORM if math.isfinite(constants.max_norm) else 0),
            "DECAY": constants.decay != 0 and not constants.decay_after,
            "DECAY_AFTER": constants.decay != 0 and constants.decay_after,
            "KEEP": constants.keep != 1,
            "STOCHASTIC": stochastic,
            "CHUNK": CHUNK,
            "CHUNKS": tiles.chunks,
            "WIDTH": width,
            "UNROLL": tiles.unroll,
            "enable_fp_fusion": False,
        }
        if count > CHUNK:
            _sum_long_runs(runs, count, sums, arguments, chosen, tiles)
        update_short_kernel[(min(_parts(count, tiles.runs), tiles.programs),)](
            *arguments, runs.totals, sums, **chosen, RUNS=tiles.runs, num_warps=tiles.run_warps
        )
        return bad


def sorted_runs(about: Tables, batch: Batch, vectors: Vectors, owner: Tensor | None) -> Runs:
    """Lookups by row, stable; see `triton_sort`."""
    device, count = _device(batch), len(batch.values)
    key_type = torch.int32 if about.row_count < 1 << 31 else torch.int64
    keys, lookups = torch.empty(count, dtype=key_type, device=device), _int32(count, device)
    tile_count = _parts(count, TILE)
    grid = (tile_count,)
    keys_kernel[grid](
        keys,
        lookups,
        batch.values,
        owner,
        vectors.block_of_vector,
        vectors.blocks,
        about.fields,
        count,
        about.row_count,
        SEQUENCE=owner is None,
        TILE=TILE,
    )
    other_keys, other_lookups = torch.empty_like(keys), torch.empty_like(lookups)
    counts = _int32((1 << DIGIT_BITS, tile_count), device)
    for shift in range(0, about.row_count.bit_length(), DIGIT_BITS):
        count_digits_kernel[grid](counts, keys, count, tile_count, shift, DIGITS=1 << DIGIT_BITS, TILE=TILE)
        starts = counts.view(-1).cumsum(0, dtype=torch.int32).view_as(counts) - counts
        scatter_kernel[grid](
            other_keys,
            other_lookups,
            keys,
            lookups,
            starts,
            count,
            tile_count,
            shift,
            DIGITS=1 << DIGIT_BITS,
            TILE=TILE,
        )
        keys, lookups, other_keys, other_lookups = other_keys, other_lookups, keys, lookups
    del other_keys, other_lookups  # the steps below reuse their memory
    counts = _int32((2, tile_count), device)
    count_runs_kernel[grid](counts, keys, count, tile_count, about.row_count, CHUNK=CHUNK, TILE=TILE)
    before = counts.cumsum(1, dtype=torch.int32) - counts
    runs = Runs(
        lookups=lookups,
        starts=_int32(count + 1, device),
        long=torch.zeros(count // (CHUNK + 1) + 1, dtype=torch.int32, device=device),
        totals=_int32(2, device),
    )
    write_runs_kernel[grid](
        runs.starts,
        runs.long,
        runs.totals,
        keys,
        before,
        count,
        tile_count,
        about.row_count,
        CHUNK=CHUNK,
        TILE=TILE,
    )
    return runs


def _sum_long_runs(
    runs: Runs,
    count: int,
    sums: Tensor,
    arguments: tuple[object, ...],
    chosen: dict[str, object],
    tiles: Tiles,
) -> None:
    """Updates the runs of one piece, and leaves the sums of longer runs in `sums`."""
    piece = CHUNK * tiles.chunks
    most_long = len(runs.long)
    most_pieces = most_long + count // piece
    long = runs.long.to(torch.int64)
    pieces = (runs.starts[long + 1] - runs.starts[long] + (piece - 1)) // piece
    pieces = pieces * (torch.arange(most_long, device=pieces.device) < runs.totals[1])
    until = torch.zeros(most_long + 1, dtype=torch.int32, device=pieces.device)
    torch.cumsum(pieces, 0, dtype=torch.int32, out=until[1:])
    numbers = torch.arange(most_pieces, dtype=torch.int32, device=pieces.device)
    long_of_piece = torch.searchsorted(until[1:], numbers, right=True, out_int32=True)
    where = (runs.long, until, long_of_piece, most_long)
    grid = (min(most_pieces, tiles.programs),)
    sum_long_kernel[grid](*arguments, *where, sums, **chosen, num_warps=tiles.chunk_warps)
    stride = 1
    while stride * piece < count:
        combine_kernel[grid](
            sums,
            runs.starts,
            *where,
            stride,
            CHUNK=CHUNK,
            CHUNKS=tiles.chunks,
            WIDTH=chosen["WIDTH"],
            num_warps=tiles.chunk_warps,
            enable_fp_fusion=False,
        )
        stride *= tiles.chunks


def _shape(about: Tables) -> dict[str, int]:
    return {"ONE_DIM": about.one_dim, "PRECISIONS": about.precisions, "ALIGN": about.align}


def _offsets(batch: Batch) -> Tensor:
    """Int64 [bags + 1]: lookups before each bag."""
    offsets = torch.zeros(len(batch.lengths) + 1, dtype=torch.int64, device=_device(batch))
    torch.cumsum(batch.lengths, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


def _vector_of_lookup(batch: Batch) -> Tensor:
    """Int32 [lookups]: the bag of each."""
    bags = torch.arange(len(batch.lengths), dtype=torch.int32, device=_device(batch))
    return torch.repeat_interleave(bags, batch.lengths, output_size=len(batch.values))


def _device(batch: Batch) -> torch.device:
    return batch.lengths.device


def _int32(shape: int | tuple[int, ...], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=device)


def _parts(count: int, size: int) -> int:
    return (count + size - 1) // size


def _word(value: int) -> int:
    """The low 32 bits as a signed number, so that kernels get one type for every value."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
