# SPDX-License-Identifier: Apache-2.0
"""The history of each row of a stream: what earlier rows of the same user have.

All events lie in *user-major order*: those of a user together, in the order of the stream, each once. A row knows its
place there. So its history is what comes right before that place, and the same in any order of reading.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sennit import cache
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.data.raw_samples import NULL
from sennit.runtime.data.schema import History, Schema
from sennit.runtime.stream.events import EventColumn, Ints, kept, users_of
from sennit.runtime.stream.files import PIECE_ROWS
from sennit.runtime.stream.history_files import HistoryFiles
from sennit.runtime.stream.index import StreamIndex
from sennit.runtime.stream.user_order import PART_BYTES, Arrays, Collected, Spooled, UserOrder, sort

MEMORY_BYTES: Final = 64 << 20
"""Histories of a stream with more bytes than that are in files, of which the ranks of a host have one copy."""

LOOKED_AT: Final = 8
"""At so many places of a stream it is looked whether histories in files are those of it."""

_PURPOSE: Final = "histories"


class Histories:
    """Makes sequences of the columns that a schema's `history` names. `open` makes it."""

    def __init__(self, history: History, order: UserOrder, values: Mapping[str, Any]) -> None:
        """`values`: for each column whose events are codes, what these stand for, as a `pyarrow.Array`."""
        self._history, self._order, self._values = history, order, dict(values)

    @classmethod
    def open(
        cls, index: StreamIndex, schema: Schema, *, memory_bytes: int = MEMORY_BYTES, part_bytes: int = PART_BYTES
    ) -> Histories:
        """The histories of a stream. One pass over it makes them, unless the cache has them.

        Up to `memory_bytes` they are in memory, and otherwise in files of the cache (`sennit.cache`), which are mapped.
        To make these takes some 3 × `part_bytes`, or 3 × the events of the user who has the most. Raises DataError for
        values that the schema does not allow, and DeviceError if the cache cannot be written or is full.
        """
        history = schema.history
        assert history is not None
        fields = {part.name: part for part in schema.sparse}
        columns = [
            EventColumn(fields[name], index.schema.field(name).type) for name in (*history.columns, *history.past)
        ]
        named = None if schema.time is None else schema.time.column
        time = named if named in history.columns else None
        arrays = Arrays({column.name: column.dtype for column in columns}, index.sample_count)
        if arrays.size_bytes <= memory_bytes:
            order = arrays.in_memory()
            sort(index, history.of, columns, Collected(arrays), order, time=time)
            return cls(history, order, {column.name: column.values for column in columns if column.is_coded})
        key = _key(index, schema, time)
        files = HistoryFiles(key, arrays)

        def make(folder: Path) -> None:
            order = files.made(folder)
            parts = math.ceil(index.sample_count * arrays.event.itemsize / part_bytes)
            with Spooled(arrays, folder, parts) as spooled:
                sort(index, history.of, columns, spooled, order, time=time)
            files.finish(folder, order, {column.name: column.values for column in columns if column.is_coded})

        def is_whole(folder: Path) -> bool:
            wrong = files.wrong(folder) or cls(history, *files.read(folder)).wrong(index)
            if wrong:
                warnings.warn(f"{folder}: {wrong}; histories are made anew", RuntimeWarning, stacklevel=2)
            return not wrong

        return cls(history, *files.read(cache.provide(f"histories-{key}", make, is_whole=is_whole)))

    def wrong(self, index: StreamIndex) -> str:
        """Why they cannot be those of a stream with as many rows; empty if what was looked at fits.

        A fingerprint does not show all that was replaced, and they outlive a run.
        """
        try:
            rows = [0] if index.is_sequential else range(0, index.sample_count, -(-index.sample_count // LOOKED_AT))
            for begin in dict.fromkeys(index.begin_of(index.block_of(row)) for row in rows):
                _, batch = next(index.read(begin, min(begin + PIECE_ROWS, index.sample_count), index.columns))
                self.check(np.arange(begin, begin + len(batch)), batch)
        except DataError as error:
            return str(error)
        return ""

    def lengths(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Int64 [n]: how many events the history of each row of the stream has."""
        return np.minimum(self._order.before[rows], self._history.last).astype(np.int64)

    def lists(self, rows: npt.NDArray[np.int64]) -> dict[str, Any]:
        """By column of the history a `pyarrow.LargeListArray` [n]: of earlier rows, the oldest first, and in
        `History.columns` behind them of the row itself. `rows`: int64 [n], their numbers in the stream.
        """
        found: dict[str, Any] = {}
        lengths, places = self.lengths(rows), self._order.places[rows]
        for names, own in ((self._history.columns, 1), (self._history.past, 0)):
            offsets, events = _spans(places - lengths, lengths + own)
            found |= {name: _lists(offsets, self._made(name, self._order.columns[name][events])) for name in names}
        return found

    def expand(self, rows: npt.NDArray[np.int64], batch: Any) -> Any:
        """What these rows have, a `pyarrow.RecordBatch` with the columns of the stream, with `lists` in those of the
        history. Raises DataError as `check` does.
        """
        self.check(rows, batch)
        for name, lists in self.lists(rows).items():
            batch = batch.set_column(batch.schema.names.index(name), name, lists)
        return batch

    def check(self, rows: npt.NDArray[np.int64], batch: Any) -> None:
        """Raises DataError for rows that have changed since the histories were made. Takes what `expand` takes."""
        places = self._order.places[rows]
        users, _ = users_of(batch.column(self._history.of))
        if (strange := np.flatnonzero(users != self._order.users[places])).size:
            raise self._changed(rows[strange[0]], self._history.of)
        for name, numbers in self._order.columns.items():
            found = kept(batch.column(name), is_coded=name in self._values)
            wanted = self._made(name, numbers[places])
            if not found.equals(wanted):
                own = (row for row in range(len(found)) if not found.slice(row, 1).equals(wanted.slice(row, 1)))
                raise self._changed(rows[next(own)], name)

    def _changed(self, row: np.int64, name: str) -> DataError:
        return DataError(
            f"row {row} of the stream: column {name} has another value than when histories were made; allowed: files "
            "that stay as they are"
        )

    def _made(self, name: str, numbers: Ints) -> Any:
        """What events have in a column, as a `pyarrow.Array`."""
        arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
        if name not in self._values:
            return arrow.array(numbers)
        return self._values[name].take(arrow.array(numbers, mask=numbers == NULL))


def _spans(
    begins: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(int64 [n + 1], int64 [lengths.sum()]): where each list begins among all, and the numbers that the lists have."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets, np.repeat(begins - offsets[:-1], lengths) + np.arange(offsets[-1])


def _lists(offsets: npt.NDArray[np.int64], values: Any) -> Any:
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    return arrow.LargeListArray.from_arrays(arrow.array(offsets), values)


def _key(index: StreamIndex, schema: Schema, time: str | None) -> str:
    """What tells these histories from others: the rows, and for what they were checked. It is a part of a file's name.

    `time`: the column of the history that was checked for its order.
    """
    assert schema.history is not None
    parts: list[Any] = [index.fingerprint, schema.history.of, time]
    fields = {part.name: part for part in schema.sparse}
    for name in (*schema.history.columns, *schema.history.past):
        field = fields[name]
        parts.append([name, field.encode == "dictionary", field.rows if field.encode == "id" else None])
    if index.skipped_rows:
        # Which rows are left out depends on what the schema refuses, and the fingerprint has only how many.
        parts.append(repr(schema))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
