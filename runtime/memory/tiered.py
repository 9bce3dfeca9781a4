# SPDX-License-Identifier: Apache-2.0
"""Embedding tables that are larger than memory: the engine works on the lines of a cache, the rows live in a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.checks import resolve
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.optimizers import OptimizerSpec
from sennit.runtime.kernels.spec import Bounds, Precision, Rounding, TableSpec
from sennit.runtime.memory.cache import CachedBatch, RowCache
from sennit.runtime.memory.layout import RowPart, StoredTable, StoreLayout
from sennit.runtime.memory.store import RowStore
from sennit.transport.errors import ArgumentError, ConfigError

_DTYPES = {Precision.FP32: "float32", Precision.FP16: "float16", Precision.BF16: "bfloat16"}


def layout_of(tables: Sequence[TableSpec], optimizer: OptimizerSpec) -> StoreLayout:
    """Weights and states of tables that have one dim and precision; raises `ConfigError` for others."""
    kinds = {(table.dim, table.precision) for table in tables}
    if len(kinds) != 1:
        raise ConfigError(f"tables of {len(kinds)} dims and precisions; allowed: 1 a store")
    table = tables[0]
    states = {name: optimizer.state_shape(name, table)[1:] for name in optimizer.states}
    return StoreLayout(
        tables=tuple(StoredTable(name=table.name, row_count=table.row_count) for table in tables),
        parts=(
            RowPart(name="weight", columns=table.dim, dtype=_DTYPES[table.precision]),
            *(RowPart(name=name, columns=shape[0] if shape else 1) for name, shape in states.items()),
        ),
    )


class PrefetchedBatch:
    """A batch whose rows are on their way."""

    def __init__(self, batch: Batch, rows: CachedBatch) -> None:
        self.batch, self.rows = batch, rows
        self.lines: Batch | None = None

    def wait(self, timeout_s: float = 60.0) -> None:
        """Until the rows are here. Raises `TimeoutError`."""
        self.rows.wait(timeout_s)


class TieredTables:
    """As `EmbeddingEngine`, but batches are named one step ahead: `prefetch`, `lookup`, `update`. Not thread-safe.

    The results are those of the engine in memory, bit for bit. Stochastic rounding is refused for now: it goes by the
    number of the row, which a line does not have.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: OptimizerSpec,
        store: RowStore,
        *,
        line_count: int,
        spare_count: int,
        policy: str = "lfu",
        implementation_name: str = "native",
        rounding: Rounding = Rounding.NEAREST,
    ) -> None:
        """`store` has the layout `layout_of(tables, optimizer)`. Ids out of range raise before any row is read."""
        layout = layout_of(tables, optimizer)
        if store.layout != layout:
            raise ConfigError("the store has other tables or parts than layout_of(tables, optimizer)")
        if rounding is not Rounding.NEAREST and tables[0].precision is not Precision.FP32:
            raise ConfigError("stochastic rounding of rows in a cache; allowed: nearest")
        self.specs = tuple(tables)
        lines = TableSpec(
            name="lines", row_count=line_count + spare_count, dim=tables[0].dim, precision=tables[0].precision
        )
        self.engine = EmbeddingEngine(
            [lines], optimizer, implementation_name=implementation_name, rounding=Rounding.NEAREST
        )
        weight = self.engine.weight("lines")
        arrays = {"weight": weight.view(torch.uint16) if weight.dtype is torch.bfloat16 else weight}
        for name, state in self.engine.states("lines").items():
            arrays[name] = state.view(len(state), -1)
        self.cache = RowCache(
            store,
            line_count=line_count,
            spare_count=spare_count,
            policy=policy,
            arrays={name: array.numpy() for name, array in arrays.items()},
        )
        self._first_rows = torch.tensor([layout.first_row(table.name) for table in tables])

    def prefetch(self, batch: Batch) -> PrefetchedBatch:
        """Begins to bring in the rows of `batch`, and returns at once. Raises `IdError`."""
        batch, _ = resolve(batch, self.specs, Bounds.ERROR)
        counts = torch.tensor([block.lookup_count for block in batch.blocks()])
        bases = torch.repeat_interleave(self._first_rows[list(batch.table_of_block)], counts)
        return PrefetchedBatch(batch, self.cache.prefetch((batch.values + bases).numpy().astype(np.int64, copy=False)))

    def lookup(self, ahead: PrefetchedBatch, *, timeout_s: float = 60.0) -> Tensor:
        """As `EmbeddingEngine.lookup`. Waits for the rows; raises `TimeoutError`."""
        values = torch.from_numpy(ahead.rows.wait(timeout_s))
        ahead.lines = replace(ahead.batch, table_of_block=(0,) * len(ahead.batch.table_of_block), values=values)
        return self.engine.lookup(ahead.lines)

    def update(self, ahead: PrefetchedBatch, gradient: Tensor, *, rate: float) -> None:
        """As `EmbeddingEngine.update`, for the batch of the last `lookup`; its rows may leave the cache then."""
        if ahead.lines is None:
            raise ArgumentError("update of a batch without lookup")
        try:
            self.engine.update(ahead.lines, gradient, rate=rate)
        finally:
            ahead.rows.release(is_dirty=True)

    def release(self, ahead: PrefetchedBatch) -> None:
        """Instead of `update`, after an evaluation."""
        ahead.rows.release(is_dirty=False)

    def flush(self) -> int:
        """Makes all rows durable with the number of steps taken as the tag; returns the generation."""
        return self.cache.flush(self.engine.step)

    def close(self) -> None:
        """Changed rows that were not flushed are given up."""
        self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
