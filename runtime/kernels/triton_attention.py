# SPDX-License-Identifier: Apache-2.0
"""Attention in Triton: on an NVIDIA GPU, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1), for tests."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
from torch import Tensor

from sennit.runtime.kernels import triton_tiles
from sennit.runtime.kernels.attention_call import AttentionCall
from sennit.runtime.kernels.triton_attend import attend_kernel, key_gradient_kernel, query_gradient_kernel
from sennit.runtime.kernels.triton_bias import bias_gradient_kernel, sum_sequences_kernel

EVERYWHERE: Final = 1 << 30
"""A window that no sequence is longer than."""

SCRATCH_FLOATS: Final = 1 << 26
"""The most gradients of scores that are kept at a time (256 MiB), unless those of one tile are more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTiles:
    """How work is split. In float32 the split changes no bit of the results."""

    rows: int
    columns: int
    """Positions of a tile of scores."""

    depth: int
    """Columns of a head that are multiplied at a time."""

    width: int
    """Columns of a result that a program has at most."""

    entries: int
    """Entries of a bias that a program has."""

    warps: int


def tiles_for(device_type: str, *, is_half: bool) -> AttentionTiles:
    """The tiles for a device. They are large in the interpreter, where operations cost and elements do not."""
    if device_type == "cpu":
        return AttentionTiles(rows=64, columns=64, depth=128, width=128, entries=64, warps=1)
    if is_half:
        return AttentionTiles(rows=64, columns=64, depth=64, width=64, entries=64, warps=8)
    return AttentionTiles(rows=32, columns=32, depth=16, width=64, entries=64, warps=8)


