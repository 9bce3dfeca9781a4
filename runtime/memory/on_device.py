# SPDX-License-Identifier: Apache-2.0
"""Rows of a cache in host memory, copied to a device, where an engine works on them: HBM over DRAM over a file.

A row stays on the device after its batch, until another one needs its line. Rows that a batch has changed are copied to
the host when it ends, so the host's lines are current whenever no batch is in use. What is used often is copied to the
device once. Which rows are there changes no result.

Loose rows are in no store. A line is theirs while a batch has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from sennit.closing import Closing
from sennit.runtime.memory.cache import CachedBatch, RowCache
from sennit.runtime.memory.errors import NoRoom
from sennit.runtime.memory.store import RowStore
from sennit.runtime.memory.tiered import CachedTables, PrefetchedRows

PLACE_BYTES: Final = 4
"""Bytes of host memory for each row of a store: its line on the device."""

NOBODYS: Final = (1 << 48) - 1
"""The number of the row in the last line, which no table has."""


class DeviceTables(Closing):
    """As `CachedTables`, but `memory` is on a device. The cache in host memory is between it and the store."""

    def __init__(self, host: CachedTables, *, line_count: int, device: torch.device) -> None:
        """`line_count`: rows that fit on the device, those of all batches between lookup and update among them."""
        self._host, self._device, self._line_count = host, device, line_count
        first, every = host.memory[0], line_count + 1
        self._there = {
            name: torch.zeros((every, *part.shape[1:]), dtype=part.dtype, device=device)
            for name, part in host.parts.items()
        }
        numbers = torch.full((every,), NOBODYS, dtype=torch.int64, device=device)
        states = {name: self._there[name] for name in first.states}
        self.memory = [
            replace(
                one,
                spec=replace(one.spec, row_count=every),
                weight=self._there["weight"],
                states=states,
                row_numbers=numbers,
            )
            for one in host.memory
        ]
        """The memory of each table."""
        self.row_numbers = torch.full((every,), NOBODYS, dtype=torch.int64)
        """The row in each line, in host memory. `memory` has the same numbers on the device."""
        self.last_line = line_count
        """The line behind those of rows."""

        self._numbers = numbers
        self._line_of_row = torch.full((host.cache.store.layout.row_count,), -1, dtype=torch.int32)
        self._row_of_line = torch.full((line_count,), -1, dtype=torch.int64)
        # The line of the host's cache that a line in use is copied to.
        self._host_line = torch.zeros(line_count, dtype=torch.int64)
        # How many batches use each line. A used line is not given to other rows.
        self._uses = torch.zeros(line_count, dtype=torch.int32)
        self._given_back: list[Tensor] = []
        self._next = 0

    @property
    def cache(self) -> RowCache:
        """The cache in host memory."""
        return self._host.cache

    def open(self, store: RowStore) -> None:
        """`CachedTables.open`. Nothing may be in use."""
        self._host.open(store)
        self._line_of_row.fill_(-1)
        self._row_of_line.fill_(-1)

    def prefetch(self, tables: Tensor, ids: Tensor, begins: Mapping[int, Tensor] | None = None) -> DeviceRows:
        """`CachedTables.prefetch`. Nothing is copied to the device before `lines`."""
        return DeviceRows(self, self._host.prefetch(tables, ids, begins))

    def loose(self, keys: Tensor, numbers: Tensor) -> LooseRows:
        """Rows that are in no store, int64 [n] each: what tells them apart, and the numbers that lines then have."""
        return LooseRows(self, keys, numbers)

    def close(self) -> None:
        self._host.close()

    def take(self, rows: Tensor, host_lines: Tensor) -> tuple[Tensor, Tensor]:
        """Int64 [n]: the line on the device of each of these rows of the store, distinct, which are in `host_lines`.
        And int64 [m]: those of the rows that were not there before.

        They stay there until `give_back`. Raises `NoRoom`; then nothing is in use that was not before.
        """
        lines = self._line_of_row[rows].to(torch.int64)
        is_new = lines < 0
        lines[is_new] = self._claimed(int(is_new.sum()), lines[~is_new], len(rows))
        new, their = lines[is_new], rows[is_new]
        self._row_of_line[new] = their
        self._line_of_row[their] = new.to(torch.int32)
        self._host_line[lines] = host_lines
        self._copy_there(host_lines[is_new], new)
        return lines, their

    def take_loose(self, numbers: Tensor) -> Tensor:
        """Int64 [n]: lines of their own for rows that are in no store, which have these numbers. As `take`."""
        lines = self._claimed(len(numbers), numbers[:0], len(numbers))
        self._number(lines, lines.to(self._device), numbers)
        return lines

    def _claimed(self, count: int, known: Tensor, wanted: int) -> Tensor:
        """Int64 [count]: lines that nobody uses, of no row. They are in use from now on, and those of `known` rows.

        `wanted`: how many rows the batch has, for errors.
        """
        while self._given_back:
            self._uses[self._given_back.pop()] -= 1
        self._uses[known] += 1
        free = self._unused(count)
        if len(free) < count:
            self._uses[known] -= 1
            others = int((self._uses > 0).sum())
            raise NoRoom(
                f"a batch needs {wanted} rows, other batches hold {others}; the device has {self._line_count} "
                "lines; give it more, or fetch smaller batches"
            )
        before = self._row_of_line[free]
        self._line_of_row[before[before >= 0]] = -1
        self._row_of_line[free] = -1
        self._uses[free] += 1
        return free

    def begin(self, lines: Tensor, values: Tensor) -> None:
        """Rows in use begin anew, in the cache in host memory: weights are `values`, states are 0."""
        is_stored = self._row_of_line[lines] >= 0
        there = self._host_line[lines[is_stored]]
        for name, part in self._host.parts.items():
            if name == "weight":
                part.index_copy_(0, there, values[is_stored].to(part.dtype))
            else:
                part.index_fill_(0, there, 0)

    def forget(self, rows: Tensor) -> None:
        """Rows of the store are no longer on the device, unlike what was copied there."""
        self._row_of_line[self._line_of_row[rows].to(torch.int64)] = -1
        self._line_of_row[rows] = -1

    def give_back(self, lines: Tensor, host_lines: Tensor, *, is_dirty: bool) -> None:
        """Ends the use of lines. If they were changed, waits for the device, and copies them to the host."""
        if is_dirty:
            there = lines.to(self._device)
            for name, part in self._host.parts.items():
                part.index_copy_(0, host_lines, self._there[name].index_select(0, there).cpu())
        self.free(lines)

    def free(self, lines: Tensor) -> None:
        """Ends the use of lines."""
        # Batches that nobody refers to end anywhere, also inside of `take`.
        self._given_back.append(lines)

    def _copy_there(self, host_lines: Tensor, lines: Tensor) -> None:
        there = lines.to(self._device)
        for name, part in self._host.parts.items():
            self._there[name].index_copy_(0, there, part.index_select(0, host_lines).to(self._device))
        self._number(lines, there, self._host.row_numbers[host_lines])

    def _number(self, lines: Tensor, there: Tensor, numbers: Tensor) -> None:
        """`there`: `lines` in the memory of the device."""
        self.row_numbers[lines] = numbers
        self._numbers.index_copy_(0, there, numbers.to(self._device))

    def _unused(self, count: int) -> Tensor:
        """Up to `count` lines that no batch uses, in turns: those after the last ones that were taken."""
        found: list[Tensor] = []
        missing, looked_at, place = count, 0, self._next
        while missing > 0 and looked_at < self._line_count:
            end = min(place + max(2 * missing, 4096), self._line_count, place + self._line_count - looked_at)
            free = place + (self._uses[place:end] == 0).nonzero().flatten()
            looked_at += end - place
            place = end % self._line_count
            if len(free) >= missing:
                free = free[:missing]
                place = int(free[-1] + 1) % self._line_count
            found.append(free)
            missing -= len(free)
        self._next = place
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


class DeviceRows:
    """As `PrefetchedRows`, with lines on a device."""

    def __init__(self, tables: DeviceTables, fetched: PrefetchedRows) -> None:
        self._tables, self._fetched = tables, fetched
        self._taken: tuple[Tensor, Tensor] | None = None
        self._new: Tensor | None = None

    @property
    def rows(self) -> CachedBatch:
        """The rows in the cache in host memory."""
        return self._fetched.rows

    def wait(self, timeout_s: float) -> None:
        """`PrefetchedRows.wait`."""
        self._fetched.wait(timeout_s)

    def lines(self, timeout_s: float) -> Tensor:
        """Int64 [n], in host memory: the line of each row on the device. Raises `TimeoutError`, `NoRoom`."""
        host_lines = self._fetched.lines(timeout_s)
        rows, places = torch.unique(self._fetched.stored, return_inverse=True)
        lines_of_rows = torch.empty_like(rows)
        lines_of_rows[places] = host_lines
        lines, self._new = self._tables.take(rows, lines_of_rows)
        self._taken = lines, lines_of_rows
        return lines[places]

    def release(self, *, is_dirty: bool) -> None:
        """Ends the use of the rows. `is_dirty`: they were changed."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self._tables.give_back(*taken, is_dirty=is_dirty)
            if self._fetched.begins and not is_dirty and self._new is not None:
                # Nobody has read the rows that were to begin.
                self._tables.forget(self._new)
        self._fetched.release(is_dirty=is_dirty)


class LooseRows:
    """Rows that are in no store, on a device from `lines` to `release`. They begin with whatever a line has."""

    def __init__(self, tables: DeviceTables, keys: Tensor, numbers: Tensor) -> None:
        self._tables, self._keys, self._numbers = tables, keys, numbers
        self._taken: Tensor | None = None

    def wait(self, timeout_s: float) -> None:
        """Nothing is fetched."""

    def lines(self, timeout_s: float) -> Tensor:
        """Int64 [n], in host memory: the line of each row on the device. Raises `NoRoom`."""
        keys, places = torch.unique(self._keys, return_inverse=True)
        numbers = torch.empty_like(keys)
        numbers[places] = self._numbers
        self._taken = self._tables.take_loose(numbers)
        return self._taken[places]

    def release(self, *, is_dirty: bool) -> None:
        """Ends the use of the rows, which are lost."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self._tables.free(taken)
