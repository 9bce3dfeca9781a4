# SPDX-License-Identifier: Apache-2.0
"""Ids dealt to the row shards of their table: by ranges of rows, or by a hash of the id where ids are dynamic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sennit.runtime.kernels.id_directory import shards_of_ids, split_ids
from sennit.runtime.kernels.ids import split_rows
from sennit.runtime.sharded.tables import Table


def dealt(
    table: Table, lengths: Tensor, values: Tensor, weights: Tensor | None = None
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Deals the ids of a table's bags to its row shards, with their weights.

    Each row shard gets lengths [bags], ids in the order of the bags, and their weights. Ids are in range, and become
    rows of the shard. Those of a dynamic table stay as they are.
    """
    if table.ids is None:
        of_shards, ids = split_rows(lengths, values, table.row_borders)
    else:
        of_shards, ids = split_ids(lengths, values.to(torch.int64), table.row_shards)
    counts = of_shards.sum(1).tolist()
    own: Sequence[Tensor | None] = [None] * len(counts)
    if weights is not None:
        own = torch.split(weights[dealt_order(table, values)[0]], counts)
    return list(zip(of_shards, torch.split(ids, counts), own, strict=True))


def dealt_order(table: Table, values: Tensor) -> tuple[Tensor, list[int]]:
    """The place of each dealt id in `values`, shard after shard, and the number of ids of each shard."""
    values = values.to(torch.int64)
    if table.ids is None:
        shard = torch.bucketize(values, torch.tensor(table.row_borders[1:-1], dtype=torch.int64), right=True)
    else:
        shard = shards_of_ids(values, table.row_shards)
    return by_shard(shard, table.row_shards)


def by_shard(shard: Tensor, shards: int) -> tuple[Tensor, list[int]]:
    """The places of `shard`, int64 [n], shard after shard, and how many each shard has."""
    counts: list[int] = torch.bincount(shard, minlength=shards).tolist()
    return torch.sort(shard, stable=True).indices, counts
