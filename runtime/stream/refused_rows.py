# SPDX-License-Identifier: Apache-2.0
"""Leaves out rows whose values the schema refuses, in files of every format, if the user asks for it.

They are found by one pass when the index is made, as broken lines of text are, and the index does not count them. So a
position stays one number, batches are full, and no metric has them. A weight of zero would do neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sennit.runtime.data.arrow_columns import Piece, raw_samples
from sennit.runtime.data.column_types import cast, plain
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.data.schema import Schema
from sennit.runtime.stream.files import StreamFile
from sennit.runtime.stream.index import Place
from sennit.runtime.stream.times import check_times


@dataclass(frozen=True, kw_only=True)
class WithoutRows:
    """A `StreamFile` without some rows of another."""

    file: StreamFile
    refused: tuple[tuple[int, ...], ...]
    """For each block, the rows that are left out, in rising order."""

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def block_rows(self) -> tuple[int, ...]:
        return tuple(rows - len(out) for rows, out in zip(self.file.block_rows, self.refused, strict=True))

    @property
    def digest(self) -> str:
        return self.file.digest

    @property
    def schema(self) -> Any:
        return self.file.schema

    @property
    def is_sequential(self) -> bool:
        return self.file.is_sequential

    @property
    def skipped_rows(self) -> int:
        return self.file.skipped_rows + sum(map(len, self.refused))

    def where(self, block: int, row: int | None = None) -> str:
        return self.file.where(block, None if row is None else self._own(block, row))

    def read(self, block: int, columns: Sequence[str], *, begin: int = 0) -> Iterator[Any]:
        arrow = require("pyarrow", package="pyarrow", purpose="reading data files")
        refused = np.array(self.refused[block], np.int64)
        first = self._own(block, begin)
        for batch in self.file.read(block, columns, begin=first):
            kept = ~np.isin(np.arange(first, first + len(batch)), refused)
            first += len(batch)
            if kept.any():
                yield batch if kept.all() else batch.filter(arrow.array(kept))

    def span(self, block: int, column: str) -> tuple[Any, Any] | None:
        # A row that is left out may have any time.
        return None if self.refused[block] else self.file.span(block, column)

    def _own(self, block: int, row: int) -> int:
        """The number that a row has in the file's block."""
        for out in self.refused[block]:
            row += out <= row
        return row


def without_refused(files: Sequence[StreamFile], schema: Schema) -> tuple[StreamFile, ...]:
    """The files without the rows that the schema refuses. Reads all of them, if `schema` allows any such row.

    Raises DataError for the first such row if there are more than that, together with broken lines.
    """
    limit = schema.text.skip_broken
    if not limit:
        return tuple(files)
    left = limit - sum(file.skipped_rows for file in files)
    made: list[StreamFile] = []
    for file in files:
        found = []
        for block in range(len(file.block_rows)):
            found.append(tuple(_refused_in(file, block, schema, left, limit)))
            left -= len(found[-1])
        made.append(WithoutRows(file=file, refused=tuple(found)) if any(found) else file)
    return tuple(made)


def _refused_in(file: StreamFile, block: int, schema: Schema, left: int, limit: int) -> list[int]:
    """The rows of a block that are refused, of which `left` are allowed."""
    columns = list(dict.fromkeys([*schema.columns, *([] if schema.time is None else [schema.time.column])]))
    found: list[int] = []
    row = 0
    for batch in file.read(block, columns):
        for number, error in _refused(batch, Place(file, block, row), schema):
            found.append(row + number)
            if len(found) > left:
                raise DataError(f"{error} (broken rows that may be left out: {limit}; this is one more)") from None
        row += len(batch)
    return found


def _refused(batch: Any, place: Place, schema: Schema) -> Iterator[tuple[int, DataError]]:
    """The rows of a batch that are refused, and why. What is refused is looked for half by half."""
    try:
        _check(batch, place, schema)
    except DataError as error:
        if len(batch) == 1:
            yield 0, error
            return
        half = len(batch) // 2
        yield from _refused(batch.slice(0, half), place, schema)
        for number, why in _refused(batch.slice(half), place.behind(half), schema):
            yield half + number, why


def _check(batch: Any, place: Place, schema: Schema) -> None:
    arrow = require("pyarrow", package="pyarrow", purpose="reading data files")
    columns = [cast(column, plain(column.type)) for column in batch.columns]
    batch = arrow.RecordBatch.from_arrays(columns, names=batch.schema.names)
    raw_samples(place.file_name, [Piece(batch, place)], schema)
    if schema.time is not None:
        check_times(place, batch, schema.time.column)
