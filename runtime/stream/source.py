# SPDX-License-Identifier: Apache-2.0
"""The batches of one rank from a stream. A thread reads and decodes ahead, so memory holds two chunks."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np
import torch

from sennit.offload.ingest.facts import TableFacts
from sennit.offload.sketch import Sketch, SketchShape
from sennit.runtime.data.batch import Batch
from sennit.runtime.data.batch_source import IdCounter
from sennit.runtime.data.preprocessing import Preprocessing, Scale
from sennit.runtime.data.samples import Column, Samples, offsets_of
from sennit.runtime.data.schema import Schema
from sennit.runtime.stream.balance import dealt
from sennit.runtime.stream.chunk_reader import ChunkReader
from sennit.runtime.stream.encoder import Encoder
from sennit.runtime.stream.files import PIECE_ROWS
from sennit.runtime.stream.histories import Histories
from sennit.runtime.stream.index import StreamIndex
from sennit.runtime.stream.order import Chunk, StreamOrder
from sennit.runtime.stream.reader import Check
from sennit.runtime.stream.running import RunningScales

SAMPLED_PLACES: Final = 16
"""From so many blocks the sample to plan by is taken, from each its first piece."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A data set that is read piece by piece."""

    name: str
    index: StreamIndex
    schema: Schema
    check: Check | None = None
    """Called with all rows that are decoded."""

    @property
    def fingerprint(self) -> str:
        """What tells it from others: the rows, and which histories they have. SHA-256 in hexadecimal."""
        if self.schema.history is None:
            return self.index.fingerprint
        return hashlib.sha256(json.dumps([self.index.fingerprint, asdict(self.schema.history)]).encode()).hexdigest()


