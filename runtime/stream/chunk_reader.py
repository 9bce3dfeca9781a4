# SPDX-License-Identifier: Apache-2.0
"""Reads and encodes the rows of one chunk after another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from sennit.closing import Closing
from sennit.runtime.data.arrow_columns import Piece, numbers_of
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.data.preprocessing import Scale
from sennit.runtime.data.samples import Samples
from sennit.runtime.stream.encoder import Encoder
from sennit.runtime.stream.index import Place, StreamIndex
from sennit.runtime.stream.order import Chunk, Interval
from sennit.runtime.stream.reader import Check, Reader

Scales = tuple[Scale, ...]


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

    def read(self, chunk: Chunk, scales: Scales | None = None) -> list[Samples]:
        """The samples of a chunk, in the order of reading. Raises DataError for rows that cannot be read.

        `scales`: those of dense features, if they are not the encoder's.
        """
        encoder = self._encoder if scales is None else self._encoder.scaled(scales)
        parts: list[Samples] = []
        for interval in chunk.intervals:
            for first, place, rows in self._rows(chunk, interval):
                self._encode(chunk, first, place, rows, encoder, parts)
        return parts

    def read_block(self, chunk: Chunk, scales: Scales) -> tuple[list[Samples], npt.NDArray[np.float32]]:
        """The same of a chunk that is part of a block, and the running columns of all samples of the block, [N,
        columns], NaN for null.
        """
        assert chunk.block is not None
        encoder, schema = self._encoder.scaled(scales), self._encoder.schema
        parts: list[Samples] = []
        numbers = []
        own = [chunk.part.rows(interval) for interval in chunk.intervals]
        for first, place, rows in self._rows(chunk, chunk.block):
            behind = first + len(rows)
            is_part = chunk.part.has(np.arange(first, behind))
            found = numbers_of([Piece(rows, place)], schema, schema.running).numpy()
            numbers.append(found if is_part.all() else found[is_part])
            for begin, end in ((max(first, low), min(behind, high)) for low, high in own):
                if begin < end:
                    skipped = begin - first
                    own_rows = rows.slice(skipped, end - begin)
                    self._encode(chunk, begin, place.behind(skipped), own_rows, encoder, parts)
            own = [interval for interval in own if interval[1] > behind]
        return parts, np.concatenate(numbers)

    def _rows(self, chunk: Chunk, interval: Interval) -> Iterator[tuple[int, Place, Any]]:
        for found in self._reader.read(*chunk.part.rows(interval)):
            if self._ended.is_set():
                raise DataError("the source of batches is closed")
            yield found

    def _encode(
        self, chunk: Chunk, first: int, place: Place, rows: Any, encoder: Encoder, parts: list[Samples]
    ) -> None:
        """Adds the samples of those rows that are of the chunk's part. `first`: where the first row is."""
        is_part = chunk.part.has(np.arange(first, first + len(rows)))
        if is_part.all():
            parts.append(encoder.encode(rows, place))
        elif is_part.any():
            try:
                parts.append(encoder.encode(rows.filter(_mask(is_part)), place))
            except DataError:
                # Rows of the message are those of the file where all are there.
                encoder.encode(rows, place)
                raise

    def end(self) -> None:
        """Ends a `read` in another thread soon, with an error."""
        self._ended.set()

    def close(self) -> None:
        """Closes all files."""
        self._reader.close()


def _mask(chosen: npt.NDArray[np.bool_]) -> Any:
    return require("pyarrow", package="pyarrow", purpose="a stream").array(chosen)