class TritonAttention:
    """The functions of `reference_attention`, on the device of its tensors (docs/reference/attention.md, "Which bits").

    Keeps nothing between calls. Gradients of biases wait once for the device, to know lengths.
    """

    def __init__(self) -> None:
        self.device_type = triton_tiles.device_type()

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        output = torch.empty_like(value, memory_format=torch.contiguous_format)
        statistics = query.new_empty((*query.shape[:2], 2 if call.is_softmax else 0), dtype=torch.float32)
        launch = _Launch(call, query, key, value, self.device_type)
        tiles = launch.tiles
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            for grid in launch.grids(tiles.rows, value.shape[2]):
                attend_kernel[grid](
                    output,
                    statistics,
                    *launch.rows,
                    *launch.about,
                    0,
                    *launch.sizes,
                    *launch.strides,
                    *launch.numbers,
                    **launch.options,
                )
        return output, statistics

    def differentiate(
        self,
        call: AttentionCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gradient: Tensor,
        statistics: Tensor,
        *,
        wants_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        of_query, of_key, of_value = (
            torch.empty_like(rows, memory_format=torch.contiguous_format) for rows in (query, key, value)
        )
        of_bias = query.new_zeros((query.shape[1], call.bias_entries if wants_bias else 0), dtype=torch.float32)
        launch = _Launch(call, query, key, value, self.device_type)
        gradient = _inner(gradient)
        strides = (*launch.strides, *gradient.stride()[:2])
        means = torch.empty_like(statistics[..., 0]) if call.is_softmax else statistics
        given = (means, gradient, statistics, *launch.rows, *launch.about)
        tiles, bands = launch.tiles, [_Band.whole(launch)]
        parts: Tensor | None = None
        if wants_bias and len(query) > 0:
            bands = launch.bands()
            parts = of_bias.new_zeros((len(call.offsets) - 1, *of_bias.shape))
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            for band in bands:
                of_scores = None if band.places is None else query.new_empty(band.floats, dtype=torch.float32)
                for grid in launch.grids(tiles.rows, query.shape[2], band.stop - band.first):
                    query_gradient_kernel[grid](
                        of_query,
                        means,
                        of_scores,
                        band.places,
                        *given[1:],
                        band.first,
                        *launch.sizes,
                        *strides,
                        *launch.numbers,
                        **launch.options,
                    )
                if parts is not None and of_scores is not None:
                    launch.add_to_biases(parts, of_scores, band)
            for grid in launch.grids(tiles.columns, max(query.shape[2], value.shape[2])):
                key_gradient_kernel[grid](
                    of_key, of_value, *given, 0, *launch.sizes, *strides, *launch.numbers, **launch.options
                )
            if parts is not None:
                count, block = of_bias.numel(), 128
                sum_sequences_kernel[(triton.cdiv(count, block),)](
                    of_bias, parts, len(parts), count, BLOCK=block, num_warps=4, enable_fp_fusion=False
                )
        return of_query, of_key, of_value, of_bias


@dataclass(frozen=True, kw_only=True, slots=True)
class _Band:
    """Tiles of rows whose gradients of scores are in memory at the same time."""

    first: int
    stop: int
    places: Tensor | None = None
    """Int64 [tiles]: the float at which those of each tile begin. Tiles of other bands have any place."""

    floats: int = 0
    column_bits: int = 0
    """2^column_bits is more than the positions of any sequence."""

    @staticmethod
    def whole(launch: _Launch) -> _Band:
        return _Band(first=0, stop=launch.tile_count(launch.tiles.rows))


class _Launch:
    """What all kernels of a call get."""

    def __init__(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, device_type: str) -> None:
        self.rows = query, key, value = _inner(query), _inner(key), _inner(value)
        self._call = call
        self._sequences = len(call.offsets) - 1
        is_half = query.dtype == torch.bfloat16
        self.tiles = tiles_for(device_type, is_half=is_half)
        offsets, targets, position_bias, time_bias, times, boundaries = (
            None if tensor is None else tensor.contiguous()
            for tensor in (
                call.offsets, call.targets, call.position_bias, call.time_bias, call.times, call.boundaries
            )
        )  # fmt: skip
        self._offsets, self._targets, self._times, self._boundaries = offsets, targets, times, boundaries
        self.about = (
            offsets, targets, position_bias, time_bias, times, boundaries, self._sequences,
            self._sequences.bit_length(),
        )  # fmt: skip
        self._dim, self._width = query.shape[2], value.shape[2]
        self.sizes = query.shape[1], self._dim, self._width
        self.strides = *query.stride()[:2], *key.stride()[:2], *value.stride()[:2]
        self._context = min(call.context, EVERYWHERE)
        self._window = EVERYWHERE if call.window is None else min(call.window, EVERYWHERE)
        self._position_count = 0 if position_bias is None else position_bias.shape[1]
        self._boundary_count = 0 if boundaries is None else len(boundaries)
        self.numbers = (
            self._context, self._window, call.scale, 1 / call.divisor, self._position_count, self._boundary_count,
            self._boundary_count.bit_length(),
        )  # fmt: skip
        self.options: dict[str, Any] = {
            "SOFTMAX": call.is_softmax,
            "CAUSAL": call.causal,
            "HALF": is_half,
            "ROWS": self.tiles.rows,
            "COLUMNS": self.tiles.columns,
            "DEPTH": _block(max(self._dim, self._width), self.tiles.depth),
            "WIDTH": _block(max(self._dim, self._width), self.tiles.width),
            "num_warps": self.tiles.warps,
            "enable_fp_fusion": False,
        }

    def tile_count(self, positions: int) -> int:
        """Tiles of so many positions, at most: a sequence may have one less than its share."""
        return len(self.rows[0]) // positions + self._sequences

    def grids(self, positions: int, columns: int, tiles: int | None = None) -> list[tuple[int, int, int]]:
        """The grid, or none for nothing. `columns`: those of the result."""
        count = self.tile_count(positions) if tiles is None else tiles
        if len(self.rows[0]) == 0:
            return []
        return [(count, self.sizes[0], triton.cdiv(columns, self.options["WIDTH"]))]

    def bands(self) -> list[_Band]:
        """Waits for the device."""
        rows, heads = self.tiles.rows, self.sizes[0]
        places: list[int] = []
        bands: list[tuple[int, int, int]] = []
        first = floats = longest = 0
        for begin, end in itertools.pairwise(self._call.offsets.tolist()):
            longest = max(longest, end - begin)
            tiles = end // rows - begin // rows + 1
            size = rows * heads * (end - begin)
            for _ in range(tiles):
                if floats and floats + size > SCRATCH_FLOATS:
                    bands.append((first, len(places), floats))
                    first, floats = len(places), 0
                places.append(floats)
                floats += size
        bands.append((first, len(places), floats))
        of_tiles = torch.tensor(places, dtype=torch.int64).to(self.rows[0].device)
        return [
            _Band(first=begin, stop=stop, places=of_tiles, floats=count, column_bits=longest.bit_length())
            for begin, stop, count in bands
        ]

    def add_to_biases(self, parts: Tensor, of_scores: Tensor, band: _Band) -> None:
        first = 0
        for entries, times, boundaries in (
            (self._position_count, None, None),
            (0 if self._times is None else self._boundary_count + 1, self._times, self._boundaries),
        ):
            if entries:
                grid = (self._sequences, self.sizes[0], triton.cdiv(entries, self.tiles.entries))
                bias_gradient_kernel[grid](
                    parts,
                    of_scores,
                    band.places,
                    self._offsets,
                    self._targets,
                    times,
                    boundaries,
                    band.first,
                    band.stop,
                    self.sizes[0],
                    parts.shape[2],
                    first,
                    entries,
                    self._context,
                    self._window,
                    self._boundary_count,
                    band.column_bits,
                    CAUSAL=self._call.causal,
                    ROWS=self.tiles.rows,
                    ENTRIES=self.tiles.entries,
                    num_warps=max(1, self.tiles.entries // 32),
                    enable_fp_fusion=False,
                )
            first += entries


def _block(columns: int, most: int) -> int:
    """The least power of two for these columns, at least 16 and at most `most`."""
    return min(max(16, 1 << (columns - 1).bit_length()), most)


def _inner(rows: Tensor) -> Tensor:
    """[rows, heads, dim] whose last stride is 1."""
    return rows if rows.stride(2) == 1 else rows.contiguous()
