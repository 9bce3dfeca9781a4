# SPDX-License-Identifier: Apache-2.0
"""The content of a store: tables whose rows all have the same parts, one after another in one row space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sennit.transport.errors import ArgumentError

Arrays = dict[str, NDArray[np.generic]]

DTYPES: Final[dict[str, np.dtype[np.generic]]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
}
"""Part dtypes, and the NumPy dtypes that hold them. NumPy has no bfloat16, so its bits are stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPart:
    """One part of each row: its weights, or one state of its optimizer."""

    name: str
    columns: int
    dtype: str = "float32"
    """One of `DTYPES`."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ArgumentError(f"part {self.name}: dtype {self.dtype!r}; allowed: {', '.join(DTYPES)}")
        if not 1 <= self.columns <= 1 << 18:
            raise ArgumentError(f"part {self.name}: {self.columns} columns; allowed: 1 to {1 << 18}")

    @property
    def row_bytes(self) -> int:
        return self.columns * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreLayout:
    """The tables and parts of one store. Tables with another dim or precision need another store."""

    tables: tuple[tuple[str, int], ...]
    """The name and the rows of each. A table may have no rows."""

    parts: tuple[RowPart, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tables."""
        return tuple(name for name, _ in self.tables)

    @property
    def row_count(self) -> int:
        return sum(rows for _, rows in self.tables)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return sum(part.row_bytes for part in self.parts)

    def first_row(self, name: str) -> int:
        """The store's number of the first row of table `name`. Add ids to it."""
        first = 0
        for table, rows in self.tables:
            if table == name:
                return first
            first += rows
        raise ArgumentError(f"table {name!r}; the store has {', '.join(self.names)}")

    def empty(self, count: int) -> Arrays:
        """Memory for `count` rows, a [count, columns] array for each part, uninitialised."""
        return {part.name: np.empty((count, part.columns), DTYPES[part.dtype]) for part in self.parts}

    def as_bytes(self, arrays: Mapping[str, NDArray[np.generic]], count: int) -> list[NDArray[np.uint8]]:
        """The arrays of all parts as [rows, row_bytes] views. Raises `ArgumentError` if they do not fit."""
        found = []
        for part in self.parts:
            array = arrays.get(part.name)
            if array is None or array.dtype != DTYPES[part.dtype] or array.shape != (count, part.columns):
                has = "missing" if array is None else f"{array.dtype} {list(array.shape)}"
                raise ArgumentError(f"part {part.name}: {has}; expected {part.dtype} [{count}, {part.columns}]")
            if not array.flags.c_contiguous:
                raise ArgumentError(f"part {part.name}: not contiguous")
            found.append(array.view(np.uint8).reshape(count, part.row_bytes))
        return found

    @property
    def native(self) -> tuple[list[tuple[str, int]], list[tuple[str, str, int, int]]]:
        """The layout as `_memory` takes it."""
        return list(self.tables), [(part.name, part.dtype, part.columns, part.row_bytes) for part in self.parts]


def from_native(tables: Sequence[tuple[str, int]], parts: Sequence[tuple[str, str, int, int]]) -> StoreLayout:
    """The layout in the header of a store file."""
    return StoreLayout(
        tables=tuple((name, rows) for name, rows in tables),
        parts=tuple(RowPart(name=name, dtype=dtype, columns=columns) for name, dtype, columns, _ in parts),
    )
