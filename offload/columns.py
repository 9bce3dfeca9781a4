# SPDX-License-Identifier: Apache-2.0
"""Column types, which check a plan, and column values, which the reference computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sennit.offload.errors import RecordError

INT64_MIN: Final = -(1 << 63)
INT64_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseType:
    """One float32 per row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdsType:
    """`length` int64 ids a row, or a list of at most so many; each from `low` to `high`."""

    length: int
    is_list: bool
    low: int
    high: int


ColumnType = DenseType | IdsType


@dataclass(frozen=True, slots=True)
class Ragged:
    """The ids of several rows: a count for each row, and all ids, row after row."""

    lengths: NDArray[np.int32]
    values: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        """The index of each row's first id."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def keep_rows(self, keep: NDArray[np.bool_]) -> Ragged:
        return Ragged(self.lengths[keep], self.values[np.repeat(keep, self.lengths)])

    @property
    def positions(self) -> NDArray[np.int64]:
        """The position of each value in its row, from 0."""
        return np.arange(len(self.values), dtype=np.int64) - np.repeat(self.starts, self.lengths)


DenseValues = NDArray[np.float32]
ColumnValues = DenseValues | Ragged


def dense_of(columns: Mapping[str, ColumnValues], name: str) -> DenseValues:
    """The dense column of this name. Raises RecordError if there is none."""
    found = columns.get(name)
    if not isinstance(found, np.ndarray):
        raise RecordError(f"there is no dense column {name!r}")
    return np.ascontiguousarray(found, np.float32)


def ids_of(columns: Mapping[str, ColumnValues], name: str) -> Ragged:
    """The ids of this name. Raises RecordError if there are none."""
    found = columns.get(name)
    if not isinstance(found, Ragged):
        raise RecordError(f"there are no ids {name!r}")
    return found
