# SPDX-License-Identifier: Apache-2.0
"""The index of a stream: which rows each block of each file has, so that a row is found by its number alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from sennit.offload.columns import INT64_MAX
from sennit.runtime.data.column_types import Found, check_names, moments_in, outside, type_of_all, typed
from sennit.runtime.data.errors import DataError, Incomplete
from sennit.runtime.data.files import DataFile, check_once, find_files
from sennit.runtime.data.packages import require
from sennit.runtime.data.text_format import PLAIN, TextFormat
from sennit.runtime.stream.files import StreamFile
from sennit.runtime.stream.formats import open_files


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row is: a file, a block of the file, and a row of the block. Messages show it as `str()`."""

    file: StreamFile
    block: int
    row: int

    def __str__(self) -> str:
        return f"{self.file.name}: {self.file.where(self.block, self.row)}"

    @property
    def file_name(self) -> str:
        return self.file.name

    def behind(self, rows: int) -> Place:
        """The place so many rows behind, in the same block."""
        return Place(self.file, self.block, self.row + rows)

    def of(self, column: str) -> str:
        """The place of one value."""
        return f"{self.file.name}: column {column}, {self.file.where(self.block, self.row)}"


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamIndex:
    """All rows of a list of files, in the order of the files. It can be pickled. Blocks are numbered through all files.

    `open_index` makes it.
    """

    files: tuple[StreamFile, ...]
    columns: tuple[str, ...]
    """The columns that can be read, the column of time among them."""

    schema: Any
    """A `pyarrow.Schema` of `columns`. What `read` yields has these types, whatever a file has."""

    time_column: str | None

    encodings: Mapping[str, str]
    """Of columns of ids (`Schema.encodings`)."""

    ends: npt.NDArray[np.int64]
    """For each block, the number of rows up to its end."""

    file_ends: npt.NDArray[np.int64]
    """For each file, the number of blocks up to its end."""

    fingerprint: str
    """SHA-256 in hexadecimal over names and types of columns, and rows and digests of files. Neither the names of files
    nor their places count."""

    @property
    def sample_count(self) -> int:
        """The rows of all files."""
        return int(self.ends[-1])

    @property
    def skipped_rows(self) -> int:
        """The broken rows that were left out. `sample_count` does not count them."""
        return sum(file.skipped_rows for file in self.files)

    @property
    def is_sequential(self) -> bool:
        """Whether a file can be read only from its beginning, as compressed text."""
        return any(file.is_sequential for file in self.files)

    @property
    def block_count(self) -> int:
        return len(self.ends)

    def place(self, row: int) -> Place:
        """Where a row of the stream is. Raises IndexError for a row that there is not."""
        if not 0 <= row < self.sample_count:
            raise IndexError(f"row {row}; allowed: [0, {self.sample_count})")
        number = self.block_of(row)
        file, block = self._locate(number)
        return Place(file, block, row - self.begin_of(number))

    def read(self, begin: int, end: int, columns: Sequence[str]) -> Iterator[tuple[Place, Any]]:
        """Yields rows [begin, end) of the stream in order, as `pyarrow.RecordBatch`es, with the place of their first.

        Only the blocks that have these rows are read. Raises DataError for rows that cannot be read, and IndexError for
        rows that there are not.
        """
        if not 0 <= begin <= end <= self.sample_count:
            raise IndexError(f"rows [{begin}, {end}); allowed: in [0, {self.sample_count})")
        while begin < end:
            number = self.block_of(begin)
            first, until = self.begin_of(number), min(end, int(self.ends[number]))
            file, block = self._locate(number)
            usual = None
            for batch in file.read(block, columns, begin=begin - first):
                place = Place(file, block, begin - first)
                piece = batch.slice(0, until - begin)
                # Types of many columns take a while to compare one by one.
                if usual is None or not batch.schema.equals(usual):
                    usual = batch.schema if self._has_types(batch, columns) else None
                yield place, piece if usual is not None else self._typed(piece, columns, place)
                begin += len(piece)
                if begin == until:
                    break
            if begin < until:
                raise DataError(
                    f"{file.name}: {file.where(block)} has {begin - first} rows, but {until - first} are there"
                )

    def time_span(self, block: int) -> tuple[Any, Any] | None:
        """The least and the greatest time of a block, if the format knows them without reading rows.

        They are integers in the unit of the column's type, or floats.
        """
        if self.time_column is None:
            return None
        file, own = self._locate(block)
        if (span := file.span(own, self.time_column)) is None:
            return None
        kinds = [schema.field(self.time_column).type for schema in (file.schema, self.schema)]
        scale = moments_in(*kinds)
        return span[0] * scale, span[1] * scale

    def block_of(self, row: int) -> int:
        """The block of a row, which is never an empty one."""
        return int(np.searchsorted(self.ends, row, side="right"))

    def _locate(self, number: int) -> tuple[StreamFile, int]:
        """A block's file, and its number within the file."""
        file = int(np.searchsorted(self.file_ends, number, side="right"))
        return self.files[file], number - (int(self.file_ends[file - 1]) if file else 0)

    def begin_of(self, number: int) -> int:
        """The first row of a block."""
        return int(self.ends[number - 1]) if number else 0

    def _has_types(self, batch: Any, columns: Sequence[str]) -> bool:
        """Whether a batch of these columns has the types of the stream."""
        return bool(batch.schema.types == [self.schema.field(name).type for name in columns])

    def _typed(self, batch: Any, columns: Sequence[str], place: Place) -> Any:
        arrow = require("pyarrow", package="pyarrow", purpose="reading data files")
        made = [
            typed(name, column, self.schema.field(name).type, self.encodings, place)
            for name, column in zip(columns, batch.columns, strict=True)
        ]
        return arrow.RecordBatch.from_arrays(made, names=list(columns))


