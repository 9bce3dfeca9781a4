# SPDX-License-Identifier: Apache-2.0
"""The column of time of a stream: which row a moment is, which windows there are, and whether time runs forward.

Moments are seconds since 1970-01-01 UTC, whatever unit the column has.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sennit.runtime.data.errors import DataError, Incomplete
from sennit.runtime.data.packages import require
from sennit.runtime.stream.index import Place, StreamIndex
from sennit.runtime.stream.order import Evaluation

UNITS_S: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_DAY_S: Final = 86_400.0
_DURATIONS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": _DAY_S, "w": 7 * _DAY_S}


def parse_duration(text: str) -> float:
    """Seconds of "90s", "30m", "6h", "1d", "2w", or of a number. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip())
    if not found:
        raise ValueError(f"{text!r}; allowed: a duration, like 6h: a number with s, m, h, d or w")
    return float(found[1]) * _DURATIONS_S[found[2] or "s"]


def duration_text(seconds: float) -> str:
    for unit, length in reversed(_DURATIONS_S.items()):
        if seconds and not seconds % length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:g}s"


def parse_moment(text: str) -> float:
    """Seconds since 1970 of an ISO date or date and time (UTC unless it says otherwise), or of a number of seconds.

    Raises ValueError for anything else.
    """
    try:
        return float(text)
    except ValueError:
        pass
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r}; allowed: 2026-11-28, 2026-11-28T06:00, or seconds since 1970") from None
    return (found if found.tzinfo else found.replace(tzinfo=datetime.UTC)).timestamp()


def moment_text(seconds: float) -> str:
    """A date, or a date and time, as `parse_moment` reads it."""
    try:
        found = datetime.datetime.fromtimestamp(seconds, datetime.UTC).replace(tzinfo=None)
    except (OverflowError, ValueError):
        return f"{seconds:g}"
    return found.date().isoformat() if not seconds % _DAY_S else found.isoformat()


