# SPDX-License-Identifier: Apache-2.0
"""A worker's end of the chunks that its feeder makes: asks for them, and maps their memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Final

from sennit.offload.ingest.protocol import Terms
from sennit.offload.ingest.record_supply import Part
from sennit.offload.ingest.trainer_search import FeedError
from sennit.offload.record_store import Extent, RecordStore
from sennit.runtime.stream.order import StreamOrder

# Unused ones that stay mapped: the next batch may be of one of them.
MAPPED: Final = 2


@dataclass(frozen=True, slots=True)
class Want:
    """From a worker: it wants the chunk of a batch."""

    batch: int


@dataclass(frozen=True, slots=True)
class Release:
    """From a worker: it needs a chunk no more."""

    key: Hashable


@dataclass(frozen=True, slots=True)
class Come:
    """To a worker: a chunk. The descriptor of its memory follows."""

    key: Hashable
    extent: Extent


@dataclass(frozen=True, slots=True)
class Stop:
    """To a worker: no more chunks come."""

    why: str


def give(end: Connection, key: Hashable, store: RecordStore, pid: int | None) -> None:
    """Sends a chunk to the worker with this process number. Raises OSError if it is gone."""
    end.send(Come(key, store.extent))
    send_handle(end, store.fd, pid)


class Shelf:
    """A `RecordSupply`."""

    def __init__(self, end: Connection, order: StreamOrder, terms: dict[str, Any]) -> None:
        """`terms`: what the order was made of; a run with other ones is not fed."""
        self._end, self._order, self._terms = end, order, terms
        self._stores: OrderedDict[Hashable, RecordStore] = OrderedDict()
        """By their last use."""

        self._asked: set[Hashable] = set()

    def part(self, terms: Terms, batch: int) -> Part:
        if terms.order != self._terms:
            raise ValueError("the run has another order of samples than when this feeder began")
        chunk = self._order.chunk(batch, 0, 1)
        counts = self._order.counts(batch, terms.world_size)
        first = sum(counts[: terms.rank])
        return Part(chunk.key, chunk.places(batch)[first : first + counts[terms.rank]])

    def store(self, chunk: Hashable, batch: int) -> RecordStore | None:
        if chunk in self._stores:
            self._stores.move_to_end(chunk)
            return self._stores[chunk]
        if chunk not in self._asked:
            self._asked.add(chunk)
            self._end.send(Want(batch))
        return None

    def keep(self, chunks: Collection[Hashable]) -> None:
        for key in list(self._stores)[:-MAPPED]:
            if key not in chunks:
                self._stores.pop(key).close()
                self._end.send(Release(key))

    def fileno(self) -> int:
        return self._end.fileno()

    def receive(self) -> None:
        said = self._end.recv()
        if isinstance(said, Stop):
            raise FeedError(said.why)
        assert isinstance(said, Come)
        self._asked.discard(said.key)
        self._stores[said.key] = RecordStore(recv_handle(self._end), said.extent)
