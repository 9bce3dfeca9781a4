# SPDX-License-Identifier: Apache-2.0
"""Shards in files, with caches of their rows in memory. Results are those of shards in memory, bit for bit."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch, Block
from sennit.runtime.kernels.checks import resolve
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.layout import ShardMemory
from sennit.runtime.kernels.optimizers import OptimizerSpec
from sennit.runtime.kernels.spec import Bounds, ShardSpec
from sennit.runtime.memory import store
from sennit.runtime.memory.errors import NoRoom
from sennit.runtime.memory.layout import DTYPES, Arrays, StoreLayout
from sennit.runtime.memory.on_device import DeviceRows, DeviceTables, LooseRows
from sennit.runtime.memory.store import RowStore
from sennit.runtime.memory.tiered import CachedTables, PrefetchedRows, tables_of
from sennit.runtime.sharded.files import TableFiles
from sennit.runtime.sharded.shards import Announced, Held, Shards, changed_of, expected
from sennit.transport.errors import ArgumentError, ConfigError, SennitError
from sennit.transport.sizes import format_size

NAMED: Final = 3
"""Tables that an error names."""

Fill = Callable[[Tensor, int, int], None]
"""(weight, number, first) -> fills rows of shard `number` from `first` on: `weight`, [rows, columns]."""


class StoredBatch(Announced):
    """A batch whose rows are being fetched. If it is forgotten, its rows may be evicted again."""

    def __init__(
        self,
        batch: Batch,
        parts: list[tuple[PrefetchedRows | DeviceRows | LooseRows, Tensor]],
        failure: SennitError | None = None,
    ) -> None:
        """`parts`: the rows in each cache, with int64 [rows], the places of their lookups in the batch.

        `failure`: why parts are missing. `to_lines` raises it, because all ranks can be told then.
        """
        super().__init__(batch)
        self.rows = batch.values
        """The rows, or ids, of the lookups, also when `batch` has their lines."""
        self.is_changed = False
        """Whether rows have got other values before an update."""
        self._parts, self._failure = parts, failure

    def wait(self, timeout_s: float) -> None:
        """Waits for the rows."""
        for rows, _ in self._parts:
            rows.wait(timeout_s)

    def to_lines(self, timeout_s: float, names: Sequence[str]) -> None:
        """Waits for the rows, and puts their lines in place of ids in `batch`. `names`: the tables, for `NoRoom`."""
        if self._failure is not None:
            raise self._failure
        values = self.batch.values.to(torch.int64, copy=True)
        for rows, places in self._parts:
            try:
                values[places] = rows.lines(timeout_s)
            except NoRoom as error:
                raise NoRoom(f"{self._needed(places, names)}: {error}") from error
        self.batch = replace(self.batch, values=values)

    def _needed(self, places: Tensor, names: Sequence[str]) -> str:
        """The tables of these lookups that need the most rows, as text."""
        pairs = torch.stack([tables_of(self.batch)[places], self.batch.values[places].to(torch.int64)])
        counts: Counter[int] = Counter(torch.unique(pairs, dim=1)[0].tolist())
        text = ", ".join(f"{names[table]} ({count} rows)" for table, count in counts.most_common(NAMED))
        return text if len(counts) <= NAMED else f"{text} and {len(counts) - NAMED} more"

    def release(self, *, is_dirty: bool) -> None:
        """Lets the rows be evicted. Another call does nothing."""
        parts, self._parts = self._parts, []
        for rows, _ in parts:
            rows.release(is_dirty=is_dirty or self.is_changed)

    def __del__(self) -> None:
        try:
            self.release(is_dirty=False)
        except SennitError:
            return  # The cache is closed, or broken, and has said so.


class StoredShards(Shards):
    """Shards of one engine. Some are in files, one file for each width and precision; the others are in memory."""

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        layouts: Mapping[StoreLayout, list[int]],
        optimizer: OptimizerSpec,
        files: TableFiles,
        fill: Fill,
        make: Callable[[Sequence[ShardSpec], Sequence[ShardMemory | None]], EmbeddingEngine],
        waiting: Callable[[], AbstractContextManager[None]],
        state: Mapping[str, Tensor] | None,
        tables: Sequence[int],
        spares: Sequence[int] = (),
    ) -> None:
        """`layouts`: the files, each with the numbers of its shards in `specs`. `make` makes the engine. `waiting`
        measures waits for rows. `state`: what is in the files at first, by the names of `expected`; None: `fill` says.
        `spares`: of `Shards`; these rows are in no file. Raises `DeviceError`, `ConfigError`.
        """
        self._files, self._waiting = files, waiting
        self._cached: list[tuple[StoreLayout, CachedTables | DeviceTables, RowStore]] = []
        # Batches may be announced in another thread than the one that looks them up.
        self._announced: weakref.WeakSet[StoredBatch] = weakref.WeakSet()
        self._lock = threading.Lock()
        memory: list[ShardMemory | None] = [None] * len(specs)
        # The cache of each shard, and its number there.
        self._cache_of, self._number_of = torch.full((len(specs),), -1), torch.zeros(len(specs), dtype=torch.int64)
        # Its rows, and the line of the first spare one.
        spares = spares or [0] * len(specs)
        self._counts = torch.tensor([spec.row_count for spec in specs])
        self._first_rows = torch.tensor([spec.first_row for spec in specs])
        is_there = files.device.type != "cpu"
        self._first_spare, self._spares = torch.zeros(len(specs), dtype=torch.int64), tuple(spares)
        for layout, numbers in layouts.items():
            first = self._initial(layout, numbers, fill) if state is None else _given(layout, state)
            rows = files.create(layout, first)
            lines, more = files.lines(layout)
            own = [specs[number] for number in numbers]
            cached: CachedTables | DeviceTables
            cached = CachedTables(
                own,
                optimizer,
                rows,
                line_count=lines,
                spare_count=more,
                policy=files.place.eviction,
                # On a device they take lines of its cache.
                loose_count=0 if is_there else sum(spares[number] for number in numbers),
            )
            next_spare = cached.first_loose
            if is_there:
                cached = DeviceTables(cached, line_count=files.device_lines(layout), device=files.device)
            for place, number in enumerate(numbers):
                memory[number] = cached.memory[place]
                self._cache_of[number], self._number_of[number] = len(self._cached), place
                self._first_spare[number] = next_spare
                next_spare += spares[number]
            self._cached.append((layout, cached, rows))
        own_specs = [
            one.spec if one else replace(spec, row_count=spec.row_count + count)
            for spec, one, count in zip(specs, memory, spares, strict=True)
        ]
        super().__init__(make(own_specs, memory), tables)
        # Directories of dynamic tables are with `DynamicShards`.
        self.specs = tuple(replace(spec, directories=()) for spec in specs)
        self._with_spares = [
            replace(spec, row_count=spec.row_count + count) for spec, count in zip(specs, spares, strict=True)
        ]
        self._in_memory = set(self.engine.names) - self.in_files

    def announce(self, batch: Batch, begins: Mapping[int, Tensor] | None = None) -> StoredBatch:
        batch, _ = resolve(batch, self._with_spares, Bounds.ERROR)
        tables, ids = tables_of(batch), batch.values.to(torch.int64)
        caches, numbers = self._cache_of[tables], self._number_of[tables]
        is_spare, spare = None, ids
        if any(self._spares):
            is_beyond = ids >= self._counts[tables]
            is_spare, caches = is_beyond & (caches >= 0), caches.masked_fill(is_beyond, -1)
            # What tells them apart, and in host memory their lines.
            spare = ids - self._counts[tables] + self._first_spare[tables]
        parts: list[tuple[PrefetchedRows | DeviceRows | LooseRows, Tensor]] = []
        failure = None
        try:
            for place, (_, cached, _) in enumerate(self._cached):
                own = (caches == place).nonzero().flatten()
                begun = {
                    int(self._number_of[number]): rows
                    for number, rows in (begins or {}).items()
                    if self._cache_of[number] == place
                }
                parts.append((cached.prefetch(numbers[own], ids[own], begun), own))
                if is_spare is not None and isinstance(cached, DeviceTables):
                    own = (is_spare & (self._cache_of[tables] == place)).nonzero().flatten()
                    parts.append((cached.loose(spare[own], (ids + self._first_rows[tables])[own]), own))
        except SennitError as error:  # A cache that failed before. Other ranks wait in what follows.
            failure = error
        announced = StoredBatch(batch, parts, failure)
        if is_spare is not None:
            announced.batch = replace(batch, values=torch.where(is_spare, spare, ids))
        with self._lock:
            self._announced.add(announced)
        return announced

    def fetch(self, announced: Announced) -> None:
        assert isinstance(announced, StoredBatch)
        with self._waiting():
            try:
                announced.to_lines(self._files.place.timeout_s, [spec.name for spec in self.specs])
            except NoRoom as error:
                memory = f"rank {self._files.rank} has {format_size(self._files.place.memory_bytes)} of memory for rows"
                raise ConfigError(f"{memory}: {error}") from error

    def ids(self, batch: Batch, block: Block) -> Tensor:
        values, cache = super().ids(batch, block), int(self._cache_of[block.table])
        if cache < 0:
            return values
        spec, first = self.specs[block.table], int(self._first_spare[block.table])
        cached = self._cached[cache][1]
        rows = cached.row_numbers[values] - spec.first_row
        if not self._spares[block.table] or isinstance(cached, DeviceTables):
            return rows
        return torch.where(values < first, rows, values - first + spec.row_count)

    def spare_line(self, number: int) -> int:
        if (cache := int(self._cache_of[number])) < 0:
            return super().spare_line(number)
        if isinstance(cached := self._cached[cache][1], DeviceTables):
            return cached.last_line
        return int(self._first_spare[number]) + self._spares[number] - 1

    def begin_rows(self, announced: Announced, number: int, rows: Tensor, values: Tensor) -> None:
        assert isinstance(announced, StoredBatch)
        announced.is_changed = True
        super().begin_rows(announced, number, rows, values)

    def _begin(self, number: int, lines: Tensor, values: Tensor) -> None:
        super()._begin(number, lines, values)
        if (cache := int(self._cache_of[number])) >= 0 and isinstance(cached := self._cached[cache][1], DeviceTables):
            cached.begin(lines, values)

    def _lines_of(self, announced: Announced, number: int, rows: Tensor) -> Tensor:
        assert isinstance(announced, StoredBatch)
        blocks = [block.lookups for block in announced.batch.blocks() if block.table == number]
        looked_up = torch.cat([announced.rows[lookups] for lookups in blocks]).to(torch.int64)
        lines = torch.cat([announced.batch.values[lookups] for lookups in blocks])
        order, found = rows.argsort(), torch.empty_like(rows)
        rising = rows[order]
        places = torch.searchsorted(rising, looked_up).clamp(max=len(rising) - 1)
        is_there = rising[places] == looked_up
        found[order[places[is_there]]] = lines[is_there]
        return found

    def weights(self, number: int, rows: Tensor) -> Tensor:
        if (cache := int(self._cache_of[number])) < 0:
            return super().weights(number, rows)
        layout, cached, _ = self._cached[cache]
        numbers = rows.numpy() + layout.first_row(self.specs[number].name)
        arrays = cached.cache.read(numbers, is_between=True, timeout_s=self._files.place.timeout_s)
        return _tensor(arrays["weight"], layout)

    def release(self, announced: Announced, *, is_dirty: bool) -> None:
        assert isinstance(announced, StoredBatch)
        with self._lock:
            self._announced.discard(announced)
        # A cache that has failed says so again to the next batch, and then on all ranks.
        with contextlib.suppress(SennitError):
            announced.release(is_dirty=is_dirty)

    def held(self) -> Iterator[Held]:
        """Copies of the shards in files, each made when it is its turn, and the memory of the others."""
        yield from self.in_memory()
        for layout, cached, _ in self._cached:
            for name in layout.names:
                yield self._copy(layout, cached, name)

    def changes(self, changed: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from changed_of(self.in_memory(), changed)
        for layout, cached, _ in self._cached:
            for name in layout.names:
                rows = changed[name].numpy() + layout.first_row(name)
                arrays = cached.cache.read(rows, timeout_s=self._files.place.timeout_s)
                yield from self._tensors(layout, name, arrays).items()

    @property
    def in_files(self) -> frozenset[str]:
        return frozenset(name for layout, _, _ in self._cached for name in layout.names)

    def in_memory(self) -> Iterator[Held]:
        return (held for held in super().held() if held.name in self._in_memory)

    def _tensors(self, layout: StoreLayout, name: str, arrays: Arrays) -> dict[str, Tensor]:
        """Rows of a file as tensors of a shard, by their names in a checkpoint."""
        spec = next(spec for spec in self.specs if spec.name == name)
        found = {}
        for key, wanted in expected(spec, self.engine.optimizer).items():
            array = arrays[key.removeprefix(f"{name}.")]
            rows = _tensor(array, layout) if key.endswith(".weight") else torch.from_numpy(array)
            found[key] = rows.view(-1, *wanted.shape[1:])
        return found

    def check_idle(self) -> None:
        with self._lock:
            count = len(self._announced)
        if count:
            raise ArgumentError(f"{count} batches were sent and are not done; allowed: none, drop them")

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Writes new files, which is cheaper than to fetch each row, change it, and write it back."""
        self.check_idle()
        self.load_memory(state)
        for place, (layout, cached, rows) in enumerate(self._cached):
            cached.close()
            rows.close()
            rows = self._files.create(layout, _given(layout, state))
            cached.open(rows)
            self._cached[place] = layout, cached, rows

    def wait(self) -> None:
        with self._lock:
            waiting = list(self._announced)
        for announced in waiting:
            with contextlib.suppress(SennitError):  # `fetch` raises it.
                announced.wait(self._files.place.timeout_s)

    def counters(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for _, cached, rows in self._cached:
            found.update(cached.cache.counters)
            found.update(rows.counters)
        return dict(found)

    def close(self) -> None:
        for _, cached, rows in self._cached:
            cached.close()
            rows.close()

    def _initial(self, layout: StoreLayout, numbers: Sequence[int], fill: Fill) -> Callable[[int, int], Arrays]:
        """Generates the rows of new shards, in the order of the file."""
        number_of = dict(zip(layout.names, numbers, strict=True))

        def rows(first: int, count: int) -> Arrays:
            arrays = {part.name: np.zeros((count, part.columns), DTYPES[part.dtype]) for part in layout.parts}
            weight, place = _tensor(arrays["weight"], layout), 0
            for name, begin, end in pieces(layout, first, count):
                fill(weight[place : place + end - begin], number_of[name], begin)
                place += end - begin
            return arrays

        return rows

    def _copy(self, layout: StoreLayout, cached: CachedTables | DeviceTables, name: str) -> Held:
        spec = next(spec for spec in self.specs if spec.name == name)
        tensors = {
            key.removeprefix(f"{name}."): self._files.copy(wanted)
            for key, wanted in expected(spec, self.engine.optimizer).items()
        }
        start = layout.first_row(name)
        for first in range(0, spec.row_count, store.ROWS_AT_ONCE):
            end = min(first + store.ROWS_AT_ONCE, spec.row_count)
            arrays = cached.cache.read(np.arange(start + first, start + end), timeout_s=self._files.place.timeout_s)
            for key, rows in self._tensors(layout, name, arrays).items():
                tensors[key.removeprefix(f"{name}.")][first:end] = rows
        return Held(name=name, weight=tensors.pop("weight"), states=tensors)


def pieces(layout: StoreLayout, first: int, count: int) -> list[tuple[str, int, int]]:
    """Splits rows `first` to `first + count` of a store by table: name, first row, end."""
    found, base = [], 0
    for name, rows in layout.tables:
        begin, end = max(first - base, 0), min(first + count - base, rows)
        if begin < end:
            found.append((name, begin, end))
        base += rows
    return found


def _given(layout: StoreLayout, state: Mapping[str, Tensor]) -> Callable[[int, int], Arrays]:
    """The rows of a checkpoint, in the order of the file."""

    def rows(first: int, count: int) -> Arrays:
        arrays = layout.empty(count)
        place = 0
        for name, begin, end in pieces(layout, first, count):
            for part in layout.parts:
                tensor = state[f"{name}.{part.name}"][begin:end].reshape(end - begin, -1).cpu()
                bits = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
                arrays[part.name][place : place + end - begin] = bits.numpy()
            place += end - begin
        return arrays

    return rows


def _tensor(weight: np.ndarray[tuple[int, ...], np.dtype[np.generic]], layout: StoreLayout) -> Tensor:
    """The weight of rows in the type of the table, which shares the memory of the array."""
    found = torch.from_numpy(weight)
    return found.view(torch.bfloat16) if layout.parts[0].dtype == "bfloat16" else found
