# SPDX-License-Identifier: Apache-2.0
"""Chunks of a feeder's stream as records in memory, which a thread makes ahead of those who ask for them.

A file is decoded once, however many workers send from it. The chunk that was asked for, the next one and the one before
are in memory, of training and of evaluation, and those that somebody still sends from. So memory does not depend on the
size of the data.
"""

from __future__ import annotations

import contextlib
import socket
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from sennit.closing import Closing
from sennit.offload.ingest.trainer_search import FeedError
from sennit.offload.record_store import RecordStore
from sennit.runtime.ingest.feed_stream import FeedStream
from sennit.runtime.stream.chunk_reader import ChunkReader
from sennit.runtime.stream.encoder import Encoder
from sennit.runtime.stream.order import Chunk
from sennit.runtime.stream.source import joined

# The last one, since ranks may be some batches apart; that in use; the next one.
KEPT: Final = 3


@dataclass(slots=True)
class _Kept:
    """A chunk that is made, or will be."""

    store: Future[RecordStore]
    is_training: bool
    asking: set[int] = field(default_factory=set)
    holders: set[int] = field(default_factory=set)


class ChunkRing(Closing):
    """Holders are numbered by the caller. All methods are for one thread."""

    def __init__(self, stream: FeedStream) -> None:
        self.peak_bytes = 0
        """The most bytes of records that were in memory at once."""

        self._order, self._layout = stream.order, stream.layout
        encoder = Encoder(stream.stream.schema, stream.preprocessing, stream.stream.index.schema, hashes=False)
        self._reader = ChunkReader(
            stream.stream.index, encoder, open_max=2 * stream.order.slices, check=stream.stream.check
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sennit-chunks")
        self._chunks: OrderedDict[Hashable, _Kept] = OrderedDict()
        """By their last use."""

        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)

    def ask(self, batch: int, holder: int) -> None:
        """The holder wants the chunk of a batch. `ready` gives it."""
        asked, *_ = [self._begin(chunk, is_training) for chunk, is_training in self._order.ahead(batch, 0, 1)]
        asked.asking.add(holder)
        self._call()
        self._evict()

    def ready(self) -> Iterator[tuple[int, Hashable, RecordStore]]:
        """Gives chunks that are made to those who asked for them: (holder, key of the chunk, its records).

        Raises DataError for rows that cannot be read, and FeedError for too little memory.
        """
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        for key, kept in self._chunks.items():
            if not kept.asking or not kept.store.done():
                continue
            store = kept.store.result()
            while kept.asking:
                holder = kept.asking.pop()
                kept.holders.add(holder)
                yield holder, key, store
        sizes = [kept.store.result().extent.size_bytes for kept in self._chunks.values() if _is_made(kept)]
        self.peak_bytes = max(self.peak_bytes, sum(sizes))

    def release(self, key: Hashable, holder: int) -> None:
        """The holder needs the chunk no more."""
        if key in self._chunks:
            self._chunks[key].holders.discard(holder)
            self._evict()

    def leave(self, holder: int) -> None:
        """The holder is gone."""
        for kept in self._chunks.values():
            kept.holders.discard(holder)
            kept.asking.discard(holder)
        self._evict()

    def fileno(self) -> int:
        """Can be read when `ready` may have something."""
        return self._woken.fileno()

    def close(self) -> None:
        self._reader.end()
        self._thread.shutdown(cancel_futures=True)
        for kept in self._chunks.values():
            _drop(kept)
        self._chunks.clear()
        self._reader.close()
        for end in (self._wake, self._woken):
            end.close()

    def _begin(self, chunk: Chunk, is_training: bool) -> _Kept:
        if chunk.key not in self._chunks:
            load = self._thread.submit(self._load, chunk)
            load.add_done_callback(lambda _: self._call())
            self._chunks[chunk.key] = _Kept(load, is_training)
        self._chunks.move_to_end(chunk.key)
        return self._chunks[chunk.key]

    def _load(self, chunk: Chunk) -> RecordStore:
        try:
            return self._layout.encode(joined(self._reader.read(chunk)))
        except MemoryError as error:
            raise FeedError(f"a chunk of {self._layout.name} does not fit this machine's memory: {error}") from error

    def _evict(self) -> None:
        for is_training in (True, False):
            of_kind = [key for key, kept in self._chunks.items() if kept.is_training is is_training]
            for key in of_kind[:-KEPT]:
                kept = self._chunks[key]
                if not kept.holders and not kept.asking and _drop(kept):
                    del self._chunks[key]

    def _call(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"w")


def _is_made(kept: _Kept) -> bool:
    return kept.store.done() and not kept.store.cancelled() and kept.store.exception() is None


def _drop(kept: _Kept) -> bool:
    """Frees a chunk's memory here. False if it is being made just now."""
    if _is_made(kept):
        kept.store.result().close()
    return kept.store.done() or kept.store.cancel()
