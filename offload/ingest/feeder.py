# SPDX-License-Identifier: Apache-2.0
"""A feeder: connects to the ranks of a run and sends the records that they order.

It keeps no state of the run except unfinished batches. Another feeder with the same data can continue at any row. Its
records come chunk by chunk (`RecordSupply`); a batch waits for its chunk, and other batches do not.

The session of an elastic run ends when ranks leave or join. The feeder then calls the ranks of the last terms that it
knows, until one answers with the terms of the next session. Each rank is served by its own terms, so ranks may change
one after the other.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from sennit.closing import Closing
from sennit.offload.ingest.protocol import (
    Apart,
    End,
    Error,
    FactsOf,
    LineReader,
    Message,
    ProtocolError,
    Reconfigured,
    Send,
    Taken,
    Terms,
    encode,
    error,
)
from sennit.offload.ingest.record_socket import RecordSocket
from sennit.offload.ingest.record_supply import Part, RecordSupply
from sennit.offload.ingest.trainer_search import FeedError, Place, Unreachable, call, meet, read_terms

# With a single packet, a second loss in a row could not be told from the first.
LEAST_PACKETS: Final = 2
RECEIVE_BYTES: Final = 1 << 16
REPORT_S: Final = 0.2
# The pause after the network refused a packet. A full device queue drains sooner; a missing route takes longer.
RETRY_S: Final = 0.001
# How long a call to a rank of an elastic run may keep the others waiting, and the pauses between calls.
CALL_S: Final = 0.3
RETRY_FIRST_S: Final = 0.05
RETRY_MAX_S: Final = 5.0
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


class Window:
    """The number of packets of a batch that may be in flight: the rank's limit, less after losses.

    Additive increase, multiplicative decrease (Chiu and Jain 1989; RFC 5681 section 3.1): the rank halves the window
    when it asks for rows again, and each window of packets taken makes it one packet larger. The first batch starts at
    the limit, because the rank chose what its end holds, and most links hold more than that.
    """

    def __init__(self, most_packets: int) -> None:
        self._most = self._packets = float(most_packets)

    def following(self) -> Window:
        """The window of the next batch on the same path."""
        return copy.copy(self)

    @property
    def packets(self) -> int:
        return int(self._packets)

    def lost(self) -> None:
        self._packets = min(self._most, max(LEAST_PACKETS, self._packets / 2))

    def taken(self, packets: int) -> None:
        self._packets = min(self._most, self._packets + packets / self._packets)


class Outgoing:
    """One batch on its way to one rank. Sans-I/O: says how much may be sent."""

    def __init__(self, batch: int, part: Part, window: Window) -> None:
        """`part`: this rank's."""
        self.batch, self.chunk, self.records, self.window = batch, part.chunk, part.records, window
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

    def __init__(self, control: socket.socket, place: Place) -> None:
        self.control, self.place, self.reader = control, place, LineReader()
        self.terms: Terms | None = None
        """None until the rank has answered."""

        self.outgoing: dict[int, Outgoing] = {}
        self.is_over = False
        self.retry_at_s = 0.0
        self.refused_since_s: float | None = None

    def begin(self, terms: Terms) -> None:
        self.place = _places_of(terms)[terms.rank]
        self.records = RecordSocket(self.control.getpeername(), terms)
        self.window = Window(terms.window_packets)
        """The window that the last batch ended with."""

        self.terms = terms

    def __str__(self) -> str:
        return f"{self.place[0]} port {self.place[1]}" if self.terms is None else f"rank {self.terms.rank}"

    def close(self) -> None:
        self.control.close()
        if self.terms is not None:
            self.records.close()


