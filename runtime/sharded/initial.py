# SPDX-License-Identifier: Apache-2.0
"""Initial values of shards. A row's depend on the seed, the table's name and the row alone, not on how rows are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Generator, Tensor

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.sharded.tables import Initial, Shard, Table

BLOCK_ROWS: Final = 4096
"""Rows are drawn in blocks of so many, each from a stream of its own."""


def fill(weight: Tensor, tables: Sequence[Table], shard: Shard, *, seed: int) -> None:
    """Fills a shard's weight, [rows, columns] in the table's precision."""
    table = tables[shard.table]
    rows, columns = table.row_range(shard.row), table.column_range(shard.column)
    initial = table.initial or _uniform(table.rows)
    for low in range(rows.low // BLOCK_ROWS * BLOCK_ROWS, rows.high, BLOCK_ROWS):
        block = torch.empty(min(BLOCK_ROWS, table.rows - low), table.dim)
        initial(block, torch_stream(seed, "table", table.name, low // BLOCK_ROWS))
        first, end = max(low, rows.low), min(low + BLOCK_ROWS, rows.high)
        weight[first - rows.low : end - rows.low] = block[first - low : end - low, columns.low : columns.high]


def _uniform(rows: int) -> Initial:
    bound = rows**-0.5

    def initial(block: Tensor, generator: Generator) -> None:
        block.uniform_(-bound, bound, generator=generator)

    return initial
