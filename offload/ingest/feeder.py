# SPDX-License-Identifier: Apache-2.0
"""A feeder: connects to the ranks of a run and sends the records that they order.

It keeps no state of the run except unfinished batches. Another feeder with the same data can continue at any row.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sennit.closing import Closing
from sennit.offload.ingest.protocol import (
    End,
    Error,
    FactsOf,
    LineReader,
    Message,
    ProtocolError,
    Send,
    Taken,
    Terms,
    encode,
    error,
)
from sennit.offload.ingest.record_socket import RecordSocket
from sennit.offload.ingest.trainer_search import FeedError, meet
from sennit.offload.ingest.window import Window
from sennit.offload.record_store import RecordStore

RECEIVE_BYTES: Final = 1 << 16
REPORT_S: Final = 0.2
# The pause after the network refused a packet. A full device queue drains sooner; a missing route takes longer.
RETRY_S: Final = 0.001
# Errors that may pass: full queues, nobody listening yet (ICMP), a link or route that is down, a filter.
PASSING_ERRORS: Final = frozenset(
    {
        errno.EAGAIN,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.ECONNREFUSED,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.EHOSTDOWN,
        errno.EPERM,
    }
)

PartOf = Callable[[Terms, int], NDArray[np.int64]]
"""(terms, batch) -> the record numbers of this rank's part of the batch, in order."""


@dataclass(kw_only=True, slots=True)
class FeedCounters:
    """What one feeder did."""

    records: int = 0
    """Records sent, repetitions included."""

    packets: int = 0
    batches: int = 0
    """Finished parts of batches, one per rank and batch."""

    rewinds: int = 0
    """Orders to send again from an earlier row."""

    refused: int = 0
    """How often the network refused a packet."""

    def __add__(self, other: FeedCounters) -> FeedCounters:
        return FeedCounters(
            **{part.name: getattr(self, part.name) + getattr(other, part.name) for part in fields(self)}
        )


