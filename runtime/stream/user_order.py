# SPDX-License-Identifier: Apache-2.0
"""Sorts the events of a stream by user: those of a user together, in the order of the stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt

from sennit.offload.hashing import splitmix64
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.schema import HISTORY_MAX
from sennit.runtime.stream.events import EventColumn, Ints, users_of
from sennit.runtime.stream.index import StreamIndex

PART_BYTES: Final = 256 << 20
"""Events of so many bytes are sorted at once."""

PARTS_MAX: Final = 500
"""Each part has an open file while events are collected, and processes may often have 1,024."""

_ROW, _USER, _IS_NOBODY = "row of the stream", "user", "is nobody's"


@dataclass(frozen=True, kw_only=True, eq=False)
class UserOrder:
    """The events of N rows in user-major order."""

    places: npt.NDArray[np.int64]
    """[N]: where the event of each row is."""

    before: npt.NDArray[np.int32]
    """[N]: how many events the same user has before it, at most `HISTORY_MAX`."""

    users: npt.NDArray[np.int64]
    """[N]: who has each event (`users_of`). With the columns it tells whether events are those of a stream."""

    columns: Mapping[str, Ints]
    """[N] of each column: what the events have."""

    @property
    def arrays(self) -> dict[str, Ints]:
        own: dict[str, Ints] = {"places": self.places, "before": self.before, "users": self.users}
        return own | {f"column {number}": values for number, values in enumerate(self.columns.values())}


@dataclass(frozen=True)
class Arrays:
    """Which arrays the events of a stream need."""

    columns: Mapping[str, np.dtype[Any]]
    rows: int

    @cached_property
    def event(self) -> np.dtype[Any]:
        """An event, as it is collected."""
        own = [(_ROW, np.int64), (_USER, np.int64), (_IS_NOBODY, np.bool_)]
        return np.dtype(own + [(f"column {name}", dtype) for name, dtype in self.columns.items()])

    @property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """By the names of `UserOrder.arrays`."""
        kinds = {"places": np.int64, "before": np.int32, "users": np.int64}
        own: dict[str, np.dtype[Any]] = {name: np.dtype(kind) for name, kind in kinds.items()}
        return own | {f"column {number}": dtype for number, dtype in enumerate(self.columns.values())}

    @property
    def size_bytes(self) -> int:
        return self.rows * sum(dtype.itemsize for dtype in self.dtypes.values())

    def order(self, arrays: Mapping[str, Any]) -> UserOrder:
        """That of arrays with these names."""
        columns = {name: arrays[f"column {number}"] for number, name in enumerate(self.columns)}
        return UserOrder(columns=columns, **{name: arrays[name] for name in ("places", "before", "users")})

    def in_memory(self) -> UserOrder:
        """An order that is still to be filled."""
        return self.order({name: np.empty(self.rows, dtype) for name, dtype in self.dtypes.items()})


class Events(Protocol):
    """What collects events in the order of the stream, and gives them back in parts. A user is in one part."""

    def add(self, events: npt.NDArray[Any]) -> None: ...

    def parts(self) -> Iterator[npt.NDArray[Any]]: ...


class Collected:
    """Events in memory, all of them one part."""

    def __init__(self, arrays: Arrays) -> None:
        self._pieces = [np.empty(0, arrays.event)]

    def add(self, events: npt.NDArray[Any]) -> None:
        self._pieces.append(events)

    def parts(self) -> Iterator[npt.NDArray[Any]]:
        yield np.concatenate(self._pieces)


class Spooled:
    """Events in files, one for each part. They are removed in the end."""

    def __init__(self, arrays: Arrays, folder: Path, parts: int) -> None:
        self._event, self._exits = arrays.event, ExitStack()
        self._paths = [folder / f".part-{number}" for number in range(min(parts, PARTS_MAX))]
        self._files = [self._exits.enter_context(path.open("wb")) for path in self._paths]

    def add(self, events: npt.NDArray[Any]) -> None:
        hashed = splitmix64(0, np.ascontiguousarray(events[_USER]).view(np.uint64))
        part = (hashed % np.uint64(len(self._files))).astype(np.int64)
        order = np.argsort(part, kind="stable")
        ends = np.cumsum(np.bincount(part, minlength=len(self._files)))
        for file, piece in zip(self._files, np.split(events[order], ends[:-1]), strict=True):
            file.write(piece.tobytes())

    def parts(self) -> Iterator[npt.NDArray[Any]]:
        self._exits.close()
        for path in self._paths:
            yield np.fromfile(path, self._event)
            path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._exits.close()
        for path in self._paths:
            path.unlink(missing_ok=True)


def sort(
    index: StreamIndex,
    of: str,
    columns: Sequence[EventColumn],
    events: Events,
    order: UserOrder,
    *,
    time: str | None = None,
) -> None:
    """Fills `order` with the events of all rows, in one pass over the stream. `of`: the column of users.

    `events` is empty. `time`: the one of `columns` that must not fall from one event of a user to the next. Raises
    DataError for rows that cannot be read, and for values that are not allowed.
    """
    event = Arrays({column.name: column.dtype for column in columns}, 0).event
    row = 0
    for place, batch in index.read(0, index.sample_count, list(dict.fromkeys([of, *(one.name for one in columns)]))):
        found = np.empty(len(batch), event)
        found[_ROW] = np.arange(row, row + len(batch))
        found[_USER], found[_IS_NOBODY] = users_of(batch.column(of))
        for column in columns:
            found[f"column {column.name}"] = column.numbers(batch.column(column.name), place)
        events.add(found)
        row += len(batch)
    begin = 0
    for part in events.parts():
        rows, is_first = _fill(order, begin, part)
        if time is not None:
            _check_times(index, time, order.columns[time][begin : begin + len(part)], rows, is_first)
        begin += len(part)


def _check_times(index: StreamIndex, name: str, times: Ints, rows: Ints, is_first: npt.NDArray[np.bool_]) -> None:
    """Raises DataError if the time of an event is below that of the same user before it. All are in user-major order,
    `rows` says which rows they are, `is_first` which have none before them.
    """
    falls = np.flatnonzero(~is_first[1:] & (times[1:] < times[:-1])) + 1
    if not len(falls):
        return
    # The first in the stream, whatever the parts.
    first = falls[np.argmin(rows[falls])]
    before = index.place(int(rows[first - 1])).of(name)
    raise DataError(
        f"{index.place(int(rows[first])).of(name)}: time {times[first]} after {times[first - 1]} of the same user "
        f"({before}); allowed: histories in order of time, so files sorted by it"
    )


def _fill(order: UserOrder, begin: int, events: npt.NDArray[Any]) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Sorts all events of some users to the places from `begin` on. Returns their rows in the stream, and which of them
    have none before them.
    """
    # Stable, so events of a user stay in the order of the stream.
    sequence = np.lexsort((events[_USER], events[_IS_NOBODY]))
    users, is_nobody, rows = (events[name][sequence] for name in (_USER, _IS_NOBODY, _ROW))
    number = np.arange(len(events))
    is_first = is_nobody.copy()
    is_first[:1] = True
    is_first[1:] |= users[1:] != users[:-1]
    before = number - np.maximum.accumulate(np.where(is_first, number, 0))
    order.places[rows] = begin + number
    order.before[rows] = np.minimum(before, HISTORY_MAX)
    order.users[begin : begin + len(events)] = users
    for name, values in order.columns.items():
        values[begin : begin + len(events)] = events[f"column {name}"][sequence]
    return rows, is_first
