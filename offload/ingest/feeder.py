# SPDX-License-Identifier: Apache-2.0
"""A feeder: connects to the ranks of a run, and sends the records that they order.

It does what it is told, and keeps no state of the run but the batches that are not complete: another feeder with the
same data can go on at any row.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from sennit.ebpf.closing import Closing
from sennit.offload.ingest.facts import Facts
from sennit.offload.ingest.protocol import (
    VERSION,
    End,
    Error,
    FactsOf,
    Hello,
    LineReader,
    Message,
    Send,
    Taken,
    Terms,
    decode,
    encode,
)
from sennit.offload.records import HEADER, Header, Rows, encode_records

CONNECT_RETRY_S: Final = 0.1
PACING_S: Final = 0.001
RECEIVE_BYTES: Final = 1 << 16


class FeedError(RuntimeError):
    """The run cannot be fed, or not any more; the text says why."""


RowsOf = Callable[[Terms, int], Rows]
"""(terms, batch) -> the records of the batch's part for the rank of the terms, in order."""


class Outgoing:
    """One batch on its way to one rank. Sans-IO: says which packets may be sent."""

    def __init__(self, records: Sequence[bytes], header: Header, body_max_bytes: int) -> None:
        """`header`: of its packets, but for what differs between them."""
        self._records, self._header, self._body_max_bytes = records, header, body_max_bytes
        self._next_row = 0
        self._on_the_way: deque[int] = deque()
        """Of each packet that may be, the row behind it."""

    def rewind(self, row: int) -> None:
        """Goes on with this row."""
        self._next_row = row
        self._on_the_way.clear()

    def taken(self, row: int) -> bool:
        """The rows before this one have come; whether these are all."""
        while self._on_the_way and self._on_the_way[0] <= row:
            self._on_the_way.popleft()
        self._next_row = max(self._next_row, row)
        return row >= len(self._records)

    def due(self, window_packets: int) -> Iterator[bytes]:
        """What may be sent now. A packet counts as sent when the one after it is asked for."""
        while self._next_row < len(self._records) and len(self._on_the_way) < window_packets:
            end, size = self._next_row, 0
            while end < len(self._records) and size + len(self._records[end]) <= self._body_max_bytes:
                size += len(self._records[end])
                end += 1
            if end == self._next_row:
                raise FeedError(
                    f"a record of {len(self._records[end])} bytes; the trainer allows {self._body_max_bytes} a packet"
                )
            header = replace(self._header, row=self._next_row, records=end - self._next_row, body_bytes=size)
            yield header.encode() + b"".join(self._records[self._next_row : end])
            self._on_the_way.append(end)
            self._next_row = end


class _Rank:
    """The connection to one rank, and the batches that it has ordered."""

    def __init__(self, control: socket.socket, terms: Terms, reader: LineReader) -> None:
        self.control, self.terms, self.reader = control, terms, reader
        self.records = socket.socket(control.family, socket.SOCK_DGRAM)
        self.records.setblocking(False)
        self.records.connect(control.getpeername())
        self.outgoing: dict[int, Outgoing] = {}
        self.is_over = False


class Feeder(Closing):
    """One feeder. `run` returns when the run is over."""

    def __init__(self, name: str, facts: Facts, rows_of: RowsOf, *, timeout_s: float) -> None:
        self._name, self._facts, self._rows_of, self._timeout_s = name, facts, rows_of, timeout_s
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()

    def run(self, host: str, port: int) -> None:
        """Finds all ranks by this one, and serves them until each says that the run is over."""
        first = self._meet(host, port)
        ranks = {first.terms.rank: first}
        for number, (other_host, other_port) in enumerate(first.terms.endpoints):
            if number != first.terms.rank:
                ranks[number] = self._meet(other_host, other_port)
        self._ranks = [ranks[number] for number in sorted(ranks)]
        for rank in self._ranks:
            rank.control.sendall(encode(FactsOf(facts=self._facts.as_json())))
            rank.control.setblocking(False)
            self._selector.register(rank.control, selectors.EVENT_READ, rank)
        while not all(rank.is_over for rank in self._ranks):
            is_waiting = self._pump()
            for key, _ in self._selector.select(PACING_S if is_waiting else None):
                self._hear(key.data)

    def close(self) -> None:
        for rank in self._ranks:
            rank.control.close()
            rank.records.close()
        self._selector.close()

    def _meet(self, host: str, port: int) -> _Rank:
        control = self._connect(host, port)
        control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        control.settimeout(self._timeout_s)
        control.sendall(encode(Hello(version=VERSION, feeder=self._name)))
        with control.makefile("rb") as lines:
            line = lines.readline(1 << 20)
        if not line:
            raise FeedError(f"{host} port {port}: closed the connection")
        terms = decode(line)
        if isinstance(terms, Error):
            raise FeedError(f"{host} port {port}: {terms.text}")
        if not isinstance(terms, Terms):
            raise FeedError(f"{host} port {port}: answers with {terms.kind}, not with terms")
        return _Rank(control, terms, LineReader())

    def _connect(self, host: str, port: int) -> socket.socket:
        """Tries until the deadline: the trainer may be started later."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return socket.create_connection((host, port), max(0.01, deadline_s - time.monotonic()))
            except OSError as refusal:
                if time.monotonic() + CONNECT_RETRY_S >= deadline_s:
                    raise FeedError(f"no trainer at {host} port {port}: {refusal}") from refusal
                time.sleep(CONNECT_RETRY_S)

    def _hear(self, rank: _Rank) -> None:
        place = f"rank {rank.terms.rank}"
        try:
            received = rank.control.recv(RECEIVE_BYTES)
        except OSError as lost:
            raise FeedError(f"{place}: {lost}") from lost
        if not received and not rank.is_over:
            raise FeedError(f"{place}: closed the connection")
        if not received:
            self._selector.unregister(rank.control)
        for message in rank.reader.feed(received):
            self._obey(rank, message)

    def _obey(self, rank: _Rank, message: Message) -> None:
        if isinstance(message, Send):
            if message.batch not in rank.outgoing:
                rank.outgoing[message.batch] = self._make(rank.terms, message.batch)
            rank.outgoing[message.batch].rewind(message.row)
        elif isinstance(message, Taken) and message.batch in rank.outgoing:
            if rank.outgoing[message.batch].taken(message.row):
                del rank.outgoing[message.batch]
        elif isinstance(message, End):
            rank.is_over = True
            rank.outgoing.clear()
        elif isinstance(message, Error):
            raise FeedError(f"rank {rank.terms.rank}: {message.text}")

    def _make(self, terms: Terms, batch: int) -> Outgoing:
        schema = self._facts.plan.schema
        header = Header(schema_id=schema.schema_id, session=terms.session, batch=batch, row=0, records=0, body_bytes=0)
        records = encode_records(schema, self._rows_of(terms, batch))
        return Outgoing(records, header, terms.packet_bytes - HEADER.size)

    def _pump(self) -> bool:
        """Sends what may be sent; whether the network did not take all of it."""
        for rank in self._ranks:
            for outgoing in rank.outgoing.values():
                for packet in outgoing.due(rank.terms.window_packets):
                    try:
                        rank.records.send(packet)
                    except ConnectionRefusedError:
                        continue  # an ICMP message about an earlier one: nobody listens yet
                    except BlockingIOError:
                        return True
        return False