class Times:
    """The times of a stream's rows."""

    def __init__(
        self,
        index: StreamIndex,
        *,
        unit: str = "s",
        tolerance_s: float = 0.0,
        row_count: int | None = None,
        before: Times | None = None,
    ) -> None:
        """`unit`: of a column of integers. `tolerance_s`: by how much a row may be earlier than one before it.
        `row_count`: only so many rows are in order, and those of further files need not be; None: all. `before`: of
        these rows when there were fewer of them. What it has found is not looked for again.

        Raises DataError for a column that has no times, and if blocks are known to be out of order.
        """
        assert index.time_column is not None
        self._index, self._column, self._tolerance_s = index, index.time_column, tolerance_s
        self._row_count = index.sample_count if row_count is None else row_count
        self._unit_s = self._unit_of(index.schema.field(self._column).type, unit)
        self._latest_s: dict[tuple[str, int], float] = {} if before is None else before._latest_s
        """By file and block, of the rows that were decoded."""

        self._spans: dict[int, tuple[float, float]] = {} if before is None else before._spans
        """By block, the least and the greatest time."""

        self._windows: dict[float, list[tuple[float, int]]] = {} if before is None else before._windows
        """By length, the windows that were found."""

        self._checked: tuple[int, float] = (0, -math.inf) if before is None else before._checked
        """How many of `_blocks` are known to be in order, and the latest time of them."""

        self._check_blocks()

    def check(self, place: Place, rows: Any, before_s: float | None) -> float:
        """Raises DataError where time runs backwards among rows that were decoded.

        `before_s`: what the call for the rows right before them returned; None: they were not decoded. Returns the
        latest time so far.
        """
        if place.file.name in self._unordered:
            return -math.inf
        key = place.file.name, place.block
        if before_s is None and place.row == 0:
            before_s = self._latest_before(place)
        times = self._seconds(place, rows)
        latest = np.maximum.accumulate(np.concatenate([[-np.inf if before_s is None else before_s], times]))
        late = np.flatnonzero(times < latest[:-1] - self._tolerance_s)
        if len(late):
            row = int(late[0])
            raise self._backwards(place.behind(row), float(times[row]), float(latest[row]))
        self._latest_s[key] = max(float(latest[-1]), self._latest_s.get(key, -np.inf))
        return float(latest[-1])

    def _latest_before(self, place: Place) -> float | None:
        """The latest time of the block before this one, which may be of the file before; None: it was not decoded."""
        if place.block:
            return self._latest_s.get((place.file.name, place.block - 1))
        number = self._index.files.index(place.file)
        if not number:
            return None
        before = self._index.files[number - 1]
        return self._latest_s.get((before.name, len(before.block_rows) - 1))

    def row_at(self, moment_s: float) -> int:
        """The first row whose time is not before the moment; the number of rows if there is none."""
        low, high = 0, len(self._blocks)
        while low < high:
            middle = (low + high) // 2
            if self._span(self._blocks[middle])[1] < moment_s:
                low = middle + 1
            else:
                high = middle
        # A block may end earlier than one before it, by the tolerance.
        for earlier in range(low - 1, -1, -1):
            latest_s = self._span(self._blocks[earlier])[1]
            if latest_s < moment_s - self._tolerance_s:
                break
            low = earlier if latest_s >= moment_s else low
        if low == len(self._blocks):
            return self._row_count
        block = self._blocks[low]
        begin = self._index.begin_of(block)
        times = np.maximum.accumulate(self._times_of(block))
        return begin + int(np.searchsorted(times, moment_s, side="left"))

    @property
    def first_s(self) -> float:
        """The time of the first block's earliest row."""
        return self._span(self._blocks[0])[0]

    @property
    def last_s(self) -> float:
        """The time of the last block's latest row."""
        return self._span(self._blocks[-1])[1]

    def windows(self, length_s: float) -> Sequence[tuple[float, int]]:
        """(moment, first row) of each window of this length that has rows. Windows begin at multiples of it."""
        found = self._windows.setdefault(length_s, [])
        # The last one may have got more rows.
        moment, row = found.pop() if found else (math.floor(self.first_s / length_s) * length_s, 0)
        longest_s = max(abs(self.first_s), abs(self.last_s))
        if longest_s + length_s == longest_s:
            raise DataError(
                f"windows of {duration_text(length_s)}, but times are {longest_s:g} s from 1970; allowed: times whose "
                'unit the schema says, as time = { column = "at", unit = "ns" }'
            )
        while row < self._row_count:
            following = self.row_at(moment + length_s)
            if following > row:
                found.append((moment, row))
                row, moment = following, moment + length_s
            else:
                # Nothing for a long time: on to the window of the next row.
                moment = math.floor(self._time_of(row) / length_s) * length_s
        return found

    @cached_property
    def _unordered(self) -> frozenset[str]:
        """The files that are in no order."""
        if self._row_count == self._index.sample_count:
            return frozenset()
        first = self._index.files.index(self._index.place(self._row_count).file)
        return frozenset(file.name for file in self._index.files[first:])

    @cached_property
    def _blocks(self) -> list[int]:
        """The blocks that have rows."""
        found = np.flatnonzero(np.diff(self._index.ends, prepend=0))
        return [block for block in found.tolist() if self._index.ends[block] <= self._row_count]

    def _time_of(self, row: int) -> float:
        block = self._index.block_of(row)
        begin = self._index.begin_of(block)
        return float(self._times_of(block)[row - begin])

    def _span(self, block: int) -> tuple[float, float]:
        if block not in self._spans:
            known = self._index.time_span(block)
            if known is not None:
                self._spans[block] = known[0] * self._unit_s, known[1] * self._unit_s
            else:
                times = self._times_of(block)
                self._spans[block] = float(times.min()), float(times.max())
        return self._spans[block]

    @lru_cache(maxsize=2)  # noqa: B019 - of few streams, and as long as they are read
    def _times_of(self, block: int) -> npt.NDArray[np.float64]:
        begin = self._index.begin_of(block)
        pieces = self._index.read(begin, int(self._index.ends[block]), [self._column])
        return np.concatenate([self._seconds(place, rows) for place, rows in pieces])

    def _seconds(self, place: Place, rows: Any) -> npt.NDArray[np.float64]:
        check_times(place, rows, self._column)
        column = rows.column(rows.schema.get_field_index(self._column))
        arrow = require("pyarrow", package="pyarrow", purpose="a column of time")
        if not (arrow.types.is_integer(column.type) or arrow.types.is_floating(column.type)):
            wide = arrow.int32() if arrow.types.is_date32(column.type) else arrow.int64()
            column = column.cast(wide)
        return np.asarray(column.to_numpy(zero_copy_only=False)).astype(np.float64) * self._unit_s

    def _unit_of(self, kind: Any, unit: str) -> float:
        types = require("pyarrow", package="pyarrow", purpose="a column of time").types
        if types.is_timestamp(kind):
            return UNITS_S[kind.unit]
        if types.is_date32(kind):
            return _DAY_S
        if types.is_integer(kind) or types.is_floating(kind):
            return UNITS_S[unit]
        raise DataError(
            f"{self._index.files[0].name}: column {self._column} is {kind}; allowed for time: timestamp, date32, "
            "integer, floating-point"
        )

    def _check_blocks(self) -> None:
        """Looks at what formats know. Other blocks are checked as they are read."""
        checked, latest_s = self._checked
        for block in self._blocks[checked:]:
            known = self._index.time_span(block)
            if known is None:
                continue
            first, last = (value * self._unit_s for value in known)
            if first < latest_s - self._tolerance_s:
                raise self._backwards(self._index.place(self._index.begin_of(block)), first, latest_s)
            latest_s = max(latest_s, last)
        self._checked = len(self._blocks), latest_s

    def _backwards(self, place: Place, time_s: float, before_s: float) -> DataError:
        return DataError(
            f"{place.of(self._column)}: {moment_text(time_s)} after {moment_text(before_s)}, "
            f"{before_s - time_s:g} s back; allowed: {self._tolerance_s:g} s (--time-tolerance)"
        )


