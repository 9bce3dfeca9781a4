# SPDX-License-Identifier: Apache-2.0
"""Rows by number: on a file or block device that survives crashes, or in DRAM."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sennit.closing import Closing
from sennit.runtime.kernels.spec import Precision, Rounding, ShardSpec
from sennit.runtime.memory import _memory
from sennit.runtime.memory.layout import Arrays, StoreLayout, from_native
from sennit.transport.errors import ArgumentError

ROWS_AT_ONCE = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class FileAccess:
    """How a file is read and written."""

    is_direct: bool = True
    """Past the page cache (O_DIRECT), if the file system can."""

    backend: str = ""
    """`io_uring`, `threads`, or empty for the first of them that works here."""

    depth: int = 128
    """Concurrent transfers with io_uring."""

    threads: int = 4
    """Threads of the other backend."""

    def __post_init__(self) -> None:
        for field, low, high in (("depth", 1, 4096), ("threads", 1, 256)):
            if not low <= getattr(self, field) <= high:
                raise ArgumentError(f"{field} {getattr(self, field)}; allowed: {low} to {high}")

    @property
    def native(self) -> _memory.FileOptions:
        """The options as `_memory` takes them."""
        return _memory.FileOptions(self.is_direct, self.backend, self.depth, self.threads)


def create(
    path: str | os.PathLike[str],
    layout: StoreLayout,
    rows: Callable[[int, int], Mapping[str, NDArray[np.generic]]],
    *,
    access: FileAccess | None = None,
) -> RowStore:
    """Creates the file `path`, or takes over a block device, and fills it: generation 0.

    `rows(first, count)` returns the parts of these rows. Raises `DeviceError` if the file exists or the disk is full. A
    file that could not be filled is removed.
    """
    access = access or FileAccess()
    is_device = Path(path).is_block_device()
    builder = _memory.build_file(os.fspath(path), *layout.native, access.native)
    try:
        fill(builder, layout, rows)
    except BaseException:
        if not is_device:
            Path(path).unlink(missing_ok=True)
        raise
    del builder  # this also releases the lock
    if not is_device:
        _sync_name(Path(path))
    return open_store(path, layout, access=access)


def fill(
    builder: _memory.StoreBuilder, layout: StoreLayout, rows: Callable[[int, int], Mapping[str, NDArray[np.generic]]]
) -> None:
    """Writes all rows through a builder, and finishes the store."""
    widths = [part.row_bytes for part in layout.parts]
    for first in range(0, layout.row_count, ROWS_AT_ONCE):
        count = min(ROWS_AT_ONCE, layout.row_count - first)
        builder.append(layout.as_bytes(rows(first, count), count), widths, count)
    builder.finish()


def open_store(
    path: str | os.PathLike[str], layout: StoreLayout | None = None, *, access: FileAccess | None = None
) -> RowStore:
    """Opens a store at its last complete generation. Raises `ForeignStore` for another layout, or `CorruptStore`."""
    native = _memory.open_file(os.fspath(path), layout.native if layout else None, (access or FileAccess()).native)
    return RowStore(native, layout or from_native(*native.geometry))


def in_dram(layout: StoreLayout, arrays: Mapping[str, NDArray[np.generic]]) -> RowStore:
    """A store in the memory of these arrays, [row_count, columns] each. Nothing survives the process."""
    return RowStore(_memory.dram_store(layout.as_bytes(arrays, layout.row_count), layout.row_count), layout)


class RowStore(Closing):
    """Rows by their number in the store: `layout.first_row(table) + id`. Not thread-safe."""

    def __init__(self, native: _memory.Store, layout: StoreLayout) -> None:
        self.native, self.layout = native, layout

    def read(self, rows: NDArray[np.int64]) -> Arrays:
        """The parts of `rows`, int64 [n], each once."""
        arrays = self.layout.empty(len(rows))
        self.native.read(rows, self.layout.as_bytes(arrays, len(rows)))
        return arrays

    def write(self, rows: NDArray[np.int64], arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Replaces `rows`, int64 [n], each once. They become durable with the next `flush`."""
        self.native.write(rows, self.layout.as_bytes(arrays, len(rows)))

    def flush(self, tag: int = 0) -> int:
        """Makes all writes durable as one generation, and returns its number. `tag` is stored with it."""
        return self.native.flush(tag)

    @property
    def generation(self) -> int:
        """Number of a file's last complete generation."""
        return self.native.generation

    @property
    def tag(self) -> int:
        """The tag that `flush` stored with that generation."""
        return self.native.tag

    @property
    def was_replayed(self) -> bool:
        """Whether opening it had to finish a flush that a crash had interrupted."""
        return self.native.was_replayed

    @property
    def access(self) -> str:
        """How the file is accessed, for display, such as `io_uring, direct`."""
        note = f" ({self.native.note})" if self.native.note else ""
        return f"{self.native.backend}, {'direct' if self.native.is_direct else 'page cache'}{note}"

    @property
    def counters(self) -> dict[str, int]:
        """Counters: transfers and bytes of the file, rows that its log took, and rows moved within it."""
        return self.native.counters

    def close(self) -> None:
        """Closes the store. Writes since the last flush are lost. Close its cache first."""
        self.native.close()


def _sync_name(path: Path) -> None:
    """Makes the file's name survive a power cut."""
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def widened(
    store: RowStore, tables: Sequence[ShardSpec], *, rounding: Rounding, seed: int, write_backs: int = 0
) -> RowStore:
    """A view of `store` whose weights, the first part of its rows, are float32. Close it before `store`.

    A cache before the view has weights of 32 bits, which are rounded once, when a row is written back. Updates that are
    too small for 16 bits add up while a row is in the cache, as in Neo (Mudigere et al., ISCA 2022, section 4.1.4).
    docs/reference/embedding-store.md says when a row is rounded.

    `tables`, in the store's order, have one dim and the precision of the store, fp16 or bf16. Random numbers depend on
    `seed`, each table's name and global rows, and the number of the write-back. `write_backs` counts earlier ones.
    """
    kinds = {(table.dim, table.precision) for table in tables}
    if len(kinds) != 1 or tables[0].precision is Precision.FP32:
        raise ArgumentError(f"tables of {len(kinds)} dims and precisions; allowed: 1, of fp16 or bf16")
    native = _memory.narrow_store(
        store.native,
        [(table.row_count, table.first_row, table.stream) for table in tables],
        tables[0].dim,
        tables[0].precision is Precision.BF16,
        rounding is Rounding.STOCHASTIC,
        seed,
        write_backs,
    )
    first, *others = store.layout.parts
    return RowStore(native, replace(store.layout, parts=(replace(first, dtype="float32"), *others)))
