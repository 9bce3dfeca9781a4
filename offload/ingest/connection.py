# SPDX-License-Identifier: Apache-2.0
"""The trainer's end of a feeder connection. Sending and receiving messages never block."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, Final

from sennit.offload.ingest.facts import Facts
from sennit.offload.ingest.protocol import LineReader, Message, encode

RECEIVE_BYTES: Final = 1 << 16
# A feeder that does not read its orders counts as dead.
UNSENT_MAX_BYTES: Final = 1 << 20


class Connection:
    """One accepted socket."""

    def __init__(self, number: int, accepted: socket.socket, peer: Any, *, deadline_s: float) -> None:
        """`deadline_s`: when the feeder must have described its data."""
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.number, self.socket, self.deadline_s = number, accepted, deadline_s
        self.feeder = ""
        self.facts: Facts | None = None
        self.is_closed = False
        self.unsent = bytearray()
        self._peer = f"{peer[0]} port {peer[1]}"
        self._reader = LineReader()

    @property
    def title(self) -> str:
        return f"{self.feeder} at {self._peer}" if self.feeder else self._peer

    def receive(self) -> Iterator[Message]:
        """The messages received. Raises ConnectionError if the feeder has gone."""
        try:
            received = self.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as lost:
            raise ConnectionError(f"connection lost: {lost.strerror}") from lost
        if not received:
            raise ConnectionError("connection closed")
        yield from self._reader.feed(received)

    def send(self, message: Message) -> None:
        self.unsent += encode(message)

    def flush(self) -> bool:
        """Sends what fits now.

        True if nothing is left. Raises ConnectionError if the feeder has gone or does not read.
        """
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            if len(self.unsent) > UNSENT_MAX_BYTES:
                raise ConnectionError(f"{len(self.unsent)} bytes of orders unread") from None
        except OSError as lost:
            raise ConnectionError(f"connection lost: {lost.strerror}") from lost
        return not self.unsent