def check_times(place: Place, rows: Any, name: str) -> None:
    """Raises DataError for the first of these rows whose column `name` has no time: a null, or no finite number."""
    column = rows.column(rows.schema.get_field_index(name))
    compute = require("pyarrow.compute", package="pyarrow", purpose="a column of time")
    arrow = require("pyarrow", package="pyarrow", purpose="a column of time")
    is_floating = arrow.types.is_floating(column.type)
    if not column.null_count and not is_floating:
        return
    is_wrong = column.is_null()
    if is_floating:
        is_wrong = compute.or_(is_wrong, compute.fill_null(compute.invert(compute.is_finite(column)), False))
    wrong = np.flatnonzero(np.asarray(is_wrong.to_numpy(zero_copy_only=False)))
    if len(wrong):
        value = column[row := int(wrong[0])].as_py()
        found = "null" if value is None else value
        raise DataError(f"{place.behind(row).of(name)}: {found}; allowed: a time in every row")


def rolling(times: Times, length_s: float, row_count: int, batch_size: int) -> tuple[Evaluation, ...]:
    """Evaluations of a run that trains a window and evaluates the next one, over the first `row_count` rows.

    A window is trained on up to the batch that reaches its end, and the next one is evaluated from there. So no row is
    evaluated after a step has had it. A window that ends within this batch is not evaluated by itself.
    Raises Incomplete if there is nothing to train on, or nothing to evaluate.
    """
    begins = [window for window in times.windows(length_s) if window[1] < row_count]
    found: list[Evaluation] = []
    for number in range(1, len(begins)):
        moment, row = begins[number]
        steps = -(-row // batch_size)
        end = begins[number + 1][1] if number + 1 < len(begins) else row_count
        if steps * batch_size < end and (not found or steps > found[-1].steps):
            found.append(Evaluation(steps, (steps * batch_size, end), moment_text(moment)))
    if not found:
        raise Incomplete(
            f"windows of {duration_text(length_s)}: {len(begins)} with rows, from {moment_text(times.first_s)} to "
            f"{moment_text(times.last_s)}; allowed: two or more that have more rows than a batch of {batch_size}"
        )
    return tuple(found)
