# SPDX-License-Identifier: Apache-2.0
"""The memory layout of a batch's columns, and a batch as a view of that memory.

The combined format of Neo (Mudigere et al., ISCA 2022, section 4.4): lengths and values for each table, dense numbers,
labels. Batch `n` is in slot `n % slots`, until it is released.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from sennit.offload.errors import PlanError
from sennit.offload.plan import FeaturePlan

if TYPE_CHECKING:
    from torch import Tensor

CACHE_LINE_BYTES: Final = 64
PAGE_BYTES: Final = 4096
RING_MAX_BYTES: Final = 1 << 32
BATCH_ROWS_MAX: Final = 1 << 20
SLOTS_MAX: Final = 256
# Before it is `struct feed_slot` of ebpf/include/feed_slot.h.
CURSORS_OFFSET: Final = 64
_LABEL = np.dtype("<f4")
_DENSE = np.dtype("<f4")
_LENGTH = np.dtype("<i4")
_VALUE = np.dtype("<i8")


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Offsets in a ring of slots. Columns follow each other with a cache line between them, because at distances of
    powers of two they would all fall into one set of the first-level cache.
    """

    plan: FeaturePlan
    batch_rows: int
    slots: int = 4
    cursors: tuple[int, ...] = field(init=False)
    """Tables with a varying number of ids per row. The program keeps a cursor for each."""

    saved_offset: int = field(init=False)
    """The cursors before the current packet. A malformed packet restores them."""

    labels_offset: int = field(init=False)
    dense_offset: int = field(init=False)
    lengths_offset: int = field(init=False)
    lengths_pitch: int = field(init=False)
    """The distance in bytes between the lengths of two successive tables."""

    values_offsets: tuple[int, ...] = field(init=False)
    slot_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.batch_rows <= BATCH_ROWS_MAX:
            raise PlanError(f"a batch of {self.batch_rows} rows; allowed: 1 to {BATCH_ROWS_MAX}")
        if not (1 <= self.slots <= SLOTS_MAX and self.slots & self.slots - 1 == 0):
            raise PlanError(f"{self.slots} slots; allowed: powers of two from 1 to {SLOTS_MAX}")
        tables = self.plan.tables
        cursors = tuple(number for number, table in enumerate(tables) if table.is_list)
        saved = _next(CURSORS_OFFSET, 8 * len(cursors))
        labels = _next(saved, 8 * len(cursors))
        dense = _next(labels, _LABEL.itemsize * self.batch_rows)
        lengths = _next(dense, _DENSE.itemsize * self.batch_rows * len(self.plan.dense))
        pitch = _next(0, _LENGTH.itemsize * self.batch_rows)
        offsets, at = [], lengths + pitch * len(tables)
        for table in tables:
            offsets.append(at)
            at = _next(at, _VALUE.itemsize * self.batch_rows * table.length)
        for name, value in (
            ("cursors", cursors),
            ("saved_offset", saved),
            ("labels_offset", labels),
            ("dense_offset", dense),
            ("lengths_offset", lengths),
            ("lengths_pitch", pitch),
            ("values_offsets", tuple(offsets)),
            ("slot_bytes", -(-at // PAGE_BYTES) * PAGE_BYTES),
        ):
            object.__setattr__(self, name, value)
        if self.ring_bytes > RING_MAX_BYTES:
            raise PlanError(
                f"{self.slots} slots of {self.batch_rows} rows take {self.ring_bytes} bytes; allowed: "
                f"{RING_MAX_BYTES} (fewer rows or slots, or FirstX)"
            )

    @property
    def ring_bytes(self) -> int:
        return self.slot_bytes * self.slots

    def cursor_values(self, memory: NDArray[np.uint8], slot: int) -> NDArray[np.uint64]:
        at = slot * self.slot_bytes + CURSORS_OFFSET
        return memory[at : at + 8 * len(self.cursors)].view(np.uint64)

    def prepare(self, memory: NDArray[np.uint8]) -> None:
        """Writes the lengths that never change."""
        for slot in range(self.slots):
            lengths = self.lengths(memory, slot)
            for number, table in enumerate(self.plan.tables):
                lengths[number] = 0 if table.is_list else table.length

    def lengths(self, memory: NDArray[np.uint8], slot: int) -> NDArray[np.int32]:
        at, tables = slot * self.slot_bytes + self.lengths_offset, len(self.plan.sparse)
        rows = memory[at : at + self.lengths_pitch * tables].view(_LENGTH)
        return rows.reshape(tables, self.lengths_pitch // _LENGTH.itemsize)[:, : self.batch_rows]

    def batch(self, memory: NDArray[np.uint8], number: int, rows: int, cursors: NDArray[np.uint64]) -> Batch:
        """The columns of a batch with its first rows, and as many ids of each list as its cursor says.

        These are views; nothing is copied.
        """
        slot = number % self.slots
        begin = slot * self.slot_bytes
        counts = [table.length * rows for table in self.plan.tables]
        for cursor, table in enumerate(self.cursors):
            counts[table] = int(cursors[cursor])

        def column(offset: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
            return memory[begin + offset : begin + offset + dtype.itemsize * count].view(dtype)

        width = len(self.plan.dense)
        return Batch(
            number=number,
            labels=column(self.labels_offset, _LABEL, rows),
            dense=column(self.dense_offset, _DENSE, rows * width).reshape(rows, width),
            lengths=self.lengths(memory, slot)[:, :rows],
            values=tuple(
                column(offset, _VALUE, count) for offset, count in zip(self.values_offsets, counts, strict=True)
            ),
        )


def _next(offset: int, size_bytes: int) -> int:
    """The offset of the next column."""
    return (offset + size_bytes + 2 * CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES * CACHE_LINE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """B rows with D dense features and T tables. Views of a slot are valid until the batch is released."""

    number: int
    labels: NDArray[np.float32]
    """[B]"""

    dense: NDArray[np.float32]
    """[B, D]"""

    lengths: NDArray[np.int32]
    """[T, B]: how many ids row b has in table t."""

    values: tuple[NDArray[np.int64], ...]
    """For each table its ids, row after row."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Labels, dense features, lengths and values as torch tensors that share this memory."""
        import torch

        values = tuple(torch.from_numpy(column) for column in self.values)
        return torch.from_numpy(self.labels), torch.from_numpy(self.dense), torch.from_numpy(self.lengths), values
