# SPDX-License-Identifier: Apache-2.0
"""`synthetic-stream` as files of a stream: one a day, made when they are read, so they need no disk and no memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.stream.files import PIECE_ROWS
from sennit.runtime.stream.planted import DAY_S, Planted, indices
from sennit.runtime.stream.synthetic_settings import SyntheticStream

BLOCK_ROWS: Final = 1 << 16
TIME: Final = "time"
LABEL: Final = "label"


@dataclass(frozen=True, slots=True)
class SyntheticDay:
    """The samples of one day, a `StreamFile`. Columns: `time` (int64, seconds since the stream begins), `label` (int8),
    `dense_00`, … (float32) and `table_00`, … (int64 ids)."""

    settings: SyntheticStream
    day: int
    name: str = field(init=False)
    block_rows: tuple[int, ...] = field(init=False)
    digest: str = field(init=False)
    schema: Any = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Raises DataError for a day that the stream does not have."""
        if not 0 <= self.day < self.settings.days:
            raise DataError(f"synthetic-stream: day {self.day}; allowed: 0 to {self.settings.days - 1}")
        full, rest = divmod(self.settings.rows_per_day, BLOCK_ROWS)
        digest = hashlib.sha256(f"{self.settings.digest}/{self.day}".encode()).hexdigest()
        for name, value in (
            ("name", f"synthetic-stream/day-{self.day:05d}"),
            ("block_rows", (BLOCK_ROWS,) * full + (rest,) * (rest > 0)),
            ("digest", digest),
            ("schema", schema_of(self.settings)),
        ):
            object.__setattr__(self, name, value)

    @property
    def is_sequential(self) -> bool:
        """Never: any block is made alone."""
        return False

    @property
    def skipped_rows(self) -> int:
        """None is broken."""
        return 0

    def where(self, block: int, row: int | None = None) -> str:
        """A block, or a row of it, in words."""
        return f"block {block}" if row is None else f"block {block}, row {row}"

    def read(self, block: int, columns: Sequence[str], *, begin: int = 0) -> Iterator[Any]:
        """As `StreamFile.read`. Raises DataError for columns that there are not."""
        arrow = require("pyarrow", package="pyarrow", purpose="synthetic-stream")
        for name in columns:
            if name not in self.schema.names:
                raise DataError(f"{self.name}: no column {name!r}; allowed: {', '.join(self.schema.names)}")
        kinds = arrow.schema([self.schema.field(name) for name in columns])
        planted, first = Planted(self.settings), self._first(block)
        for piece in range(first + begin, first + self.block_rows[block], PIECE_ROWS):
            index = indices(piece, min(piece + PIECE_ROWS, first + self.block_rows[block]))
            yield arrow.record_batch([self._column(planted, name, index) for name in columns], schema=kinds)

    def span(self, block: int, column: str) -> tuple[Any, Any] | None:
        """The least and the greatest time of a block. Of other columns nothing is known."""
        if column != TIME:
            return None
        first, rows = self._first(block), self.settings.rows_per_day
        return tuple(  # type: ignore[return-value]
            row // rows * DAY_S + row % rows * DAY_S // rows for row in (first, first + self.block_rows[block] - 1)
        )

    def _first(self, block: int) -> int:
        """The index of a block's first sample."""
        if not 0 <= block < len(self.block_rows):
            raise DataError(f"{self.name}: block {block}; allowed: 0 to {len(self.block_rows) - 1}")
        return self.day * self.settings.rows_per_day + block * BLOCK_ROWS

    def _column(self, planted: Planted, name: str, index: Any) -> Any:
        if name == TIME:
            return planted.times(index)
        if name == LABEL:
            return planted.labels(index).view("int8")
        if name in self.settings.dense_names:
            return planted.dense(self.settings.dense_names.index(name), index)
        return planted.ids(self.settings.table_names.index(name), index)


def days_of(settings: SyntheticStream) -> tuple[SyntheticDay, ...]:
    """The files of the stream, in the order of time."""
    return tuple(SyntheticDay(settings, day) for day in range(settings.days))


def schema_of(settings: SyntheticStream) -> Any:
    """The `pyarrow.Schema` of each day."""
    arrow = require("pyarrow", package="pyarrow", purpose="synthetic-stream")
    return arrow.schema(
        [
            arrow.field(TIME, arrow.int64(), nullable=False),
            arrow.field(LABEL, arrow.int8(), nullable=False),
            *(arrow.field(name, arrow.float32(), nullable=False) for name in settings.dense_names),
            *(arrow.field(name, arrow.int64(), nullable=False) for name in settings.table_names),
        ]
    )
