# SPDX-License-Identifier: Apache-2.0
"""The operator in Triton: on an NVIDIA GPU, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1), for tests."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from triton import knobs

from sennit.runtime.kernels import triton_tiles
from sennit.runtime.kernels.batch import Batch, RowSums
from sennit.runtime.kernels.checks import BadGradients
from sennit.runtime.kernels.layout import ShardMemory
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
from sennit.runtime.kernels.triton_update import add_halves_kernel, combine_kernel, sum_long_kernel, update_short_kernel
from sennit.transport.errors import ArgumentError, Unsupported

P = ParamSpec("P")
T = TypeVar("T")

# Keys that a program sorts, and bits of a digit. A tile of ones is [TILE, 2^DIGIT_BITS].
TILE: Final = 1024
DIGIT_BITS: Final = 4

SLICE_BITS: Final = 16

MAX_LOOKUPS: Final = (1 << 31) - (1 << 16)
"""The most lookups of one call: they are numbered with 32 bits."""


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

    keys: Tensor | None
    """Int64 [lookups], if lookups are in several slices: the row of each place in `lookups`, then its slice."""


def _on_its_device(method: Callable[P, T]) -> Callable[P, T]:
    """Makes the device of a method's batch current, because Triton launches kernels on the current device."""

    @functools.wraps(method)
    def launch(*args: P.args, **kwargs: P.kwargs) -> T:
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
    def lookup(self, tables: Sequence[ShardMemory], batch: Batch) -> Tensor:
        result = torch.empty(
            batch.output_size(tuple(table.spec for table in tables)), dtype=torch.float32, device=_device(batch)
        )
        if len(result) == 0:
            return result
        about, offsets = describe(tables, _device(batch)), _offsets(batch)
        vectors, tiles = vectors_of(batch, tables, offsets), triton_tiles.tiles_for(about.width, _device(batch))
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
    def weight_gradient(self, tables: Sequence[ShardMemory], batch: Batch, gradient: Tensor) -> Tensor:
        count = len(batch.values)
        result = torch.empty(count, dtype=torch.float32, device=_device(batch))
        if count == 0:
            return result
        about = describe(tables, _device(batch))
        vectors, tiles = vectors_of(batch, tables, _offsets(batch)), triton_tiles.tiles_for(about.width, _device(batch))
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
        tables: Sequence[ShardMemory],
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
        tables: Sequence[ShardMemory],
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
        if count == 0:
            return bad
        precisions = describe(tables, device).precisions
        stochastic = rounding is Rounding.STOCHASTIC and precisions != FP32
        chosen: dict[str, object] = {
            "KIND": kind.value,
            "CLIPPED": (CLIP_VALUE if math.isfinite(constants.max_gradient) else 0)
            | (CLIP_NORM if math.isfinite(constants.max_norm) else 0),
            "DECAY": constants.decay != 0 and not constants.decay_after,
            "DECAY_AFTER": constants.decay != 0 and constants.decay_after,
            "KEEP": constants.keep != 1,
            "STOCHASTIC": stochastic,
        }
        job = _Job(tables, batch, gradient, least_width=64 if stochastic else 0)
        step = (bad, constants.floats, _word(constants.step), _word(seed), _word(seed >> 32))
        if job.runs.keys is None:
            job.launch(step, chosen)
        else:
            job.launch(step, chosen, summed=job.sums())
        return bad

    @_on_its_device
    def sum_rows(self, tables: Sequence[ShardMemory], batch: Batch, gradient: Tensor) -> list[RowSums]:
        if len(batch.values) == 0:
            return []
        job = _Job(tables, batch, gradient, least_width=0)
        sums, leads = job.sums()
        first = leads.nonzero().squeeze(1)
        lookups = job.runs.lookups[job.runs.starts[first]]
        of_lookups = torch.tensor(batch.table_of_block, device=_device(batch))[job.blocks_of(lookups)]
        counts = torch.bincount(of_lookups, minlength=len(tables)).tolist()
        parts = zip(torch.split(batch.values[lookups], counts), torch.split(first, counts), strict=True)
        return [
            RowSums(table=table, rows=rows.to(torch.int64), sums=sums[own, : tables[table].spec.dim])
            for table, (rows, own) in enumerate(parts)
            if len(rows)
        ]


