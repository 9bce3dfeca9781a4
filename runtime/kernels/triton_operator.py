# SPDX-License-Identifier: Apache-2.0
"""The operator in Triton: on an NVIDIA GPU, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1), for tests."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from sennit.runtime.kernels import triton_tiles
from sennit.runtime.kernels.batch import Batch, RowSums
from sennit.runtime.kernels.checks import BadGradients
from sennit.runtime.kernels.layout import ShardMemory
from sennit.runtime.kernels.optimizers import Optimizer, StepConstants
from sennit.runtime.kernels.reference import CHUNK
from sennit.runtime.kernels.spec import Pooling, Rounding
from sennit.runtime.kernels.triton_lookup import lookup_kernel, weight_gradient_kernel
from sennit.runtime.kernels.triton_runs import count_runs_kernel, keys_kernel, write_runs_kernel
from sennit.runtime.kernels.triton_step import CLIP_NORM, CLIP_VALUE
from sennit.runtime.kernels.triton_tables import FP32, Tables, Vectors, WidthClass, describe, vectors_of
from sennit.runtime.kernels.triton_update import combine_kernel, sum_long_kernel, update_kernel
from sennit.transport.errors import ArgumentError

P = ParamSpec("P")
T = TypeVar("T")

TILE: Final = 256
"""Keys that a program takes: two a thread. With more of them programs wait longer for their slowest search."""

_MOMENTUM: Final = ("momentum", "nesterov")
"""The kinds of SGD with momentum: without and with Nesterov's."""

_WORD_COLUMNS: Final = 64
"""The fewest columns of a tile with random words."""

