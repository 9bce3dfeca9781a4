# SPDX-License-Identifier: Apache-2.0
"""Deals the ids of a table's bags to its row shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def split_rows(
    lengths: Tensor, values: Tensor, borders: Sequence[int], weights: Tensor | None = None
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """For each row shard: lengths [bags], ids within the shard in the order of the bags, and their weights.

    `borders` [shards + 1] rise from 0 to the table's rows. Ids are in range.
    """
    shards, bags = len(borders) - 1, len(lengths)
    starts = torch.tensor(borders[:-1], dtype=values.dtype)
    shard = torch.bucketize(values, starts[1:], right=True)
    of_bag = torch.repeat_interleave(torch.arange(bags), lengths.to(torch.int64))
    split = torch.bincount(shard * bags + of_bag, minlength=shards * bags).view(shards, bags)
    order = torch.sort(shard, stable=True).indices
    counts = split.sum(1).tolist()
    ids = torch.split((values - starts[shard])[order], counts)
    own = [None] * shards if weights is None else torch.split(weights[order], counts)
    return [(split[row].to(torch.int32), ids[row], own[row]) for row in range(shards)]
