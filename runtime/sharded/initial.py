# SPDX-License-Identifier: Apache-2.0
"""Initial values of shards. They depend on the seed, the table's name and the row, and not on how tables are cut."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Generator, Tensor

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels.tensor_train import TensorTrainSpec, initialise
from sennit.runtime.sharded.tables import Initial, Range, Shard, Table
from sennit.transport.errors import ConfigError

BLOCK_ROWS: Final = 4096
"""Rows are drawn in blocks of this many, each block from its own stream."""

NOT_FILLED: Final = "initial left rows unfilled; allowed: a function that fills `rows` in place, with numbers"
OTHER_NUMBERS: Final = (
    "initial draws from another generator than the one it is given; allowed: rows.normal_(generator=generator) and the "
    "like, or numbers that each call has again"
)


def fill(weight: Tensor, tables: Sequence[Table], shard: Shard, *, seed: int, first: int = 0) -> None:
    """Fills `weight`, [rows, columns] in the table's precision: the rows of a shard from row `first` on."""
    table = tables[shard.table]
    start = table.row_range(shard.row).low + first
    rows, columns = Range(start, start + len(weight)), table.column_range(shard.column)
    initial = table.initial or _uniform(table.rows)
    for low in range(rows.low // BLOCK_ROWS * BLOCK_ROWS, rows.high, BLOCK_ROWS):
        block = torch.empty(min(BLOCK_ROWS, table.rows - low), table.dim)
        initial(block, torch_stream(seed, "table", table.name, low // BLOCK_ROWS))
        first, end = max(low, rows.low), min(low + BLOCK_ROWS, rows.high)
        weight[first - rows.low : end - rows.low] = block[first - low : end - low, columns.low : columns.high]


def fill_train(spec: TensorTrainSpec, cores: Sequence[Tensor], table: Table, *, seed: int) -> None:
    """Fills the cores of a tensor train, so that rows have the variance that `_uniform` gives."""
    initialise(spec, cores, (3 * table.rows) ** -0.5, torch_stream(seed, "table", table.name))


def described_initial(table: Table, seed: int) -> str:
    """What the table's first rows are to be, as text: ranks compare it, as they cannot compare functions.

    `NOT_FILLED` or `OTHER_NUMBERS` if the function does not do what it should.
    """
    if table.initial is None:
        return "uniform"
    blocks = []
    for default_seed in range(2):
        block = torch.full((min(BLOCK_ROWS, table.rows), table.dim), torch.nan)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(default_seed)
            try:
                table.initial(block, torch_stream(seed, "table", table.name, 0))
            except Exception as error:  # Any type: those that own rows raise it again.
                return f"{type(error).__name__}: {error}"
        if block.isnan().any():
            return NOT_FILLED
        blocks.append(block)
    if not torch.equal(*blocks):
        return OTHER_NUMBERS
    return f"first rows of digest {hashlib.sha256(blocks[0].numpy().data).hexdigest()[:16]}"


def check_initial(table: Table, description: str) -> None:
    """Raises `ConfigError` if this is the `described_initial` of a function that does not do what it should."""
    if description in (NOT_FILLED, OTHER_NUMBERS):
        raise ConfigError(f"table {table.name}: {description}")


def _uniform(rows: int) -> Initial:
    bound = rows**-0.5

    def initial(block: Tensor, generator: Generator) -> None:
        block.uniform_(-bound, bound, generator=generator)

    return initial
