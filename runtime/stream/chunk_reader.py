# SPDX-License-Identifier: Apache-2.0
"""Reads and encodes the rows of one chunk after another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sennit.closing import Closing
from sennit.runtime.data.arrow_columns import Piece, numbers_of
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.data.preprocessing import Scale
from sennit.runtime.data.samples import Samples
from sennit.runtime.stream.encoder import Encoder
from sennit.runtime.stream.events import groups_of
from sennit.runtime.stream.histories import Histories
from sennit.runtime.stream.index import Place, StreamIndex
from sennit.runtime.stream.order import Chunk, Interval
from sennit.runtime.stream.reader import Check, Reader

Scales = tuple[Scale, ...]


class ChunkReader(Closing):
    """Chunks of a stream as samples. One thread at a time reads; another one may end it."""

    def __init__(
        self,
        index: StreamIndex,
        encoder: Encoder,
        *,
        open_max: int,
        check: Check | None = None,
        histories: Histories | None = None,
    ) -> None:
        """`open_max`: blocks that stay open, to read on where reading stopped. `check` gets all decoded rows.
        `histories`: of the stream, if its schema has any. Rows are only checked against them: samples have of each
        column what a row has itself."""
        self._index, self._encoder, self._histories = index, encoder, histories
        self._reader = Reader(index, tuple(index.columns), open_max=open_max, check=check)
        self._ended = threading.Event()

    def first_rows(self, count: int) -> Samples:
        """The first samples of the stream, at most `count`."""
        end = int(self._index.ends[self._index.block_of(0)])
        first, place, rows = next(self._reader.read(0, min(count, end)))
        return self._encode(self._encoder, rows, np.arange(first, first + len(rows)), place)

    def read(self, chunk: Chunk, scales: Scales | None = None) -> list[Samples]:
        """The samples of a chunk, in the order of reading. Raises DataError for rows that cannot be read.

        `scales`: those of dense features, if they are not the encoder's.
        """
        encoder = self._encoder if scales is None else self._encoder.scaled(scales)
        parts: list[Samples] = []
        for interval in chunk.intervals:
            for first, place, rows in self._rows(chunk, interval):
                self._add(chunk, first, place, rows, encoder, parts)
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
                    self._add(chunk, begin, place.behind(skipped), own_rows, encoder, parts)
            own = [interval for interval in own if interval[1] > behind]
        return parts, np.concatenate(numbers)

    def _rows(self, chunk: Chunk, interval: Interval) -> Iterator[tuple[int, Place, Any]]:
        for found in self._reader.read(*chunk.part.rows(interval)):
            if self._ended.is_set():
                raise DataError("the source of batches is closed")
            yield found

    def _add(self, chunk: Chunk, first: int, place: Place, rows: Any, encoder: Encoder, parts: list[Samples]) -> None:
        """Adds the samples of those rows that are of the chunk's part. `first`: where the first row is."""
        numbers = np.arange(first, first + len(rows))
        is_part = chunk.part.has(numbers)
        if is_part.all():
            parts.append(self._encode(encoder, rows, numbers, place))
        elif is_part.any():
            try:
                parts.append(self._encode(encoder, rows.filter(_mask(is_part)), numbers[is_part], place))
            except DataError:
                # Rows of the message are those of the file where all are there.
                self._encode(encoder, rows, numbers, place)
                raise

    def _encode(self, encoder: Encoder, rows: Any, numbers: npt.NDArray[np.int64], place: Place) -> Samples:
        """`numbers`: which rows of the stream these are."""
        if self._histories is not None:
            self._histories.check(numbers, rows)
        found = encoder.encode(rows, place)
        group = encoder.schema.group
        groups = None if group is None else torch.from_numpy(groups_of(rows.column(group)))
        return replace(found, groups=groups, rows=torch.from_numpy(numbers), are_checked=True)

    def end(self) -> None:
        """Ends a `read` in another thread soon, with an error."""
        self._ended.set()

    def close(self) -> None:
        """Closes all files."""
        self._reader.close()


def _mask(chosen: npt.NDArray[np.bool_]) -> Any:
    return require("pyarrow", package="pyarrow", purpose="a stream").array(chosen)