class _Job:
    """The lookups of a batch by row, and the launches that sum the gradients of rows and update them."""

    def __init__(self, tables: Sequence[ShardMemory], batch: Batch, gradient: Tensor, *, least_width: int) -> None:
        self._device, self._count = _device(batch), len(batch.values)
        if self._count > MAX_LOOKUPS:
            raise ArgumentError(f"{self._count} lookups; allowed: {MAX_LOOKUPS}")
        about = describe(tables, self._device)
        vectors = vectors_of(batch, tables, _offsets(batch))
        is_sequence = batch.pooling is Pooling.NONE
        owner = None if is_sequence else _vector_of_lookup(batch)
        self._vectors, self._owner = vectors, owner
        slices = batch.slice_of_block or (0,)
        self._levels = (max(slices, default=0) ^ min(slices, default=0)).bit_length()
        self.runs = sorted_runs(about, batch, vectors, owner, slices if self._levels else None)
        width = max(least_width, about.width)
        self._tiles = triton_tiles.tiles_for(width, self._device)
        piece = CHUNK * self._tiles.chunks
        slots = 2 * self._count // piece + 1 if self._count > piece else 1
        self._sums = torch.empty((slots, width), device=self._device)
        self._arguments = (
            gradient,
            batch.values,
            batch.weights,
            batch.lengths,
            self.runs.lookups,
            owner,
            vectors.block_of_vector,
            vectors.blocks,
            about.fields,
        )
        self._chosen: dict[str, object] = {
            "SEQUENCE": is_sequence,
            "WEIGHTED": batch.weights is not None,
            "MEAN": batch.pooling is Pooling.MEAN,
            **_shape(about),
            "CHUNK": CHUNK,
            "CHUNKS": self._tiles.chunks,
            "WIDTH": width,
            "UNROLL": self._tiles.unroll,
            "enable_fp_fusion": False,
        }

    def blocks_of(self, lookups: Tensor) -> Tensor:
        """The blocks of some lookups."""
        return self._vectors.block_of_vector[lookups if self._owner is None else self._owner[lookups]]

    def launch(
        self,
        step: tuple[object, ...],
        chosen: dict[str, object],
        *,
        summed: tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
    ) -> None:
        """Sums runs and makes the step of their rows, or writes the sums to `out`. `summed` is what `sums` returned."""
        runs, tiles, chosen = self.runs, self._tiles, self._chosen | chosen
        arguments = (*self._arguments, *step, runs.starts)
        sums, leads = (self._sums, None) if summed is None else summed
        if self._count > CHUNK and summed is None:
            _sum_long_runs(runs, self._count, sums, out, arguments, chosen, tiles)
        update_short_kernel[(min(_parts(self._count, tiles.runs), tiles.programs),)](
            *arguments, runs.totals, sums, leads, out, **chosen, RUNS=tiles.runs, num_warps=tiles.run_warps
        )

    def sums(self) -> tuple[Tensor, Tensor]:
        """The sum of each row, float32 [lookups, width] at its first run, and which runs are first, int8 [lookups]."""
        out = torch.empty((self._count, self._sums.shape[1]), device=self._device)
        no_step = dict.fromkeys(("CLIPPED", "DECAY", "DECAY_AFTER", "KEEP", "STOCHASTIC"), 0)
        self.launch((None, None, 0, 0, 0), {"KIND": "none", **no_step}, out=out)
        numbers = torch.arange(self._count, device=self._device)
        live = numbers < self.runs.totals[0]
        if self.runs.keys is None:
            return out, live.to(torch.int8)
        # Beyond the last run: odd at every level, so that it is no left half.
        none = torch.iinfo(torch.int64).max
        keys = torch.where(live, self.runs.keys[self.runs.starts[:-1].clamp(0, self._count - 1)], none)
        for level in range(self._levels):
            nodes = keys >> level
            rights = torch.searchsorted(keys, (nodes | 1) << level).clamp(max=self._count - 1)
            is_left = _is_first(nodes) & (nodes & 1 == 0) & (nodes[rights] == nodes | 1)
            add_halves_kernel[(_parts(self._count, self._tiles.runs),)](
                out,
                torch.where(is_left, rights, -1),
                self._count,
                RUNS=self._tiles.runs,
                WIDTH=out.shape[1],
                num_warps=self._tiles.run_warps,
                enable_fp_fusion=False,
            )
        return out, (live & _is_first(keys >> self._levels)).to(torch.int8)


def sorted_runs(
    about: Tables, batch: Batch, vectors: Vectors, owner: Tensor | None, slices: Sequence[int] | None = None
) -> Runs:
    """Lookups by row, stable; see `triton_sort`. With `slices` [blocks], runs are of one row in one slice."""
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
    ignored_key = about.row_count
    if slices is not None:
        blocks = vectors.block_of_vector[lookups if owner is None else owner[lookups]]
        of_lookups = torch.tensor(slices, device=device)[blocks]
        keys = (keys.to(torch.int64) << SLICE_BITS) | of_lookups.where(keys < ignored_key, 0)
        ignored_key <<= SLICE_BITS
    counts = _int32((2, tile_count), device)
    count_runs_kernel[grid](counts, keys, count, tile_count, ignored_key, CHUNK=CHUNK, TILE=TILE)
    before = counts.cumsum(1, dtype=torch.int32) - counts
    runs = Runs(
        lookups=lookups,
        starts=_int32(count + 1, device),
        long=torch.zeros(count // (CHUNK + 1) + 1, dtype=torch.int32, device=device),
        totals=_int32(2, device),
        keys=None if slices is None else keys,
    )
    write_runs_kernel[grid](
        runs.starts,
        runs.long,
        runs.totals,
        keys,
        before,
        count,
        tile_count,
        ignored_key,
        CHUNK=CHUNK,
        TILE=TILE,
    )
    return runs


def _sum_long_runs(
    runs: Runs,
    count: int,
    sums: Tensor,
    out: Tensor | None,
    arguments: tuple[object, ...],
    chosen: dict[str, object],
    tiles: triton_tiles.Tiles,
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
    sum_long_kernel[grid](*arguments, *where, sums, out, **chosen, num_warps=tiles.chunk_warps)
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


def _is_first(numbers: Tensor) -> Tensor:
    """Which of some rising numbers differ from the one before."""
    return torch.cat((torch.ones_like(numbers[:1], dtype=torch.bool), numbers[1:] != numbers[:-1]))


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
