# SPDX-License-Identifier: Apache-2.0
"""Where the Triton kernels run, and how much of its work a program of them takes at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton import knobs

from sennit.transport.errors import Unsupported


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """How work is split for one width of rows. The split changes no bit of the results."""

    vectors: int
    """Bags that a program looks up."""

    sequence_vectors: int
    """Vectors that it looks up without pooling."""

    vector_warps: int

    rows: int
    """Rows of tables that a program sums and updates at a time."""

    row_warps: int

    row_unroll: int
    """How many gradients of a row are loaded before the first is added."""

    chunks: int
    """Chunks per piece of a long row: a power of two, because a piece has to be a subtree."""

    chunk_warps: int

    chunk_unroll: int
    """Like `row_unroll`, of chunks that are summed side by side."""

    pieces: int
    """Sums of pieces that a program adds up at a time: a power of two."""

    piece_warps: int

    programs: int
    """The most programs that are started if only the device knows the amount of work."""

    unroll: int
    """How many rows of a bag are loaded before the first is added."""


def device_type() -> str:
    """Of the tensors that the kernels take. Raises `Unsupported` where there is neither a GPU nor the interpreter."""
    if knobs.runtime.interpret:
        return "cpu"  # the interpreter reads and writes host memory
    if not torch.cuda.is_available():
        raise Unsupported("implementation triton", "no CUDA device, and TRITON_INTERPRET=1 is not set")
    return "cuda"


def tiles_for(width: int, device: torch.device) -> Tiles:
    """The tiles for a device. They are large in the interpreter, where operations cost and elements do not."""
    if device.type == "cpu":
        return Tiles(
            vectors=64,
            sequence_vectors=64,
            vector_warps=1,
            rows=64,
            row_warps=1,
            row_unroll=1,
            chunks=8,
            chunk_warps=1,
            chunk_unroll=1,
            pieces=8,
            piece_warps=1,
            programs=2,
            unroll=1,
        )
    return tiles_of_gpu(width, torch.cuda.get_device_properties(device).multi_processor_count)


def tiles_of_gpu(width: int, multiprocessors: int) -> Tiles:
    """Tiles that were the fastest of some on an H200 (docs/lab/gpu-kernels.md).

    A warp has one row of a table, one bag or two vectors of 128 columns. Many small programs hide the time that loads
    take. Of chunks side by side a thread holds 16 elements, of narrow rows 8.
    """
    chunks = max(2, min(16, 512 // width))
    pieces = max(2, 1024 // width)
    return Tiles(
        vectors=max(1, 512 // width),
        sequence_vectors=max(1, 1024 // width),
        vector_warps=max(4, min(8, width // 128)),
        rows=max(1, 128 // width),
        row_warps=max(1, min(8, width // 128)),
        row_unroll=2,
        chunks=chunks,
        chunk_warps=max(1, min(8, chunks * width // 512)),
        chunk_unroll=2,
        pieces=pieces,
        piece_warps=max(1, min(8, pieces * width // 1024)),
        programs=64 * multiprocessors,
        unroll=4 if width < 4096 else 2,
    )
