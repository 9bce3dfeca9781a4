# SPDX-License-Identifier: Apache-2.0
"""Embedding tables larger than memory: the engine works on the lines of a cache, and the rows are in a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sennit.closing import Closing
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.checks import resolve
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.layout import allocate, zeros
from sennit.runtime.kernels.optimizers import OptimizerSpec
from sennit.runtime.kernels.spec import Bounds, Precision, Rounding, ShardSpec
from sennit.runtime.memory.cache import NO_ROWS, CachedBatch, RowCache
from sennit.runtime.memory.layout import RowPart, StoreLayout
from sennit.runtime.memory.store import RowStore, widened
from sennit.transport.errors import ArgumentError, ConfigError

_DTYPES = {Precision.FP32: "float32", Precision.FP16: "float16", Precision.BF16: "bfloat16"}


def layout_of(tables: Sequence[ShardSpec], optimizer: OptimizerSpec) -> StoreLayout:
    """The layout of a store for weights and states of tables with one dim and precision.

    Raises `ConfigError` for others.
    """
    kinds = {(table.dim, table.precision) for table in tables}
    if len(kinds) != 1:
        raise ConfigError(f"tables of {len(kinds)} dims and precisions; allowed: 1 a store")
    table = tables[0]
    states = {name: optimizer.state_shape(name, table)[1:] for name in optimizer.states}
    return StoreLayout(
        tables=tuple((table.name, table.row_count) for table in tables),
        parts=(
            RowPart(name="weight", columns=table.dim, dtype=_DTYPES[table.precision]),
            *(RowPart(name=name, columns=shape[0] if shape else 1) for name, shape in states.items()),
        ),
    )


def tables_of(batch: Batch) -> Tensor:
    """Int64 [lookups]: the table of each lookup."""
    counts = torch.tensor([block.lookup_count for block in batch.blocks()], dtype=torch.int64)
    return torch.repeat_interleave(torch.tensor(batch.table_of_block, dtype=torch.int64), counts)


class CachedTables(Closing):
    """The lines of a cache as the memory of an engine's tables, which have one dim and precision.

    One cache holds rows of all these tables. To the engine, each table has all lines of the cache, and knows the row in
    each line.
    """

    def __init__(
        self,
        tables: Sequence[ShardSpec],
        optimizer: OptimizerSpec,
        store: RowStore,
        *,
        line_count: int,
        spare_count: int,
        policy: str = "lfu",
        precision: Precision | None = None,
        loose_count: int = 0,
    ) -> None:
        """`store` has these tables in this order. `precision`: of rows in the cache; None: that of the tables.

        `loose_count`: lines behind those of the cache, which it does not know. They take memory when they are used.
        """
        self._lines = {"line_count": line_count, "spare_count": spare_count}
        self._policy = policy
        precision, total = precision or tables[0].precision, line_count + spare_count
        every = total + loose_count
        whole = allocate(replace(tables[0], row_count=every, precision=precision), optimizer, torch.device("cpu"))
        self.row_numbers = zeros((every,), torch.int64, torch.device("cpu"))
        """The number of each row in `memory`."""
        self.memory = [
            replace(whole, spec=replace(spec, row_count=every, precision=precision), row_numbers=self.row_numbers)
            for spec in tables
        ]
        """The memory of each table."""
        self.parts = {"weight": whole.weight, **whole.states}
        """The weights and states of all lines by name, each [lines, …]."""
        self.first_loose = total
        """The first line that the cache does not know."""
        weight = whole.weight.view(torch.uint16) if whole.weight.dtype is torch.bfloat16 else whole.weight
        arrays = {"weight": weight, **{name: state.view(every, -1) for name, state in whole.states.items()}}
        self._arrays = {name: array[:total].numpy() for name, array in arrays.items()}
        # For each table: its first row in the store, and its word in the random numbers of rounding.
        self._first_rows = torch.tensor([store.layout.first_row(spec.name) for spec in tables])
        self._first_numbers = torch.tensor([spec.first_row for spec in tables])
        self.open(store)

    def open(self, store: RowStore) -> None:
        """Takes the rows from now on from `store`, which has the same tables. Close it after this."""
        self.cache = RowCache(store, policy=self._policy, arrays=self._arrays, **self._lines)

    def prefetch(self, tables: Tensor, ids: Tensor, begins: Mapping[int, Tensor] | None = None) -> PrefetchedRows:
        """Starts to fetch rows by table and id, int64 [n] each, and returns at once. Ids are in range.

        `begins`: rows by table, int64 [m], of `RowCache.prefetch`.
        """
        stored = ids + self._first_rows[tables]
        begun = NO_ROWS
        if begins:
            begun = torch.cat([rows + self._first_rows[table] for table, rows in begins.items()]).numpy()
        rows = self.cache.prefetch(stored.numpy(), begun)
        return PrefetchedRows(self, rows, stored, ids + self._first_numbers[tables], begins=len(begun) > 0)

    def note(self, lines: Tensor, numbers: Tensor) -> None:
        """Tells the engine which rows are in `lines`."""
        self.row_numbers[lines] = numbers

    def close(self) -> None:
        self.cache.close()


class PrefetchedRows:
    """Rows that are being fetched. They stay where they are from `lines` to `release`."""

    def __init__(
        self, tables: CachedTables, rows: CachedBatch, stored: Tensor, numbers: Tensor, *, begins: bool
    ) -> None:
        self._tables, self.rows, self._numbers = tables, rows, numbers
        self.stored = stored
        """Int64 [n]: the number of each row in the store."""
        self.begins = begins
        """Whether some of them are not read, because they begin."""

    def wait(self, timeout_s: float) -> None:
        """Waits for the rows; raises `TimeoutError`."""
        self.rows.wait(timeout_s)

    def lines(self, timeout_s: float) -> Tensor:
        """Int64 [n]: the line of each row. Waits for the rows; raises `TimeoutError`."""
        lines = torch.from_numpy(self.rows.wait(timeout_s))
        self._tables.note(lines, self._numbers)
        return lines

    def release(self, *, is_dirty: bool) -> None:
        """Ends the use of the rows. `is_dirty`: they were changed."""
        self.rows.release(is_dirty=is_dirty)


class PrefetchedBatch:
    """A batch whose rows are being fetched."""

    def __init__(self, batch: Batch, rows: PrefetchedRows) -> None:
        self.batch, self.fetched = batch, rows
        self.lines: Batch | None = None

    @property
    def rows(self) -> CachedBatch:
        """The rows in the cache."""
        return self.fetched.rows

    def wait(self, timeout_s: float = 60.0) -> None:
        """Waits for the rows. Raises `TimeoutError`."""
        self.rows.wait(timeout_s)


class TieredTables(Closing):
    """Like `EmbeddingEngine`, but batches are announced one step ahead: `prefetch`, `lookup`, `update`. Not
    thread-safe.

    The results are those of the engine in memory, bit for bit. With a cache of float32 before tables of fp16 or bf16
    results differ: rows are not rounded by each update, but when they are written back (`narrow.widened`).
    """

    def __init__(
        self,
        tables: Sequence[ShardSpec],
        optimizer: OptimizerSpec,
        store: RowStore,
        *,
        line_count: int,
        spare_count: int,
        policy: str = "lfu",
        implementation_name: str = "native",
        rounding: Rounding = Rounding.STOCHASTIC,
        seed: int = 0,
        cache_precision: Precision | None = None,
        step: int = 0,
    ) -> None:
        """`store` has the layout `layout_of(tables, optimizer)`. Ids out of range raise before any row is read.

        `implementation_name`, `rounding` and `seed` as for `EmbeddingEngine`; only implementations for the CPU.
        `cache_precision`: the precision of rows in the cache; None: as in the store. `step`: steps taken before, which
        is the tag of a store that was opened again.
        """
        if implementation_name == "triton":
            raise ConfigError("implementation 'triton' over a cache in memory; allowed: those for the CPU")
        layout = layout_of(tables, optimizer)
        if store.layout != layout:
            raise ConfigError("the store has other tables or parts than layout_of(tables, optimizer)")
        stored = tables[0].precision
        precision = cache_precision or stored
        if precision not in {stored, Precision.FP32}:
            raise ConfigError(f"a cache of {precision.name} before tables of {stored.name}; allowed: the same, or FP32")
        self._widened: RowStore | None = None
        if precision is not stored:
            store = self._widened = widened(store, tables, rounding=rounding, seed=seed, write_backs=step)
        self.specs = tuple(tables)
        self._cached = CachedTables(
            tables,
            optimizer,
            store,
            line_count=line_count,
            spare_count=spare_count,
            policy=policy,
            precision=precision,
        )
        self.cache = self._cached.cache
        self.engine = EmbeddingEngine(
            [part.spec for part in self._cached.memory],
            optimizer,
            implementation_name=implementation_name,
            rounding=rounding,
            seed=seed,
            memory=self._cached.memory,
        )
        self.engine.step = step

    def prefetch(self, batch: Batch) -> PrefetchedBatch:
        """Starts to fetch the rows of `batch`, and returns at once. Raises `IdError`."""
        batch, _ = resolve(batch, self.specs, Bounds.ERROR)
        return PrefetchedBatch(batch, self._cached.prefetch(tables_of(batch), batch.values.to(torch.int64)))

    def lookup(self, ahead: PrefetchedBatch, *, timeout_s: float = 60.0) -> Tensor:
        """Like `EmbeddingEngine.lookup`. Waits for the rows; raises `TimeoutError`."""
        ahead.lines = replace(ahead.batch, values=ahead.fetched.lines(timeout_s))
        return self.engine.lookup(ahead.lines)

    def update(self, ahead: PrefetchedBatch, gradient: Tensor, *, rate: float) -> None:
        """Like `EmbeddingEngine.update`, for the batch of the last `lookup`. Its rows may be evicted afterwards."""
        if ahead.lines is None:
            raise ArgumentError("update of a batch without lookup")
        try:
            self.engine.update(ahead.lines, gradient, rate=rate)
        finally:
            ahead.rows.release(is_dirty=True)

    def release(self, ahead: PrefetchedBatch) -> None:
        """Ends a batch without an update, as after an evaluation."""
        ahead.rows.release(is_dirty=False)

    def flush(self) -> int:
        """Makes all rows durable, with the number of steps as the tag. Returns the generation."""
        return self.cache.flush(self.engine.step)

    def close(self) -> None:
        """Closes the cache. Changed rows that were not flushed are lost."""
        self._cached.close()
        if self._widened is not None:
            self._widened.close()
