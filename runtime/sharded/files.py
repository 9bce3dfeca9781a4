# SPDX-License-Identifier: Apache-2.0
"""The files of a rank's shards: how memory is divided among their caches, where they are, and copies of their rows."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import torch
from torch import Tensor

from sennit.options import Option
from sennit.runtime.kernels.spec import Precision
from sennit.runtime.memory import store
from sennit.runtime.memory.cache import LOCATION_BYTES, NOTE_BYTES, POLICIES, WAYS
from sennit.runtime.memory.layout import Arrays, StoreLayout
from sennit.runtime.memory.on_device import PLACE_BYTES
from sennit.runtime.memory.store import RowStore
from sennit.runtime.memory.tiered import layout_of
from sennit.runtime.sharded.shards import Expected
from sennit.runtime.sharded.tables import Home, Homes, Shard, Table, shard_spec
from sennit.transport.errors import ConfigError, DeviceError
from sennit.transport.sizes import parse_size

SPARE_SHARE: Final = 16
"""One of this many lines is spare. Spare lines take rows whose set has only pinned lines."""


_NUMBER_BYTES: Final = 8
"""Bytes of the number of a row, on a device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableStore:
    """The place of tables that are larger than memory."""

    folder: Annotated[Path, Option(flag="--table-store")]
    """Folder on a disk for embedding tables larger than memory. Each rank has files there, without names, so that a
    killed run leaves nothing."""

    memory_bytes: Annotated[int, Option(flag="--table-memory", parse=parse_size)]
    """With --table-store: memory of each rank for rows, such as 64MiB. It holds cached rows with optimizer states, and
    the bookkeeping of all rows."""

    device_bytes: Annotated[int | None, Option(flag="--table-device-memory", metavar="SIZE", parse=parse_size)] = None
    """With --table-store and --device cuda: each rank's GPU memory for rows; as --table-memory. None: for as many rows
    as the host has."""

    eviction: Annotated[str, Option(flag="--table-eviction", metavar="POLICY", choices=POLICIES)] = "lfu"
    """With --table-store: which rows leave a full cache first. lfu: those in the fewest batches, where old batches
    count less; lru: those that no batch had for longest. It changes no bit."""

    timeout_s: float = 60.0
    """The longest wait for rows."""


