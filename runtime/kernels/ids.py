# SPDX-License-Identifier: Apache-2.0
"""Ids of one table before they are looked up: dealt to row shards, and the distinct ones. Native on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from sennit.runtime.kernels import _kernels
from sennit.runtime.kernels.checks import IdError, check_lengths
from sennit.transport.errors import ArgumentError

_INTEGERS: Final = (torch.int32, torch.int64)


def split_rows(lengths: Tensor, values: Tensor, borders: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Deals the ids of bags to R row shards. Shard r has the ids from `borders[r]` up to `borders[r + 1]`.

    `lengths` [bags] and `values` [lookups] are int32 or int64; `borders` [R + 1] rise. Returns lengths, int32
    [R, bags], and values less the border of their shard, in the dtype of `values`: by shard, then by bag, in the order
    of the bag. Raises `IdError` for an id in no shard, and `ArgumentError` for lengths that do not count the ids.
    """
    _check("lengths", lengths)
    _check("values", values)
    if len(borders) < 2 or any(low > high for low, high in itertools.pairwise(borders)):
        raise ArgumentError(f"borders {list(borders)}; allowed: two or more, rising")
    if values.device.type != "cpu" or lengths.device.type != "cpu":
        return split_rows_in_torch(lengths, values, borders)
    of_shards = torch.empty(len(borders) - 1, len(lengths), dtype=torch.int32)
    split = torch.empty_like(values)
    if _kernels.split_rows(
        (lengths.data_ptr(), lengths.dtype is torch.int64),
        len(lengths),
        (values.data_ptr(), values.dtype is torch.int64),
        len(values),
        borders,
        of_shards.data_ptr(),
        split.data_ptr(),
    ):
        return of_shards, split
    return split_rows_in_torch(lengths, values, borders)  # It finds out what is wrong.


def distinct(values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ids of `values`, int32 or int64 [n], rising, and where among them each value is; both int64."""
    _check("values", values)
    if values.device.type == "cpu":
        ids, places = (torch.empty(len(values), dtype=torch.int64) for _ in range(2))
        count = _kernels.distinct(
            (values.data_ptr(), values.dtype is torch.int64), len(values), ids.data_ptr(), places.data_ptr()
        )
        if count >= 0:
            return ids[:count], places
    return distinct_in_torch(values)


def split_rows_in_torch(lengths: Tensor, values: Tensor, borders: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`split_rows` in plain torch: for tensors on a GPU, and to find out what is wrong with ids."""
    check_lengths(lengths, len(values))
    outside = (values < borders[0]) | (values >= borders[-1])
    if bool(outside.any()):
        place = int(outside.nonzero()[0])
        raise IdError(f"id {int(values[place])} at position {place}; allowed: [{borders[0]}, {borders[-1]})")
    edges = torch.tensor(borders, device=values.device)
    # The last of equal borders counts: a shard without rows has no ids.
    shards = torch.searchsorted(edges[1:-1], values.to(torch.int64), right=True)
    bags = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    cells = torch.bincount(shards * len(lengths) + bags, minlength=(len(borders) - 1) * len(lengths))
    order = torch.sort(shards, stable=True).indices
    split = (values.to(torch.int64) - edges[shards])[order].to(values.dtype)
    return cells.to(torch.int32).view(len(borders) - 1, len(lengths)), split


def distinct_in_torch(values: Tensor) -> tuple[Tensor, Tensor]:
    """`distinct` in plain torch: for tensors on a GPU, and for ids that the native code does not take."""
    ids, places = torch.unique(values.to(torch.int64), return_inverse=True)
    return ids, places


def _check(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _INTEGERS or tensor.dim() != 1 or not tensor.is_contiguous():
        shape = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ArgumentError(f"{name} are {shape}; allowed: int32 or int64, one dimension, contiguous")