class Outgoing:
    """One batch on its way to one rank. Sans-I/O: says how much may be sent."""

    def __init__(self, batch: int, records: NDArray[np.int64], window: Window) -> None:
        """`records`: the record numbers of this rank's part."""
        self.batch, self.records, self.window = batch, records, window
        self.next_row = 0
        self._taken = 0
        self._cut_row = 0
        self._sent: list[tuple[int, int, int]] = []
        """Packets in flight: first row, row behind the last, packet count."""

    def rewind(self, row: int) -> bool:
        """Continues from this row. True if the row had been sent before."""
        was_sent = row < self.next_row
        if was_sent and row >= self._cut_row:
            # Losses among rows sent before the last cut of the window say nothing new about the path.
            self.window.lost()
            self._cut_row = self.next_row
        self.next_row = self._taken = row
        self._sent.clear()
        return was_sent

    def taken(self, row: int) -> bool:
        """All rows before this one have arrived. True if the batch is complete."""
        before = self.packets_on_the_way
        self._taken = max(self._taken, row)
        self._sent = [sent for sent in self._sent if sent[1] > self._taken]
        self.window.taken(before - self.packets_on_the_way)
        self.next_row = max(self.next_row, self._taken)
        return row >= len(self.records)

    def sent(self, next_row: int, packets: int) -> None:
        self._sent.append((self.next_row, next_row, packets))
        self.next_row = next_row

    @property
    def is_sent(self) -> bool:
        return self.next_row >= len(self.records)

    @property
    def packets_due(self) -> int:
        """Packets that the window still allows."""
        return self.window.packets - self.packets_on_the_way

    @property
    def packets_on_the_way(self) -> int:
        """The share of packets, among several sent at once, that covers rows still missing."""
        return sum(-(-packets * (end - max(begin, self._taken)) // (end - begin)) for begin, end, packets in self._sent)


class _Rank:
    """The connection to one rank, and the batches that the rank has ordered."""

    def __init__(self, control: socket.socket, terms: Terms, store: RecordStore) -> None:
        self.control, self.terms, self.reader = control, terms, LineReader()
        self.records = RecordSocket(control.getpeername(), terms, store)
        self.outgoing: dict[int, Outgoing] = {}
        self.window = Window(terms.window_packets)
        """The window that the last batch ended with."""

        self.is_over = False
        self.retry_at_s = 0.0
        self.refused_since_s: float | None = None

    def __str__(self) -> str:
        return f"rank {self.terms.rank}"

    def close(self) -> None:
        self.control.close()
        self.records.close()


class Feeder(Closing):
    """One feeder. `run` returns when the run is over."""

    def __init__(self, name: str, facts: dict[str, Any], store: RecordStore, part_of: PartOf, *, timeout_s: float):
        """`facts`: the facts of the data set (`Facts.as_json`).

        `timeout_s`: how long a rank or the network may be unreachable.
        """
        self.counters = FeedCounters()
        self._name, self._facts, self._store, self._part_of = name, facts, store, part_of
        self._timeout_s = timeout_s
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()

    def run(self, host: str, port: int, on_report: Callable[[FeedCounters], None] | None = None) -> None:
        """Finds all ranks through this one and serves them until each says that the run is over.

        Calls `on_report` with the counters once it has found them, and from time to time. Raises FeedError if the run
        cannot be fed to its end.
        """
        self._meet_all(host, port)
        for rank in self._ranks:
            rank.control.sendall(encode(FactsOf(facts=self._facts)))
            rank.control.setblocking(False)
            self._selector.register(rank.control, selectors.EVENT_READ, rank)
        report_at_s = 0.0
        while not all(rank.is_over for rank in self._ranks):
            if on_report is not None and time.monotonic() >= report_at_s:
                on_report(self.counters)
                report_at_s = time.monotonic() + REPORT_S
            wait_s = self._pump()
            for key, _ in self._selector.select(wait_s):
                self._hear(key.data)

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._selector.close()

    def _meet_all(self, host: str, port: int) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        self._add(host, port, deadline_s)
        first = self._ranks[0].terms
        for number, (other_host, other_port) in enumerate(first.endpoints):
            if number == first.rank:
                continue
            self._add(other_host, other_port, deadline_s)
            found = self._ranks[-1].terms
            if (found.session, found.rank) != (first.session, number):
                expected = f"rank {number} of run {first.session:08x}"
                raise FeedError(
                    f"{other_host} port {other_port}: rank {found.rank} of run {found.session:08x}, not {expected}"
                )

    def _add(self, host: str, port: int, deadline_s: float) -> None:
        control, terms = meet(host, port, name=self._name, deadline_s=deadline_s)
        try:
            self._ranks.append(_Rank(control, terms, self._store))
        except BaseException:
            control.close()
            raise

    def _hear(self, rank: _Rank) -> None:
        try:
            received = rank.control.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as lost:
            received, reason = b"", lost.strerror or str(lost)
        else:
            reason = "closed the connection"
        if not received:
            if not rank.is_over:
                raise FeedError(f"the trainer is gone: {rank}: {reason}")
            self._selector.unregister(rank.control)
            return
        try:
            for message in rank.reader.feed(received):
                self._obey(rank, message)
        except ProtocolError as wrong:
            rank.control.send(encode(error(str(wrong))))
            raise FeedError(f"{rank}: {wrong}") from wrong

    def _obey(self, rank: _Rank, message: Message) -> None:
        if isinstance(message, Send):
            if message.batch not in rank.outgoing:
                records = self._part(rank, message.batch)
                rank.outgoing[message.batch] = Outgoing(message.batch, records, rank.window.following())
            self.counters.rewinds += rank.outgoing[message.batch].rewind(message.row)
        elif isinstance(message, Taken):
            outgoing = rank.outgoing.get(message.batch)
            if outgoing is not None and outgoing.taken(message.row):
                del rank.outgoing[message.batch]
                rank.window = outgoing.window
                self.counters.batches += 1
        elif isinstance(message, End):
            rank.is_over = True
            rank.outgoing.clear()
        elif isinstance(message, Error):
            raise FeedError(f"{rank}: {message.text}")
        else:
            raise ProtocolError(f"{message.kind} out of turn")

    def _part(self, rank: _Rank, batch: int) -> NDArray[np.int64]:
        try:
            return self._part_of(rank.terms, batch)
        except ValueError as wrong:
            raise ProtocolError(str(wrong)) from wrong

    def _pump(self) -> float:
        """Sends what may be sent now. Returns how long to wait for orders before the next try."""
        wait_s = REPORT_S
        for rank in self._ranks:
            now_s = time.monotonic()
            if now_s < rank.retry_at_s:
                wait_s = min(wait_s, rank.retry_at_s - now_s)
                continue
            for outgoing in self._due(rank):
                failure = self._send(rank, outgoing)
                if failure:
                    self._postpone(rank, failure)
                    wait_s = min(wait_s, RETRY_S)
                    break
                rank.refused_since_s = None
        return wait_s

    @staticmethod
    def _due(rank: _Rank) -> Iterator[Outgoing]:
        """The earliest batch first, because the trainer waits for it."""
        for batch in sorted(rank.outgoing):
            outgoing = rank.outgoing[batch]
            if not outgoing.is_sent and outgoing.packets_due > 0:
                yield outgoing

    def _send(self, rank: _Rank, outgoing: Outgoing) -> int:
        """Sends as much of the batch as the window allows. Returns the socket's error number, or 0."""
        first = outgoing.next_row
        next_row, packets, failure = rank.records.send(outgoing.records, outgoing.batch, first, outgoing.packets_due)
        if packets:
            outgoing.sent(next_row, packets)
            self.counters.records += next_row - first
            self.counters.packets += packets
        return failure

    def _postpone(self, rank: _Rank, failure: int) -> None:
        now_s = time.monotonic()
        self.counters.refused += 1
        rank.retry_at_s = now_s + RETRY_S
        if rank.refused_since_s is None:
            rank.refused_since_s = now_s
        refused_s = now_s - rank.refused_since_s
        if failure not in PASSING_ERRORS or refused_s > self._timeout_s:
            raise FeedError(
                f"{rank}: records cannot be sent to {rank.records.peer}, for {refused_s:.0f} s: {os.strerror(failure)}"
            )
