# SPDX-License-Identifier: Apache-2.0
"""Deals the ids of a table's bags to its row shards, with their weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sennit.runtime.kernels.ids import split_rows


def dealt(
    lengths: Tensor, values: Tensor, borders: Sequence[int], weights: Tensor | None = None
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """For each row shard: lengths [bags], ids within the shard in the order of the bags, and their weights.

    `borders` [shards + 1] rise from 0 to the table's rows. Ids are in range.
    """
    of_shards, ids = split_rows(lengths, values, borders)
    counts = of_shards.sum(1).tolist()
    own: Sequence[Tensor | None] = [None] * len(counts)
    if weights is not None:
        own = torch.split(weights[dealt_order(values, borders)[0]], counts)
    return list(zip(of_shards, torch.split(ids, counts), own, strict=True))


def dealt_order(values: Tensor, borders: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Where each dealt id stands in `values`, shard after shard, and how many ids each shard has."""
    shard = torch.bucketize(values, torch.tensor(borders[1:-1], dtype=values.dtype), right=True)
    counts: list[int] = torch.bincount(shard, minlength=len(borders) - 1).tolist()
    return torch.sort(shard, stable=True).indices, counts
