# SPDX-License-Identifier: Apache-2.0
"""A shard in memory: its weights and optimizer states, named for checkpoints."""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sennit.runtime.kernels.optimizers import OptimizerSpec
from sennit.runtime.kernels.spec import ShardSpec

HUGE_PAGE_BYTES: Final = 2 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardMemory:
    """One shard. Implementations read and write these tensors in place."""

    spec: ShardSpec

    weight: Tensor
    """[row_count, dim] in the table's precision."""

    states: dict[str, Tensor]
    """Float32, in the order of `OptimizerSpec.states`."""

    row_numbers: Tensor | None = None
    """Int64 [row_count]: the global number of each row if rows are lines of a cache; None: numbers from
    `spec.first_row` on.
    """

    def id_of(self, row: int) -> int:
        """The id of row `row` in memory, within this part of the table."""
        return row if self.row_numbers is None else int(self.row_numbers[row]) - self.spec.first_row


def allocate(spec: ShardSpec, optimizer: OptimizerSpec, device: torch.device) -> ShardMemory:
    """A table of zeros."""
    return ShardMemory(
        spec=spec,
        weight=zeros((spec.row_count, spec.dim), spec.precision.dtype, device),
        states={name: zeros(optimizer.state_shape(name, spec), torch.float32, device) for name in optimizer.states},
    )


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates on huge pages if the kernel has them. Rows are read at random, which would miss the TLB otherwise.

    Host memory above a page is there when it is used.
    """
    count = math.prod(shape)
    size_bytes = count * dtype.itemsize
    if device.type != "cpu" or size_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    # One more page, so that the table can start at a page boundary.
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: EINVAL
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + size_bytes].view(dtype).view(shape)
