# SPDX-License-Identifier: Apache-2.0
"""This rank's embedding tables in a file, with a cache of their rows in memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from sennit.offload.ingest.facts import TableFacts
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.checks import IdError
from sennit.runtime.kernels.optimizers import OptimizerSpec
from sennit.runtime.memory import store
from sennit.runtime.memory.cache import LOCATION_BYTES, NOTE_BYTES, WAYS
from sennit.runtime.memory.layout import DTYPES, Arrays, StoreLayout
from sennit.runtime.memory.tiered import PrefetchedBatch, TieredTables, layout_of
from sennit.runtime.model.embedding import ROW_WISE_ADAGRAD, fill, stream, table_specs
from sennit.runtime.sharded.files import TableStore as TableStore
from sennit.runtime.sharded.phases import PhaseClock
from sennit.transport.errors import ArgumentError, ConfigError, DeviceError
from sennit.transport.sizes import format_size

SPARE_SHARE: Final = 16
"""One of this many lines is spare. Spare lines take rows whose set has only pinned lines."""

STATE: Final = {"table": "weight", "row_state": "sum"}
"""The names in a checkpoint of the parts of a row."""

Rows = Callable[[int, int], Arrays]
"""(first, count) -> the parts of these rows. Called for rising rows."""


class StoredTables:
    """`EmbeddingTables` in a file that lasts as long as the run. Only checkpoints outlive it."""

    batches_ahead = 1

    def __init__(
        self,
        tables: Sequence[TableFacts],
        home: TableStore,
        *,
        rank: int,
        dim: int,
        seed: int,
        clock: PhaseClock,
        timeout_s: float,
        optimizer: OptimizerSpec = ROW_WISE_ADAGRAD,
    ) -> None:
        """Makes the file with initial rows. Raises `DeviceError`, `ForeignStore`, `ConfigError`."""
        self._home, self._clock, self._timeout_s, self._optimizer = home, clock, timeout_s, optimizer
        self._specs = table_specs(tables, dim=dim)
        self._layout = layout_of(self._specs, optimizer)
        self._line_count, self._spare_count = lines_in(home.memory_bytes, self._layout)
        self._path = home.folder / f"rows-{rank}"
        if self._path.exists():
            # A killed run left it. Anything else raises here: ForeignStore, or DeviceError if it is in use.
            store.open_store(self._path, self._layout).close()
            self._path.unlink()
        self._open(InitialRows(tables, self._layout, seed=seed))

    def _open(self, rows: Rows) -> None:
        self._store = store.create(self._path, self._layout, rows)
        self._tiers = TieredTables(
            self._specs, self._optimizer, self._store, line_count=self._line_count, spare_count=self._spare_count
        )

    @property
    def step(self) -> int:
        return self._tiers.engine.step

    @step.setter
    def step(self, step: int) -> None:
        self._tiers.engine.step = step

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self._specs)

    def announce(self, batch: Batch) -> PrefetchedBatch:
        with self._explained():
            return self._tiers.prefetch(batch)

    def lookup(self, announced: PrefetchedBatch) -> Tensor:
        with self._clock.phase("wait for rows"), self._explained():
            announced.wait(self._timeout_s)
        return self._tiers.lookup(announced)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Makes a `ConfigError` of the error for a batch that does not fit the cache. It may come one call later."""
        try:
            yield
        except IdError:
            raise
        except ArgumentError as error:
            raise ConfigError(f"{format_size(self._home.memory_bytes)} of memory for tables: {error}") from error

    def update(self, announced: PrefetchedBatch, gradient: Tensor, *, rate: float) -> None:
        with self._explained():
            self._tiers.update(announced, gradient, rate=rate)

    def release(self, announced: PrefetchedBatch) -> None:
        with self._explained():
            self._tiers.release(announced)

    def weights(self) -> dict[str, Tensor]:
        """Copies the weights into mapped files without a name: they need disk, and memory only as page cache."""
        return self._copies({"table": "weight"})

    def state(self) -> dict[str, Tensor]:
        return self._copies(STATE)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Writes a new file, which is cheaper than to fetch each row, change it, and write it back."""
        self.close()
        self._open(
            lambda first, count: {
                part: np.concatenate(
                    [
                        state[f"{kind}.{name}"][begin:end].reshape(end - begin, -1).numpy()
                        for name, begin, end in pieces(self._layout, first, count)
                    ]
                )
                for kind, part in STATE.items()
            }
        )

    def counters(self) -> dict[str, int]:
        return self._tiers.cache.counters | self._store.counters

    def close(self) -> None:
        """Removes the file."""
        self._tiers.close()
        self._store.close()
        self._path.unlink(missing_ok=True)

    def _copies(self, kinds: Mapping[str, str]) -> dict[str, Tensor]:
        columns = {part.name: part.columns for part in self._layout.parts}
        copies = {}
        for table in self._layout.tables:
            for kind, part in kinds.items():
                shape = (table.row_count, *([columns[part]] if part == "weight" else []))
                copies[f"{kind}.{table.name}"] = on_disk(shape, self._home.folder)
        for first in range(0, self._layout.row_count, store.ROWS_AT_ONCE):
            count = min(store.ROWS_AT_ONCE, self._layout.row_count - first)
            arrays = self._tiers.cache.read(np.arange(first, first + count), timeout_s=self._timeout_s)
            place = 0
            for name, begin, end in pieces(self._layout, first, count):
                for kind, part in kinds.items():
                    rows = torch.from_numpy(arrays[part][place : place + end - begin])
                    copies[f"{kind}.{name}"][begin:end] = rows.view(copies[f"{kind}.{name}"][begin:end].shape)
                place += end - begin
        return copies


class InitialRows:
    """Generates the rows of new tables in the order of the store, with the same bits as `embedding_engine`."""

    def __init__(self, tables: Sequence[TableFacts], layout: StoreLayout, *, seed: int) -> None:
        self._tables = {table.name: (table, stream(table, seed)) for table in tables}
        self._layout = layout

    def __call__(self, first: int, count: int) -> Arrays:
        arrays = {part.name: np.zeros((count, part.columns), DTYPES[part.dtype]) for part in self._layout.parts}
        weight, place = torch.from_numpy(arrays["weight"]), 0
        for name, begin, end in pieces(self._layout, first, count):
            fill(weight[place : place + end - begin], *self._tables[name])
            place += end - begin
        return arrays


def lines_in(memory_bytes: int, layout: StoreLayout) -> tuple[int, int]:
    """(lines, spare lines) of a cache of this size. Raises `ConfigError` if not even the fewest fit."""
    fixed_bytes, line_bytes = layout.row_count * LOCATION_BYTES, layout.row_bytes + NOTE_BYTES
    # More lines than twice the rows are useless.
    total = min((memory_bytes - fixed_bytes) // line_bytes, max(2 * layout.row_count, 2 * WAYS))
    line_count = total * (SPARE_SHARE - 1) // SPARE_SHARE // WAYS * WAYS
    if line_count < WAYS:
        least = fixed_bytes + (WAYS * SPARE_SHARE // (SPARE_SHARE - 1) + 1) * line_bytes
        raise ConfigError(
            f"{memory_bytes} bytes of memory for {layout.row_count} rows of {layout.row_bytes} bytes; "
            f"allowed: {least} or more"
        )
    return line_count, total - line_count


def pieces(layout: StoreLayout, first: int, count: int) -> list[tuple[str, int, int]]:
    """Splits rows `first` to `first + count` of a store by table: name, first row, end."""
    found, base = [], 0
    for table in layout.tables:
        begin, end = max(first - base, 0), min(first + count - base, table.row_count)
        if begin < end:
            found.append((table.name, begin, end))
        base += table.row_count
    return found


def on_disk(shape: Sequence[int], folder: Path) -> Tensor:
    """Float32 zeros in a file without a name.

    If the disk is full, raises `DeviceError` now instead of a signal later.
    """
    size_bytes = 4 * int(np.prod(shape))
    if not size_bytes:
        return torch.zeros(*shape)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            memory = mmap.mmap(file.fileno(), size_bytes)
    except OSError as error:
        raise DeviceError(f"{folder}: a copy of a table, {size_bytes} bytes: {error.strerror}") from error
    return torch.frombuffer(memory, dtype=torch.float32).view(*shape)
