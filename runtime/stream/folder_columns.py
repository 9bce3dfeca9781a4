# SPDX-License-Identifier: Apache-2.0
"""Columns whose values are in the names of folders: all rows below `day=2026-01-01/` have that day.

Hive, Spark and `pyarrow.dataset` write them so (`partitioning="hive"`).
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.files import DataFile
from sennit.runtime.data.packages import require
from sennit.runtime.stream.files import PIECE_ROWS, StreamFile

_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
"""What Hive writes for null."""


@dataclass(frozen=True, kw_only=True)
class WithFolders:
    """A `StreamFile` whose rows have further columns, each with one value."""

    file: StreamFile
    values: Mapping[str, Any]
    """By column a `pyarrow.Scalar`. It stands for a column of this name in the file."""

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def block_rows(self) -> tuple[int, ...]:
        return self.file.block_rows

    @property
    def digest(self) -> str:
        told = [self.file.digest, {name: str(value) for name, value in self.values.items()}]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    @property
    def schema(self) -> Any:
        arrow = require("pyarrow", package="pyarrow", purpose="reading data files")
        own = [field for field in self.file.schema if field.name not in self.values]
        return arrow.schema([*own, *(arrow.field(name, value.type) for name, value in self.values.items())])

    @property
    def is_sequential(self) -> bool:
        return self.file.is_sequential

    @property
    def skipped_rows(self) -> int:
        return self.file.skipped_rows

    def where(self, block: int, row: int | None = None) -> str:
        return self.file.where(block, row)

    def read(self, block: int, columns: Sequence[str], *, begin: int = 0) -> Iterator[Any]:
        arrow = require("pyarrow", package="pyarrow", purpose="reading data files")
        own = [name for name in columns if name not in self.values]
        rows = self.block_rows[block] - begin
        pieces: Iterator[tuple[dict[str, Any], int]]
        if own:
            batches = self.file.read(block, own, begin=begin)
            pieces = ((dict(zip(own, batch.columns, strict=True)), len(batch)) for batch in batches)
        else:
            pieces = (({}, min(PIECE_ROWS, rows - first)) for first in range(0, rows, PIECE_ROWS))
        for found, count in pieces:
            made = [found[name] if name in found else arrow.repeat(self.values[name], count) for name in columns]
            yield arrow.RecordBatch.from_arrays(made, names=list(columns))

    def span(self, block: int, column: str) -> tuple[Any, Any] | None:
        if column not in self.values:
            return self.file.span(block, column)
        value = self.values[column]
        if not value.is_valid:
            return None
        number = value.value if hasattr(value, "value") else value.as_py()
        return number, number


def columns_of(file: DataFile, columns: Sequence[str], names: Callable[[], Sequence[str]]) -> dict[str, str | None]:
    """Those of the columns that folders of the file's path name, with their texts; None is null.

    `names`: of the file's own columns. They count more than folders above the one that the user named: a run in a
    folder `seed=3` has nothing to do with a column `seed`.
    """
    below = _texts(file.path.removeprefix(file.base))
    above = _texts(file.base)
    if further := [name for name in columns if name in above and name not in below]:
        own = names()
        below |= {name: above[name] for name in further if name not in own}
    return {name: below[name] for name in columns if name in below}


def _texts(path: str) -> dict[str, str | None]:
    parts = (part.partition("=") for part in path.split("/"))
    texts = {unquote(name): unquote(text) for name, sign, text in parts if sign}
    return {name: None if text == _NULL else text for name, text in texts.items()}


def own_columns(file: DataFile, columns: Sequence[str], names: Callable[[], Sequence[str]]) -> list[str]:
    """Those of the columns that are in the file itself. `names`: as `columns_of` has them."""
    named = columns_of(file, columns, names)
    return [name for name in columns if name not in named]


def with_folders(
    files: Sequence[DataFile],
    opened: Sequence[StreamFile],
    columns: Sequence[str],
    time_column: str | None,
    before: StreamFile | None = None,
) -> tuple[StreamFile, ...]:
    """The files, with the columns that their folders name. `before`: the file that comes before them in the stream.

    A column is of integers if all of its values are, or else text. Of nulls alone it has any type. The column of time
    may have dates, and times of ISO 8601. Raises DataError for text behind a file in which the column has integers.
    """
    arrow = require("pyarrow", package="pyarrow", purpose="reading data files")
    named = [
        columns_of(file, columns, partial(getattr, one.schema, "names"))
        for file, one in zip(files, opened, strict=True)
    ]
    kinds = {
        column: _kind([texts[column] for texts in named if column in texts], is_time=column == time_column)
        for column in {column for texts in named for column in texts}
    }

    if before is not None:
        kinds |= {column: _kind_behind(before, column, kind, files, named) for column, kind in kinds.items()}

    def scalar(text: str | None, kind: Any) -> Any:
        if text is None:
            return arrow.scalar(None, kind)
        if arrow.types.is_timestamp(kind):
            return arrow.scalar(_moment(text), kind)
        return arrow.scalar(int(text) if arrow.types.is_integer(kind) else text, kind)

    return tuple(
        WithFolders(file=file, values={name: scalar(text, kinds[name]) for name, text in texts.items()})
        if texts
        else file
        for file, texts in zip(opened, named, strict=True)
    )


def _kind_behind(
    before: StreamFile, column: str, kind: Any, files: Sequence[DataFile], named: Sequence[Mapping[str, str | None]]
) -> Any:
    """The type of a column behind a file that has it. Text stays text, and integers cannot become it."""
    types = require("pyarrow", package="pyarrow", purpose="reading data files").types
    if column not in before.schema.names:
        return kind
    if types.is_string(known := before.schema.field(column).type) or types.is_null(kind):
        return known
    if types.is_integer(known) and types.is_string(kind):
        number = next(one for one, texts in enumerate(named) if not _is_integer(texts.get(column) or "0"))
        raise DataError(
            f"{files[number]}: column {column} is {named[number][column]!r} by its folder, but {known} in files up to "
            f"{before.name}; allowed in files that come later: integers behind integers"
        )
    return kind


def _kind(texts: Sequence[str | None], *, is_time: bool) -> Any:
    arrow = require("pyarrow", package="pyarrow", purpose="reading data files")
    there = [text for text in texts if text is not None]
    # 20260101 is a day, and not a number of seconds.
    if is_time and all(_moment(text) is not None for text in there):
        return arrow.timestamp("s")
    if not there:
        return arrow.null()
    return arrow.int64() if all(map(_is_integer, there)) else arrow.string()


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii() and -(1 << 63) <= int(text) < 1 << 63


def _moment(text: str) -> datetime.datetime | None:
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is None else found.astimezone(datetime.UTC).replace(tzinfo=None)