class StreamSource:
    """A `BatchSource`. All ranks make it with the same stream, order and preprocessing."""

    def __init__(
        self,
        stream: Stream,
        order: StreamOrder,
        preprocessing: Preprocessing,
        *,
        rank: int,
        world_size: int,
        counted: SketchShape | None = None,
    ) -> None:
        """`counted`: counts the ids of this rank's batches like this."""
        self.order = order
        self.preprocessing: Preprocessing | None = preprocessing
        self._running = RunningScales(preprocessing.scales) if stream.schema.running else None
        self.label_names = stream.schema.labels
        self.history = stream.schema.history
        self.dense_count = len(preprocessing.scales)
        self._rank, self._world_size = rank, world_size
        self._read(stream)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sennit-stream")
        self._waiting: dict[object, Future[Samples]] = {}
        self._training_keys: set[object] = set()
        """Those of `_waiting` that are for training."""

        self._evaluates = False
        """Whether the last batch was one of an evaluation."""

        self._spread: Samples | None = None
        self._sample = self._thread.submit(self._training.first_rows, PIECE_ROWS).result()
        sample = self._sample if self._histories is None else self.sample()
        columns = list(zip(sample.columns, preprocessing.encodings, strict=True))
        self.tables = tuple(
            TableFacts(
                name=column.name,
                rows=column.row_count,
                mean_length=column.mean_length,
                is_dynamic=encoding.is_dynamic,
            )
            for column, encoding in columns
            if not encoding.is_value
        )
        self.integer_names = tuple(column.name for column, encoding in columns if encoding.is_value)
        self._numbers_of_tables = [number for number, (_, encoding) in enumerate(columns) if not encoding.is_value]
        self._counter = None if counted is None else IdCounter(self.tables, counted)

    def begin(self, number: int) -> None:
        """Begins to read what the batch needs."""
        self._chunk(number)

    def take(self, number: int) -> Batch:
        """This rank's part of the batch. Waits where reading is slower than training."""
        chunk, samples = self._chunk(number)
        found, places = samples.result(), chunk.places(number)
        if self.order.deals(number):
            assert self._histories is not None
            assert found.rows is not None
            lengths = self._histories.lengths(found.rows.numpy()[places]) + 1
            own = self.order.own_samples(number, self._rank, self._world_size)
            # A slice is what a rank would have if each had one.
            places = places[dealt(lengths, self.order.counts(number, self.order.slices))[own]]
        batch = found.batch(torch.from_numpy(places))
        if self._histories is not None:
            batch = self._with_lists(batch, self._histories)
        if self.integer_names:
            batch = batch.split(self._numbers_of_tables)
        if self._counter is not None:
            self._counter.count(number, batch)
        return batch

    def _with_lists(self, batch: Batch, histories: Histories) -> Batch:
        """The batch with lists in the columns of histories. A chunk, which may be a large window, has none."""
        assert batch.rows is not None
        rows = batch.rows.numpy()
        lists = histories.lists(rows)
        columns = self._encoder.encode_lists(lists)
        if columns is None:
            # Row by row, so that the message has a place.
            found = joined([self._rows_at(row, 1) for row in rows.tolist()]).columns
            columns = {number: column for number, column in enumerate(found) if column.name in lists}
        values = list(torch.split(batch.values, batch.lengths.sum(1).tolist()))
        for number, column in columns.items():
            batch.lengths[number] = column.lengths
            values[number] = column.values.to(torch.int64)
        return replace(batch, values=torch.cat(values))

    def _chunk(self, number: int) -> tuple[Chunk, Future[Samples]]:
        """A batch's chunk, which is being read, as is the next one."""
        wanted = self.order.ahead(number, self._rank, self._world_size)
        # Chunks of an evaluation go as soon as it is over. Those of training outlast an evaluation.
        self._training_keys = {self._key(one) for one, is_training in wanted if is_training} or self._training_keys
        kept = {self._key(one) for one, _ in wanted} | self._training_keys
        for key in [key for key in self._waiting if key not in kept]:
            self._waiting.pop(key).cancel()
        for one, is_training in wanted:
            if self._key(one) not in self._waiting:
                self._waiting[self._key(one)] = self._thread.submit(self._load, one, is_training)
        chunk, is_training = wanted[0]
        if is_training and self._evaluates:
            # What an evaluation has open is as much as training has, and the next one begins elsewhere.
            self._thread.submit(self._evaluation.close)
        self._evaluates = not is_training
        return chunk, self._waiting[self._key(chunk)]

    def _key(self, chunk: Chunk) -> object:
        # Two evaluations of the same rows may have other scales.
        return chunk.key if self._running is None else (chunk.key, chunk.steps)

    def _load(self, chunk: Chunk, is_training: bool) -> Samples:
        reader, running = self._training if is_training else self._evaluation, self._running
        if running is None:
            parts = reader.read(chunk)
        elif chunk.block is None:
            parts = reader.read(chunk, running.after(chunk.steps))
        else:
            parts, numbers = reader.read_block(chunk, running.after(chunk.steps))
            # The thread reads chunks in turn, so it has read the blocks before this one.
            running.follow(chunk.steps, chunk.steps + chunk.batches, numbers)
        return joined(parts) if parts else _none_of(self._sample)

    def scales(self, steps: int) -> tuple[Scale, ...] | None:
        return None if self._running is None else self._running.after(steps)

    def restore_scales(self, steps: int, told: Sequence[Sequence[float]] | None) -> None:
        if self._running is not None:
            self._forget()
            self._running.restore(steps, told)

    def take_over(self, stream: Stream, order: StreamOrder) -> None:
        """Goes on with a stream that has more rows behind those of the present one, while no batch is on its way."""
        self._forget()
        self.order = order
        self._read(stream)

    def _forget(self) -> None:
        """Drops all that was read."""
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()
        self._training_keys.clear()
        # Their thread alone uses the readers.
        self._thread.submit(self._close_readers).result()

    def _read(self, stream: Stream) -> None:
        """Begins to read a stream.

        Blocks stay open where reading will go on: one for each region that this rank reads in turn. In order there is
        one region for training. Other ranks read what lies between its parts, so a rank leaves blocks before their end.
        """
        self._index, self.fingerprint = stream.index, stream.fingerprint
        assert self.preprocessing is not None
        self._encoder = Encoder(stream.schema, self.preprocessing, stream.index.schema)
        self._histories = None if stream.schema.history is None else Histories.open(stream.index, stream.schema)
        regions = -(-self.order.slices // self._world_size)
        open_max = regions if self.order.order == "shuffled" else 2
        self._training, self._evaluation = (
            ChunkReader(stream.index, self._encoder, open_max=blocks, check=stream.check, histories=self._histories)
            for blocks in (open_max, regions)
        )

    def _close_readers(self) -> None:
        self._training.close()
        self._evaluation.close()

    def sample(self) -> Samples:
        """Samples from all of the stream alike. Of one that can only be read from its beginning, its first ones."""
        index = self._index
        if self._spread is None and (self._histories is not None or not index.is_sequential):
            places = 1 if index.is_sequential else SAMPLED_PLACES
            wanted = [number * index.sample_count // places for number in range(places)]
            begins = dict.fromkeys(index.begin_of(index.block_of(row)) for row in wanted)
            # Rows with histories take more memory.
            count = PIECE_ROWS if self._histories is None else max(1, self.order.chunk_rows // places)
            self._spread = joined([self._rows_at(begin, count) for begin in begins])
        return self._sample if self._spread is None else self._spread

    def history_lengths(self, count: int) -> Sequence[int] | None:
        if self._histories is None:
            return None
        # A sample is read from where blocks begin, and the first block begins without histories.
        rows = np.arange(count) * self._index.sample_count // count
        found: list[int] = (self._histories.lengths(rows) + 1).tolist()
        return found

    def _rows_at(self, begin: int, count: int) -> Samples:
        """The samples from a row on, at most `count`."""
        end = min(begin + count, self._index.sample_count)
        place, rows = next(self._index.read(begin, end, self._index.columns))
        if self._histories is not None:
            rows = self._histories.expand(np.arange(begin, begin + len(rows)), rows)
        return self._encoder.encode(rows, place)

    def release(self, number: int) -> None:
        pass

    def close(self, failure: str | None = None, *, goes_on: bool = False) -> None:
        self._training.end()
        self._evaluation.end()
        self._thread.shutdown(cancel_futures=True)
        for future in self._waiting.values():
            with contextlib.suppress(BaseException):
                future.exception(timeout=0)
        self._waiting.clear()
        self._close_readers()

    def counters(self) -> dict[str, int | float]:
        return {}

    def program_ns(self) -> int | None:
        return None

    def sketch(self) -> Sketch | None:
        return None if self._counter is None else self._counter.sketch


def joined(parts: Sequence[Samples]) -> Samples:
    """The samples of all parts, in this order. They have the same features."""
    if len(parts) == 1:
        return parts[0]
    weights = [part.sample_weights for part in parts if part.sample_weights is not None]
    groups = [part.groups for part in parts if part.groups is not None]
    rows = [part.rows for part in parts if part.rows is not None]
    return replace(
        parts[0],
        dense=torch.cat([part.dense for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
        columns=tuple(_joined(columns) for columns in zip(*(part.columns for part in parts), strict=True)),
        sample_weights=torch.cat(weights) if weights else None,
        groups=torch.cat(groups) if groups else None,
        rows=torch.cat(rows) if rows else None,
        are_checked=True,
    )


def _joined(columns: Sequence[Column]) -> Column:
    values = torch.cat([column.values for column in columns])
    if all(column.offsets is None for column in columns):
        return replace(columns[0], values=values)
    lengths = torch.cat([column.lengths for column in columns])
    return replace(columns[0], values=values, offsets=offsets_of(lengths))


def _none_of(samples: Samples) -> Samples:
    """Samples of the same features, of which there is none."""
    return replace(
        samples,
        dense=samples.dense[:0],
        labels=samples.labels[:0],
        columns=tuple(replace(column, values=column.values[:0], offsets=None) for column in samples.columns),
        sample_weights=None if samples.sample_weights is None else samples.sample_weights[:0],
        groups=None if samples.groups is None else samples.groups[:0],
        rows=None if samples.rows is None else samples.rows[:0],
    )