class Feeder(Closing):
    """One feeder. `run` returns when the run is over."""

    def __init__(self, name: str, facts: dict[str, Any], supply: RecordSupply, *, timeout_s: float):
        """`facts`: the facts of the data set (`Facts.as_json`).

        `timeout_s`: how long a rank or the network may be unreachable.
        """
        self.counters = FeedCounters()
        self._name, self._facts, self._supply = name, facts, supply
        self._timeout_s = timeout_s
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self.places: Sequence[Place] = ()
        """Where the ranks of the run listen, as far as this feeder knows."""

        self._has_ended = False
        """Whether a rank has said that the run is over."""

        # The rest is for elastic runs.
        self._retries: dict[Place, _Retry] = {}
        self._failures: dict[Place, FeedError] = {}
        """What ranks of the newest epoch ended with, or why they refuse this feeder."""

        self._alone_since_s: float | None = None
        self._last = FeedError("no rank was reached")

    def run(self, places: Sequence[Place], on_report: Callable[[FeedCounters], None] | None = None) -> None:
        """Finds all ranks through one of these and serves them until each says that the run is over.

        Calls `on_report` with the counters once it has found a rank, and from time to time. Raises FeedError if the run
        cannot be fed to its end.
        """
        self._meet_all(places)
        self._selector.register(self._supply, selectors.EVENT_READ)
        report_at_s = 0.0
        while not self._is_over():
            if on_report is not None and time.monotonic() >= report_at_s:
                on_report(self.counters)
                report_at_s = time.monotonic() + REPORT_S
            if self._terms.elastic:
                self._reach()
            wait_s = self._pump()
            for key, _ in self._selector.select(wait_s):
                if key.data is None:
                    self._receive()
                else:
                    self._hear(key.data)
            self._supply.keep({outgoing.chunk for rank in self._ranks for outgoing in rank.outgoing.values()})

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._selector.close()

    def _is_over(self) -> bool:
        epoch = self._terms.epoch
        return self._has_ended and all(
            rank.is_over for rank in self._ranks if rank.terms is not None and rank.terms.epoch == epoch
        )

    def _meet_all(self, places: Sequence[Place]) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        self.places = places
        self._terms = first = self._add(places, deadline_s)
        self.places = _places_of(first)
        if not first.elastic:
            for number, place in enumerate(self.places):
                if number == first.rank:
                    continue
                found = self._add([place], deadline_s)
                if (found.run, found.rank) != (first.run, number):
                    raise FeedError(
                        f"{place[0]} port {place[1]}: rank {found.rank} of run {found.run:08x}, not rank {number} "
                        f"of run {first.run:08x}"
                    )
        for rank in list(self._ranks):
            self._selector.register(rank.control, selectors.EVENT_READ, rank)
            self._introduce(rank)

    def _add(self, places: Sequence[Place], deadline_s: float) -> Terms:
        control, terms = meet(places, name=self._name, deadline_s=deadline_s)
        rank = _Rank(control, places[0])
        self._ranks.append(rank)
        rank.begin(terms)
        return terms

    def _introduce(self, rank: _Rank) -> None:
        try:
            rank.control.settimeout(self._timeout_s)
            rank.control.sendall(encode(FactsOf(facts=self._facts)))
            rank.control.setblocking(False)
        except OSError as lost:
            self._lose(rank, _gone(rank, lost.strerror or str(lost)))

    def _reach(self) -> None:
        """Looks for the ranks of an elastic run that this feeder has no connection to."""
        now_s = time.monotonic()
        if any(rank.terms is not None for rank in self._ranks):
            self._alone_since_s = None
        else:
            self._alone_since_s = self._alone_since_s or now_s
            if now_s > self._alone_since_s + self._timeout_s:
                raise FeedError(
                    f"{self._last}; and no rank of the run answered for {self._timeout_s:g} s"
                ) from self._last
        if self._has_ended:
            return
        for place in set(self.places) - self._failures.keys() - {rank.place for rank in self._ranks}:
            retry = self._retries.setdefault(place, _Retry())
            if now_s < retry.at_s:
                continue
            retry.postpone(now_s)
            try:
                control = call(place, name=self._name, patience_s=CALL_S, deadline_s=time.monotonic() + self._timeout_s)
            except Unreachable as missed:
                self._last = missed
                continue
            control.setblocking(False)
            rank = _Rank(control, place)
            self._ranks.append(rank)
            self._selector.register(control, selectors.EVENT_READ, rank)

    def _welcome(self, rank: _Rank, answer: Message) -> None:
        """The first answer of a rank that was reached."""
        terms = read_terms(str(rank), answer)
        if terms.run != self._terms.run:
            raise FeedError(f"{rank}: a rank of another run")
        if terms.epoch > self._terms.epoch:
            self._terms, self.places = terms, _places_of(terms)
            self._failures.clear()
            self._retries.clear()
        rank.begin(terms)
        self._retries.pop(rank.place, None)
        self._introduce(rank)

    def _lose(self, rank: _Rank, why: FeedError) -> None:
        """Goes on without a rank if the run can. Raises `why` if not."""
        if not self._terms.elastic:
            raise why
        self._last = why
        self._selector.unregister(rank.control)
        self._ranks.remove(rank)
        rank.close()

    def _fail(self, rank: _Rank, why: FeedError) -> None:
        """A rank says why it ends, or does not want this feeder. The run goes on if not all ranks do."""
        self._failures[rank.place] = why
        self._lose(rank, why)
        if self._failures.keys() >= set(self.places):
            raise why

    def _receive(self) -> None:
        """Takes chunks that have come. If no more come, the ranks hear why."""
        try:
            self._supply.receive()
        except FeedError as why:
            for rank in self._ranks:
                self._tell(rank, str(why))
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
            if rank.is_over:
                self._selector.unregister(rank.control)
            else:
                self._lose(rank, _gone(rank, reason))
            return
        last: Error | Reconfigured | None = None
        try:
            for message in rank.reader.feed(received):
                if rank.terms is None:
                    self._welcome(rank, message)
                elif isinstance(message, Error | Reconfigured):
                    last = message
                    break
                else:
                    self._obey(rank, message)
        except ProtocolError as wrong:
            self._tell(rank, str(wrong))
            self._lose(rank, FeedError(f"{rank}: {wrong}"))
        except FeedError as wrong:
            self._tell(rank, str(wrong))
            self._fail(rank, wrong)
        except OSError as lost:
            self._lose(rank, _gone(rank, lost.strerror or str(lost)))
        if isinstance(last, Error):
            self._fail(rank, FeedError(f"{rank}: {last.text}"))
        elif last is not None:
            self._lose(rank, FeedError(f"{rank}: ranks have left or join"))

    @staticmethod
    def _tell(rank: _Rank, text: str) -> None:
        with contextlib.suppress(OSError):
            rank.control.send(encode(error(text)))

    def _obey(self, rank: _Rank, message: Message) -> None:
        if isinstance(message, Send):
            if message.batch not in rank.outgoing:
                part = self._part(rank, message.batch)
                rank.outgoing[message.batch] = Outgoing(message.batch, part, rank.window.following())
            self.counters.rewinds += rank.outgoing[message.batch].rewind(message.row)
        elif isinstance(message, Taken):
            outgoing = rank.outgoing.get(message.batch)
            if outgoing is not None and outgoing.taken(message.row):
                del rank.outgoing[message.batch]
                rank.window = outgoing.window
                self.counters.batches += 1
        elif isinstance(message, Apart):
            rank.records.send_apart()
        elif isinstance(message, End):
            rank.is_over = self._has_ended = True
            rank.outgoing.clear()
        else:
            raise ProtocolError(f"{message.kind} out of turn")

    def _part(self, rank: _Rank, batch: int) -> Part:
        try:
            assert rank.terms is not None
            return self._supply.part(rank.terms, batch)
        except ValueError as wrong:
            raise ProtocolError(str(wrong)) from wrong

    def _pump(self) -> float:
        """Sends what may be sent now. Returns how long to wait for orders before the next try."""
        wait_s = REPORT_S
        for rank in list(self._ranks):
            now_s = time.monotonic()
            if now_s < rank.retry_at_s:
                wait_s = min(wait_s, rank.retry_at_s - now_s)
                continue
            try:
                failure = self._send_due(rank)
            except FeedError as wrong:
                self._tell(rank, str(wrong))
                self._fail(rank, wrong)
                continue
            if failure:
                self._postpone(rank, failure)
                wait_s = min(wait_s, RETRY_S)
        return wait_s

    def _send_due(self, rank: _Rank) -> int:
        """Sends what the windows of a rank's batches allow. Returns the socket's error number, or 0.

        The earliest batch is first, because the trainer waits for it.
        """
        for batch in sorted(rank.outgoing):
            outgoing = rank.outgoing[batch]
            store = self._supply.store(outgoing.chunk, batch)
            if store is None or outgoing.is_sent or outgoing.packets_due <= 0:
                continue
            first = outgoing.next_row
            next_row, packets, failure = rank.records.send(store, outgoing.records, batch, first, outgoing.packets_due)
            if packets:
                outgoing.sent(next_row, packets)
                self.counters.records += next_row - first
                self.counters.packets += packets
            if failure:
                return failure
            rank.refused_since_s = None
        return 0

    def _postpone(self, rank: _Rank, failure: int) -> None:
        now_s = time.monotonic()
        self.counters.refused += 1
        rank.retry_at_s = now_s + RETRY_S
        if rank.refused_since_s is None:
            rank.refused_since_s = now_s
        refused_s = now_s - rank.refused_since_s
        if failure not in PASSING_ERRORS or refused_s > self._timeout_s:
            text = f"records cannot be sent to {rank.records.peer}, for {refused_s:.0f} s: {os.strerror(failure)}"
            self._lose(rank, FeedError(f"{rank}: {text}"))


@dataclass(slots=True)
class _Retry:
    """When to call a place again."""

    at_s: float = 0.0
    wait_s: float = RETRY_FIRST_S

    def postpone(self, now_s: float) -> None:
        self.at_s = now_s + self.wait_s
        self.wait_s = min(2 * self.wait_s, RETRY_MAX_S)


def _places_of(terms: Terms) -> list[Place]:
    return [(host, port) for host, port in terms.endpoints]


def _gone(rank: _Rank, reason: str) -> FeedError:
    return FeedError(f"the trainer is gone: {rank}: {reason}")
