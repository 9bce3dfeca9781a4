# SPDX-License-Identifier: Apache-2.0
"""Weighted means of bags, from weighted sums: `(w · row + …) / float(length)`, as FBGEMM has them.

Implementations have weighted sums, and means of rows without weights. Dividing before and after them costs a pass over
the vectors of bags, and one definition serves all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.checks import places_of_outputs
from sennit.runtime.kernels.spec import Pooling, ShardSpec


def is_weighted_mean(batch: Batch) -> bool:
    return batch.weights is not None and batch.pooling is Pooling.MEAN


def as_sum(batch: Batch) -> Batch:
    """The batch whose sums are to be divided."""
    return dataclasses.replace(batch, pooling=Pooling.SUM)


def divided(sums: Tensor, batch: Batch, specs: Sequence[ShardSpec]) -> Tensor:
    """The flat result of a lookup, float32, from that of `as_sum(batch)`, which it overwrites."""
    for block, part in places_of_outputs(batch, specs):
        lengths = batch.lengths[block.bags].clamp(min=1).to(torch.float32)
        sums[part].view(block.bag_count, -1).div_(lengths.unsqueeze(1))
    return sums


def scaled(gradient: Tensor, batch: Batch, specs: Sequence[ShardSpec]) -> Tensor:
    """The gradient of the sums, from that of the means. Both are flat and float32."""
    found = torch.empty_like(gradient)
    for block, part in places_of_outputs(batch, specs):
        factors = torch.ones((), device=gradient.device) / batch.lengths[block.bags].clamp(min=1).to(torch.float32)
        torch.mul(
            factors.unsqueeze(1),
            gradient[part].view(block.bag_count, -1),
            out=found[part].view(block.bag_count, -1),
        )
    return found