class TableFiles:
    """A rank's part of a `TableStore`. A file has the shards of one engine with one width and precision."""

    def __init__(self, place: TableStore, rank: int, layouts: Sequence[StoreLayout], device: torch.device) -> None:
        """`layouts`: one for each file. `device`: where tables are. Raises `ConfigError` if caches do not fit."""
        self.place, self.rank, self.device, self._layouts = place, rank, device, tuple(layouts)
        noted = LOCATION_BYTES + (PLACE_BYTES if device.type != "cpu" else 0)
        self._lines = dict(zip(layouts, divided(place.memory_bytes, layouts, noted), strict=True))

    def lines(self, layout: StoreLayout) -> tuple[int, int]:
        """(lines, spare lines) of the cache before a file."""
        return self._lines[layout]

    def device_lines(self, layout: StoreLayout) -> int:
        """The rows of a file that fit on the device. A file has the same part of its memory as of the host's."""
        lines = {one: sum(counts) for one, counts in self._lines.items()}
        if self.place.device_bytes is None:
            return lines[layout]
        whole = sum(count * (one.row_bytes + _NUMBER_BYTES) for one, count in lines.items())
        found = min(lines[layout], lines[layout] * self.place.device_bytes // whole)
        if not found:
            raise ConfigError(
                f"{self.place.device_bytes} bytes of memory on {self.device} for rows of {len(lines)} files; allowed: "
                f"{max(-(-whole // count) for count in lines.values())} or more"
            )
        return found

    def create(self, layout: StoreLayout, rows: Callable[[int, int], Arrays]) -> RowStore:
        """A file with these rows (`memory.store.create`). It ends with its store, or with the process."""
        path = self.place.folder / f"rows-{self.rank}-{self._layouts.index(layout)}.unfinished"
        remove_left(path)
        made = store.create(path, layout, rows)
        path.unlink()
        return made

    def copy(self, wanted: Expected) -> Tensor:
        """A tensor of zeros in a file without a name. It needs disk, but memory only as page cache.

        Raises `DeviceError` if the disk is full. Otherwise a later write to the tensor would end the process (SIGBUS).
        """
        size_bytes = math.prod(wanted.shape) * wanted.dtype.itemsize
        if not size_bytes:
            return torch.zeros(wanted.shape, dtype=wanted.dtype)
        try:
            with tempfile.TemporaryFile(dir=self.place.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
                memory = mmap.mmap(file.fileno(), size_bytes)
        except OSError as error:
            raise DeviceError(
                f"{self.place.folder}: a copy of a table, {size_bytes} bytes: {error.strerror}"
            ) from error
        return torch.frombuffer(memory, dtype=wanted.dtype).view(wanted.shape)


def layouts_of(tables: Sequence[Table], shards: Sequence[Shard], homes: Homes) -> Mapping[StoreLayout, list[int]]:
    """The files for shards of one engine that are not replicated, each with the numbers of its shards."""
    of_kind: dict[tuple[int, Precision], list[int]] = {}
    specs = [shard_spec(tables, shard) for shard in shards]
    for number, (spec, shard) in enumerate(zip(specs, shards, strict=True)):
        if spec.row_count and homes.of(tables[shard.table]) is Home.FILE:
            of_kind.setdefault((spec.dim, spec.precision), []).append(number)
    return {
        layout_of([specs[number] for number in numbers], tables[shards[numbers[0]].table].optimizer): numbers
        for numbers in of_kind.values()
    }


def divided(
    memory_bytes: int, layouts: Sequence[StoreLayout], noted_bytes: int = LOCATION_BYTES
) -> list[tuple[int, int]]:
    """(lines, spare lines) of the cache before each file.

    Small files get memory for all their rows, as long as that is no more than an equal part. The others get the rest by
    the bytes of their rows. `noted_bytes`: bookkeeping for each row of a file. Raises `ConfigError` if not even the
    fewest lines of each fit.
    """
    fewest = [_bytes_of(layout, WAYS * SPARE_SHARE // (SPARE_SHARE - 1) + 1, noted_bytes) for layout in layouts]
    left = memory_bytes - sum(fewest)
    if left < 0:
        rows = sum(layout.row_count for layout in layouts)
        raise ConfigError(
            f"{memory_bytes} bytes of memory for {rows} rows in {len(layouts)} files; allowed: {sum(fewest)} or more"
        )
    given = dict(enumerate(fewest))
    missing = {
        number: _bytes_of(layout, _most_lines(layout), noted_bytes) - fewest[number]
        for number, layout in enumerate(layouts)
    }
    order = sorted(missing, key=missing.__getitem__)
    while order and missing[order[0]] * len(order) <= left:
        given[order[0]] += missing[order[0]]
        left -= missing[order.pop(0)]
    weights = {number: layouts[number].row_count * layouts[number].row_bytes for number in order}
    for number, weight in weights.items():
        given[number] += left * weight // sum(weights.values())
    return [_lines_in(given[number], layout, noted_bytes) for number, layout in enumerate(layouts)]


def _most_lines(layout: StoreLayout) -> int:
    """The most lines that are of use: twice the rows."""
    return max(2 * layout.row_count, 2 * WAYS)


def _bytes_of(layout: StoreLayout, lines: int, noted_bytes: int) -> int:
    """The memory of a cache with this many lines."""
    return layout.row_count * noted_bytes + lines * (layout.row_bytes + NOTE_BYTES)


def _lines_in(memory_bytes: int, layout: StoreLayout, noted_bytes: int) -> tuple[int, int]:
    left = memory_bytes - _bytes_of(layout, 0, noted_bytes)
    total = min(left // (layout.row_bytes + NOTE_BYTES), _most_lines(layout))
    line_count = total * (SPARE_SHARE - 1) // SPARE_SHARE // WAYS * WAYS
    return line_count, total - line_count


def remove_left(path: Path) -> None:
    """Removes a file that a run left because it was killed while it made it. Raises `DeviceError` if it is in use."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise DeviceError(f"{path}: of another run: {error.strerror}") from error
