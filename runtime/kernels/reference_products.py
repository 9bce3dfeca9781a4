# SPDX-License-Identifier: Apache-2.0
"""Runs of equal keys and folds of products in plain torch, which tensor-train tables need besides the operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Members with equal keys, in the order of keys. Members with negative keys are left out. All int64."""

    keys: Tensor
    """[n]: distinct keys, rising."""

    order: Tensor
    """[kept members]: member numbers, key after key, ascending within each key."""

    starts: Tensor
    """[n + 1]: where the members of each key start in `order`, and where the last ones end."""

    places: Tensor
    """[members]: the index of each member's key in `keys`; -1 for members left out."""


def runs_of(keys: Tensor, key_count: int) -> Runs:
    """The runs of `keys`, int64 [members], below `key_count`; on the device of `keys`."""
    kept = (keys >= 0).nonzero().squeeze(1)
    ordered, order = torch.sort(keys[kept], stable=True)
    order = kept[order]
    distinct, place, counts = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)
    starts = torch.zeros(len(distinct) + 1, dtype=torch.int64, device=keys.device)
    torch.cumsum(counts, 0, out=starts[1:])
    places = torch.full_like(keys, -1)
    places[order] = place
    return Runs(keys=distinct, order=order, starts=starts, places=places)


def fold_products(
    left: Tensor,
    left_rows: Tensor,
    right: Tensor,
    right_rows: Tensor,
    starts: Tensor | None,
    *,
    into: Tensor | None = None,
) -> Tensor:
    """Float32 [items, X, Y]: sums of matrix products, added one after another (rule 9 of docs/reference/embedding.md).

    `left` is float32 [.., X, K] with any strides, `right` float32 [.., K, Y] whose last stride is 1. Member m
    multiplies `left[left_rows[m]]` by `right[right_rows[m]]`. Item i sums the members `starts[i]` to `starts[i + 1]`,
    or is member i alone if `starts` is None. If `into` is given, it is contiguous and gets the result.
    """
    if starts is None:
        starts = torch.arange(len(left_rows) + 1)
    counts = starts.diff()
    sums = torch.zeros(len(counts), left.shape[1], right.shape[2])
    for place in range(int(counts.max()) if len(counts) else 0):
        longer = (counts > place).nonzero().squeeze(1)
        member = starts[longer] + place
        a, b = left[left_rows[member]], right[right_rows[member]]
        for k in range(left.shape[2]):
            sums[longer] = sums[longer] + a[:, :, k, None] * b[:, k, None, :]
    return sums if into is None else into.view_as(sums).copy_(sums)