def open_index(
    files: Sequence[str | DataFile],
    columns: Sequence[str],
    *,
    time_column: str | None = None,
    text: TextFormat = PLAIN,
    encodings: Mapping[str, str] = MappingProxyType({}),
    beside: Sequence[str] = (),
) -> StreamIndex:
    """Reads what the formats of files say about their rows. Text is read as a whole.

    `files`: those that were found, or paths of some. `text`: how text files are read (`Schema.text_format`).
    `encodings`: of columns of ids (`Schema.encodings`), which decide where files disagree about the sign. `beside`:
    columns that are no part of the fingerprint.

    Raises DataError for files that are no data files, that do not have each column once, or that have it with types
    that do not agree, and where there are no rows at all.
    """
    columns = tuple(dict.fromkeys((*columns, *([] if time_column is None else [time_column]))))
    found = [one for file in files for one in ([file] if isinstance(file, DataFile) else find_files([file]))]
    check_once(found)
    return index_of(
        open_files(found, columns, text, time_column),
        columns,
        time_column=time_column,
        encodings=encodings,
        beside=beside,
    )


def index_of(
    files: tuple[StreamFile, ...],
    columns: tuple[str, ...],
    *,
    time_column: str | None = None,
    encodings: Mapping[str, str] = MappingProxyType({}),
    beside: Sequence[str] = (),
) -> StreamIndex:
    """The index of these files. `columns`: with that of time. `encodings` and `beside`: as `open_index` has them.

    Raises DataError as it does.
    """
    schema = _common_schema(files, columns, encodings)
    rows = [rows for file in files for rows in file.block_rows]
    if not sum(rows):
        raise Incomplete(f"{', '.join(file.name for file in files)}: no rows; allowed: at least one")
    return StreamIndex(
        files=files,
        columns=columns,
        schema=schema,
        time_column=time_column,
        encodings=dict(encodings),
        ends=np.cumsum(rows, dtype=np.int64),
        file_ends=np.cumsum([len(file.block_rows) for file in files], dtype=np.int64),
        fingerprint=_fingerprint(files, [field for field in schema if field.name not in beside]),
    )


def _common_schema(files: Sequence[StreamFile], columns: Sequence[str], encodings: Mapping[str, str]) -> Any:
    arrow = require("pyarrow", package="pyarrow", purpose="reading data files")
    for file in files:
        check_names(file.name, file.schema.names, columns, None if file is files[0] else files[0].name)

    def type_of(name: str) -> Any:
        kinds = [(file.name, file.schema.field(name).type) for file in files]
        return type_of_all(name, kinds, encodings, lambda number: _outside(files[number], name))

    return arrow.schema([(name, type_of(name)) for name in columns])


def _outside(file: StreamFile, column: str) -> Found | None:
    """The first integer of a column as `column_types.outside` has it. Blocks are read that may have one."""
    for block, rows in enumerate(file.block_rows):
        span = file.span(block, column)
        if not rows or (span is not None and span[0] >= 0 and span[1] <= INT64_MAX):
            continue
        row = 0
        for batch in file.read(block, [column]):
            if (found := outside(batch.column(0))) is not None:
                return Place(file, block, row + found[0]), found[1]
            row += len(batch)
    return None


def _fingerprint(files: Sequence[StreamFile], columns: Sequence[Any]) -> str:
    content = {
        "columns": [[field.name, str(field.type)] for field in columns],
        "files": [[file.block_rows, file.digest] for file in files],
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
