# SPDX-License-Identifier: Apache-2.0
"""A rank as a feeder sees it. Each test decides what it does."""

from __future__ import annotations

import select
import socket
import time
from typing import Any

from sennit.offload.ingest.protocol import VERSION, Hello, LineReader, Message, Terms, encode
from sennit.offload.records import HEADER

DEADLINE_S = 30.0


class Rank:
    """A rank that a test controls: a socket for messages, and one for records at the same port."""

    def __init__(self, *, listens: bool = True, **terms: Any) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(DEADLINE_S)
        self.address = self.listener.getsockname()
        self.records = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if listens:
            self.listen()
        self.control = socket.socket()
        self.reader = LineReader()
        self.messages: list[Message] = []
        self.terms = Terms(
            **{
                "version": VERSION,
                "session": 9,
                "rank": 0,
                "world_size": 1,
                "endpoints": [list(self.address)],
                "packet_bytes": 1400,
                "window_packets": 4,
                "order": {},
                **terms,
            }
        )

    def listen(self) -> None:
        self.records.bind(self.address)

    def accept(self) -> Hello:
        """Receives a feeder's hello, and answers with the terms."""
        self.control.close()
        self.control, _ = self.listener.accept()
        self.control.settimeout(DEADLINE_S)
        self.reader = LineReader()
        hello = self.hear()
        assert isinstance(hello, Hello)
        self.say(self.terms)
        return hello

    def say(self, *messages: Message) -> None:
        self.control.sendall(b"".join(encode(message) for message in messages))

    def hear(self) -> Message:
        while not self.messages:
            received = self.control.recv(1 << 16)
            assert received, "the feeder closed the connection"
            self.messages += self.reader.feed(received)
        return self.messages.pop(0)

    def packets(self, count: int) -> list[tuple[int, int, bytes]]:
        """Receives `count` packets. Returns the batch, the first row and the records of each."""
        found: list[tuple[int, int, bytes]] = []
        deadline_s = time.monotonic() + DEADLINE_S
        while len(found) < count:
            left_s = max(0.0, deadline_s - time.monotonic())
            assert select.select([self.records], [], [], left_s)[0], f"{len(found)} of {count} packets came"
            packet = self.records.recv(1 << 16)
            *_, session, batch, row, _, body_bytes, _ = HEADER.unpack_from(packet)
            assert (session, body_bytes) == (self.terms.session, len(packet) - HEADER.size)
            found.append((batch, row, packet[HEADER.size :]))
        return found

    def nothing_more(self) -> bool:
        return not select.select([self.records], [], [], 0)[0]

    def close(self) -> None:
        for end in (self.listener, self.records, self.control):
            end.close()
