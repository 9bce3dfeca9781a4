# SPDX-License-Identifier: Apache-2.0
"""Reads rows of a stream where a slice's region goes on, without decoding again what was decoded before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from sennit.closing import Closing
from sennit.runtime.stream.index import Place, StreamIndex

Check = Callable[[Place, Any, float | None], float]
"""`check(place, rows, before)` of rows that were decoded. `before`: what it returned for the rows right before them."""


@dataclass(slots=True)
class _Open:
    """A block that is being read."""

    next_row: int
    """The row of the stream that comes next."""

    pieces: Iterator[tuple[Place, Any]]
    left: tuple[Place, Any] | None = None
    """Rows that were decoded, and that nobody has taken yet."""

    checked: float | None = None
    """What the last check returned."""


class Reader(Closing):
    """Rows of a stream, as `pyarrow.RecordBatch`es. Blocks stay open where reading may go on."""

    def __init__(
        self, index: StreamIndex, columns: tuple[str, ...], *, open_max: int, check: Check | None = None
    ) -> None:
        """`open_max`: blocks that stay open, one for each region that is read in turn. `check` has all decoded rows."""
        self._index, self._columns, self._open_max, self._check = index, columns, open_max, check
        self._open: OrderedDict[int, _Open] = OrderedDict()

    def read(self, begin: int, end: int) -> Iterator[tuple[int, Place, Any]]:
        """Yields rows [begin, end), as (first row, its place, rows). Raises DataError for rows that cannot be read."""
        while begin < end:
            block = self._index.block_of(begin)
            until = min(end, int(self._index.ends[block]))
            yield from self._read_block(block, begin, until)
            begin = until

    def _read_block(self, block: int, begin: int, end: int) -> Iterator[tuple[int, Place, Any]]:
        known = self._open.pop(block, None)
        if known is None or known.next_row > begin:
            if known is not None:
                _end(known)
            known = _Open(begin, self._index.read(begin, int(self._index.ends[block]), self._columns))
        while known.next_row < end:
            if known.left is None:
                place, rows = next(known.pieces)
                if self._check is not None:
                    known.checked = self._check(place, rows, known.checked)
            else:
                place, rows = known.left
                known.left = None
            first = known.next_row
            # Rows of other slices lie between two reads of an order of time.
            skipped = min(len(rows), max(0, begin - first))
            taken = min(len(rows), end - first)
            if taken < len(rows):
                known.left = place.behind(taken), rows.slice(taken)
            known.next_row = first + taken
            if skipped < taken:
                yield first + skipped, place.behind(skipped), rows.slice(skipped, taken - skipped)
        if known.next_row < int(self._index.ends[block]):
            self._open[block] = known
        else:
            _end(known)
        while len(self._open) > self._open_max:
            _, oldest = self._open.popitem(last=False)
            _end(oldest)

    def close(self) -> None:
        """Closes all files."""
        while self._open:
            _end(self._open.popitem()[1])


def _end(block: _Open) -> None:
    # A generator holds its file open.
    with closing(block.pieces):  # type: ignore[type-var]
        pass
