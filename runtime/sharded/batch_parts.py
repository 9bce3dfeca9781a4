# SPDX-License-Identifier: Apache-2.0
"""Parts of a batch: put together, and put in another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch, sums_of_runs
from sennit.runtime.kernels.spec import Pooling

_HOST: Final = torch.device("cpu")


def joined(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device = _HOST) -> Tensor:
    """One flat tensor of `dtype` on `device` from parts of any shape, type and device. Without parts it is empty."""
    if not parts:
        return torch.empty(0, dtype=dtype, device=device)
    here = parts[0].device  # `device` may lack the number of a GPU.
    is_here = here.type == device.type and device.index in (None, here.index)
    if is_here and all(part.dtype is dtype and part.device == here and part.is_contiguous() for part in parts):
        # A single operation for any number of parts: on a GPU it takes few launches.
        return torch.cat([part if part.dim() == 1 else part.view(-1) for part in parts])
    output = torch.empty(sum(part.numel() for part in parts), dtype=dtype, device=device)
    place = 0
    for part in parts:
        output[place : place + part.numel()].view(part.shape).copy_(part)
        place += part.numel()
    return output


def chosen_blocks(batch: Batch, gradient: Tensor, places: Sequence[int], dims: Sequence[int]) -> tuple[Batch, Tensor]:
    """The blocks at `places`, in this order, with the gradient of their result. `dims`: columns of each table."""
    counts = sums_of_runs(batch.lengths, batch.bags_of_block)
    vectors = counts if batch.pooling is Pooling.NONE else batch.bags_of_block
    sizes = [count * dims[table] for count, table in zip(vectors, batch.table_of_block, strict=True)]

    def of(whole: Tensor, parts: Sequence[int]) -> Tensor:
        split = torch.split(whole, list(parts))
        return joined([split[place] for place in places], whole.dtype, whole.device)

    slices = batch.slice_of_block
    part = Batch(
        table_of_block=tuple(batch.table_of_block[place] for place in places),
        bags_of_block=tuple(batch.bags_of_block[place] for place in places),
        slice_of_block=None if slices is None else tuple(slices[place] for place in places),
        lengths=of(batch.lengths, batch.bags_of_block),
        values=of(batch.values, counts),
        weights=None if batch.weights is None else of(batch.weights, counts),
        pooling=batch.pooling,
    )
    return part, of(gradient, sizes)