MAX_LOOKUPS: Final = (1 << 31) - (1 << 16)
"""The most lookups of one call: they are numbered with 32 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """The lookups of a batch sorted by row and slice, and where they begin. Counts of things stay on the device."""

    keys: Tensor
    """Int32 or int64 [lookups], rising: rows counted through all tables, and `slice_bits` of the slice below."""

    slice_bits: int

    starts: Tensor
    """Int64 [lookups]: the float at which a lookup's gradient begins; by key, then in the order of the batch."""

    table_of_place: Tensor
    """Int32 [lookups]: the table of each."""

    weights: Tensor | None
    """Float32 [lookups]: the weight of each; None: there are none."""

    shares: Tensor | None
    """Float32 [lookups]: 1 by the lookups of its bag; None: there is no mean."""

    rows: Tensor
    """Int32 [2, lookups + 1]: of each row the place in `starts` where it begins, and its first segment.

    There is one more, where the last one ends. A row that is not long has no segments.
    """

    segments: Tensor
    """Int32 [3, segment_room]: of each segment the places where it begins and ends, and its first piece. There is one
    more of the last kind."""

    borders: Tensor
    """Int32 [classes + 1, 3]: the first row, segment and piece of each class, and those after the last one."""

    piece_room: int
    """The most pieces that there may be."""


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
        self.device_type = triton_tiles.device_type()

    @_on_its_device
    def lookup(self, tables: Sequence[ShardMemory], batch: Batch) -> Tensor:
        result = torch.empty(
            batch.output_size(tuple(table.spec for table in tables)), dtype=torch.float32, device=_device(batch)
        )
        if len(result) == 0:
            return result
        about, vectors = describe(tables, _device(batch)), vectors_of(batch, tables)
        for number, one in enumerate(about.classes):
            tiles = triton_tiles.tiles_for(one.width, _device(batch))
            at_a_time = tiles.sequence_vectors if batch.pooling is Pooling.NONE else tiles.vectors
            lookup_kernel[(_parts(vectors.count, at_a_time),)](
                result,
                batch.values,
                batch.weights,
                vectors.bounds,
                vectors.block_of_bag,
                vectors.blocks,
                vectors.bases,
                about.fields,
                *vectors.owners,
                number,
                vectors.count,
                SEQUENCE=batch.pooling is Pooling.NONE,
                WEIGHTED=batch.weights is not None,
                MEAN=batch.pooling is Pooling.MEAN,
                **_shape(one, vectors),
                PRECISIONS=one.precisions,
                ALIGN=one.align,
                ALONE=len(about.classes) == 1,
                VECTORS=at_a_time,
                WIDTH=one.width,
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
        about, vectors = describe(tables, _device(batch)), vectors_of(batch, tables)
        # No search as in other kernels: Triton 3.6 cannot compile it beside `lane_tree`.
        bags = torch.repeat_interleave(batch.lengths.to(torch.int32), output_size=count)
        for number, one in enumerate(about.classes):
            tiles = triton_tiles.tiles_for(one.width, _device(batch))
            weight_gradient_kernel[(_parts(count, tiles.vectors),)](
                result,
                gradient,
                batch.values,
                bags,
                vectors.block_of_bag,
                vectors.blocks,
                vectors.bases,
                about.fields,
                number,
                count,
                **_shape(one, vectors),
                PRECISIONS=one.precisions,
                ALIGN=one.align,
                ALONE=len(about.classes) == 1,
                LOOKUPS=tiles.vectors,
                WIDTH=one.width,
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
        about = describe(tables, _device(batch))
        bad = about.none_bad.clone()
        if len(batch.values) == 0:
            return bad
        chosen: dict[str, object] = {
            "KIND": kind.value if kind is not Optimizer.SGD or constants.beta1 == 0 else _MOMENTUM[constants.nesterov],
            "CLIPPED": (CLIP_VALUE if math.isfinite(constants.max_gradient) else 0)
            | (CLIP_NORM if math.isfinite(constants.max_norm) else 0),
            "DECAY": constants.decay != 0 and not constants.decay_after,
            "DECAY_AFTER": constants.decay != 0 and constants.decay_after,
            "KEEP": constants.keep != 1,
        }
        step = (bad, constants.floats, _word(constants.step), _word(seed), _word(seed >> 32))
        job = _Job(tables, about, batch, gradient)
        for number in range(len(about.classes)):
            job.launch(number, step, chosen, is_stochastic=rounding is Rounding.STOCHASTIC)
        return bad

    @_on_its_device
    def sum_rows(self, tables: Sequence[ShardMemory], batch: Batch, gradient: Tensor) -> list[RowSums]:
        if len(batch.values) == 0:
            return []
        about = describe(tables, _device(batch))
        job = _Job(tables, about, batch, gradient)
        borders = [row for row, _, _ in job.runs.borders.tolist()]
        sums = [job.sums(number, end - begin) for number, (begin, end) in enumerate(itertools.pairwise(borders))]
        rows = (job.runs.keys[job.runs.rows[0, : borders[-1]]] >> job.runs.slice_bits).to(torch.int64)
        by_key = [table for one in about.classes for table in one.tables]
        starts = [*torch.searchsorted(rows, about.first_key_by_key).tolist(), borders[-1]]
        found = []
        for table, (begin, end) in zip(by_key, itertools.pairwise(starts), strict=True):
            if begin == end:
                continue
            number = next(number for number, one in enumerate(about.classes) if table in one.tables)
            own = sums[number][begin - borders[number] : end - borders[number], : tables[table].spec.dim]
            rows_of_table = rows[begin:end] - about.first_key_of_table[table]
            found.append(RowSums(table=table, rows=rows_of_table, sums=own.contiguous()))
        return sorted(found, key=lambda one: one.table)


class _Job:
    """The lookups of a batch by row, and the launches that sum the gradients of rows and update them."""

    def __init__(self, tables: Sequence[ShardMemory], about: Tables, batch: Batch, gradient: Tensor) -> None:
        self._device, self._count = _device(batch), len(batch.values)
        if self._count > MAX_LOOKUPS:
            raise ArgumentError(f"{self._count} lookups; allowed: {MAX_LOOKUPS}")
        vectors = vectors_of(batch, tables)
        self._about, self._vectors = about, vectors
        self._tiles = [triton_tiles.tiles_for(one.width, self._device) for one in about.classes]
        self.runs = sorted_runs(about, batch, vectors, [CHUNK * tiles.chunks for tiles in self._tiles])
        width = max(max(_WORD_COLUMNS, one.width) for one in about.classes)
        self._sums = torch.empty(self.runs.piece_room * width if self._count > CHUNK else 1, device=self._device)
        self._arguments = (
            gradient,
            self.runs.weights,
            self.runs.shares,
            self.runs.starts,
            self.runs.table_of_place,
            about.fields,
        )
        self._chosen: dict[str, object] = {
            "WEIGHTED": self.runs.weights is not None,
            "MEAN": self.runs.shares is not None,
            "enable_fp_fusion": False,
        }

    def launch(
        self,
        number: int,
        step: tuple[object, ...],
        chosen: dict[str, object],
        *,
        is_stochastic: bool = False,
        out: Tensor | None = None,
    ) -> None:
        """Sums the rows of a class and makes their step, or writes the sums to `out`."""
        runs, one = self.runs, self._about.classes[number]
        is_stochastic = is_stochastic and one.precisions != FP32
        width = max(_WORD_COLUMNS if is_stochastic else 0, one.width)
        tiles = triton_tiles.tiles_for(width, self._device)
        room = runs.segments.shape[1]
        shape = self._chosen | _shape(one, self._vectors) | {"WIDTH": width}
        if self._count > CHUNK:
            chunks = self._tiles[number].chunks
            sum_long_kernel[(min(runs.piece_room, tiles.programs),)](
                *self._arguments,
                runs.segments,
                runs.borders,
                self._sums,
                number,
                room,
                **shape,
                CHUNK=CHUNK,
                CHUNKS=chunks,
                UNROLL=tiles.chunk_unroll,
                num_warps=tiles.chunk_warps,
            )
            if self._count > CHUNK * chunks:
                combine_kernel[(min(room, tiles.programs),)](
                    self._sums,
                    runs.segments,
                    runs.borders,
                    number,
                    room,
                    PIECES=tiles.pieces,
                    WIDTH=width,
                    num_warps=tiles.piece_warps,
                    enable_fp_fusion=False,
                )
        update_kernel[(min(_parts(self._count, tiles.rows), tiles.programs),)](
            *self._arguments,
            runs.keys,
            runs.slice_bits,
            runs.rows,
            runs.segments,
            runs.borders,
            self._sums,
            number,
            self._count,
            room,
            *step,
            out,
            **shape,
            **chosen,
            PRECISIONS=one.precisions,
            ALIGN=one.align,
            LEVELS=levels_of(runs.slice_bits),
            STOCHASTIC=is_stochastic,
            ROWS=tiles.rows,
            UNROLL=tiles.row_unroll,
            num_warps=tiles.row_warps,
        )

    def sums(self, number: int, row_count: int) -> Tensor:
        """Float32 [row_count, width]: the sums of a class, which has so many rows in the batch."""
        out = torch.empty((row_count, self._about.classes[number].width), device=self._device)
        no_step = dict.fromkeys(("CLIPPED", "DECAY", "DECAY_AFTER", "KEEP"), 0)
        self.launch(number, (None, None, 0, 0, 0), {"KIND": "none", **no_step}, out=out)
        return out


def levels_of(slice_bits: int) -> int:
    """Levels of the tree over slices that a kernel has room for: few kernels for many numbers of slices."""
    return next(levels for levels in (0, 1, 2, 4, 8, 16) if levels >= slice_bits)


def sorted_runs(about: Tables, batch: Batch, vectors: Vectors, pieces: Sequence[int]) -> Runs:
    """Lookups by row, stable. `pieces`: how many lookups a piece has, by class."""
    device, count = _device(batch), len(batch.values)
    slices = set(batch.slice_of_block or (0,))
    slice_bits = (max(slices, default=0) ^ min(slices, default=0)).bit_length()
    ignored_key = about.row_count << slice_bits
    keys = torch.empty(count, dtype=torch.int32 if ignored_key < 1 << 31 else torch.int64, device=device)
    tile_count = _parts(count, TILE)
    grid, owners = (tile_count,), _int32((count,), device)
    is_sequence = batch.pooling is Pooling.NONE
    keys_kernel[grid](
        keys,
        owners,
        batch.values,
        vectors.bounds,
        vectors.block_of_bag,
        vectors.blocks,
        about.fields,
        *vectors.owners,
        count,
        slice_bits,
        ignored_key,
        SEQUENCE=is_sequence,
        TILE=TILE,
    )
    keys, places = torch.sort(keys, stable=True)
    # A long row has at most a segment a slice.
    segment_room = min(count, count // (CHUNK + 1) * len(slices)) + 1
    rows, segments = _int32((2, count + 1), device), _int32((3, segment_room), device)
    borders, counts = _int32((len(about.classes) + 1, 3), device), _int32((3, tile_count), device)
    table_of_place = _int32((count,), device)
    weights = None if batch.weights is None else torch.empty(count, device=device)
    shares = torch.empty(count, device=device) if batch.pooling is Pooling.MEAN else None
    shape = (count, tile_count)
    more = (count.bit_length(), slice_bits, tuple(pieces))
    chosen = {"SLICED": slice_bits > 0, "CLASSES": len(about.classes), "CHUNK": CHUNK, "TILE": TILE}
    count_runs_kernel[grid](counts, keys, about.first_keys, *shape, *more, **chosen)
    until = counts.cumsum(1, dtype=torch.int32)
    write_runs_kernel[grid](
        rows,
        segments,
        borders,
        places,
        table_of_place,
        weights,
        shares,
        until,
        keys,
        owners,
        batch.weights,
        batch.lengths,
        vectors.block_of_bag,
        vectors.blocks,
        vectors.bases,
        about.fields,
        about.first_keys,
        *shape,
        segment_room,
        *more,
        SEQUENCE=is_sequence,
        **chosen,
    )
    return Runs(
        keys=keys,
        slice_bits=slice_bits,
        starts=places,
        table_of_place=table_of_place,
        weights=weights,
        shares=shares,
        rows=rows,
        segments=segments,
        borders=borders,
        piece_room=segment_room + count // min(pieces),
    )


def _shape(one: WidthClass, vectors: Vectors) -> dict[str, object]:
    return {"ONE_DIM": one.one_dim, "VECTOR_ALIGN": vectors.align(one.tables)}


def _device(batch: Batch) -> torch.device:
    return batch.lengths.device


def _int32(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=device)


def _parts(count: int, size: int) -> int:
    return (count + size - 1) // size


def _word(value: int) -> int:
    """The low 32 bits as a signed number, so that kernels get one type for every value."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
