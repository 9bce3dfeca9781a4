# SPDX-License-Identifier: Apache-2.0
"""Reads and encodes the rows of one chunk after another."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from sennit.closing import Closing
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.data.samples import Samples
from sennit.runtime.stream.encoder import Encoder
from sennit.runtime.stream.index import StreamIndex
from sennit.runtime.stream.order import Chunk
from sennit.runtime.stream.reader import Check, Reader


class ChunkReader(Closing):
    """Chunks of a stream as samples. One thread at a time reads; another one may end it."""

    def __init__(self, index: StreamIndex, encoder: Encoder, *, open_max: int, check: Check | None = None) -> None:
        """`open_max`: blocks that stay open, to read on where reading stopped. `check` gets all decoded rows."""
        self._index, self._encoder = index, encoder
        self._reader = Reader(index, tuple(index.columns), open_max=open_max, check=check)
        self._ended = threading.Event()

    def first_rows(self) -> Samples:
        """The first samples of the stream."""
        _, place, rows = next(self._reader.read(0, int(self._index.ends[self._index.block_of(0)])))
        return self._encoder.encode(rows, place)

    def read(self, chunk: Chunk) -> list[Samples]:
        """The samples of a chunk, in the order of reading. Raises DataError for rows that cannot be read."""
        parts = []
        for interval in chunk.intervals:
            begin, end = chunk.part.rows(interval)
            for first, place, rows in self._reader.read(begin, end):
                if self._ended.is_set():
                    raise DataError("the source of batches is closed")
                is_part = chunk.part.has(np.arange(first, first + len(rows)))
                if is_part.all():
                    parts.append(self._encoder.encode(rows, place))
                elif is_part.any():
                    try:
                        parts.append(self._encoder.encode(rows.filter(_mask(is_part)), place))
                    except DataError:
                        # Rows of the message are those of the file where all are there.
                        self._encoder.encode(rows, place)
                        raise
        return parts

    def end(self) -> None:
        """Ends a `read` in another thread soon, with an error."""
        self._ended.set()

    def close(self) -> None:
        """Closes all files."""
        self._reader.close()


def _mask(chosen: npt.NDArray[np.bool_]) -> Any:
    return require("pyarrow", package="pyarrow", purpose="a stream").array(chosen)
