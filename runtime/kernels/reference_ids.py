# SPDX-License-Identifier: Apache-2.0
"""Ids before a lookup in plain torch: dealt to row shards, and the distinct ones. Also for tensors on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sennit.runtime.kernels.checks import IdError, check_lengths


def split_rows(lengths: Tensor, values: Tensor, borders: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What `ids.split_rows` returns."""
    check_lengths(lengths, len(values))
    outside = (values < borders[0]) | (values >= borders[-1])
    if bool(outside.any()):
        place = int(outside.nonzero()[0])
        raise IdError(f"id {int(values[place])} at position {place}; allowed: [{borders[0]}, {borders[-1]})")
    edges = torch.tensor(borders, device=values.device)
    # Of equal borders the last one counts: a shard without rows has no ids.
    shards = torch.searchsorted(edges[1:-1], values.to(torch.int64), right=True)
    bags = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    cells = torch.bincount(shards * len(lengths) + bags, minlength=(len(borders) - 1) * len(lengths))
    order = torch.sort(shards, stable=True).indices
    split = (values.to(torch.int64) - edges[shards])[order].to(values.dtype)
    return cells.to(torch.int32).view(len(borders) - 1, len(lengths)), split


def distinct(values: Tensor) -> tuple[Tensor, Tensor]:
    """What `ids.distinct` returns."""
    ids, places = torch.unique(values.to(torch.int64), return_inverse=True)
    return ids, places
