# SPDX-License-Identifier: Apache-2.0
"""How a feeder finds a rank: it connects until the deadline, introduces itself, and receives the run's terms."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Final

from sennit.errors import SennitError
from sennit.offload.ingest.protocol import (
    LINE_MAX_BYTES,
    VERSION,
    Error,
    Hello,
    Message,
    ProtocolError,
    Terms,
    decode,
    encode,
)

RETRY_S: Final = 0.1
CONNECT_S: Final = 5.0
# A host that vanished without a word is noticed after this many keep-alive probes (tcp(7)).
KEEPALIVE_PROBES: Final = 5


Place = tuple[str, int]
"""Host and TCP port of a rank."""


class FeedError(SennitError):
    """The run cannot be fed, or no longer. The message says why."""


class Unreachable(FeedError):
    """Nobody answers there, or not yet."""


def meet(places: Sequence[Place], *, name: str, deadline_s: float) -> tuple[socket.socket, Terms]:
    """Returns a connection to the first rank that answers, and its terms.

    `deadline_s` is on the monotonic clock. Raises FeedError if nobody answers in time, or if who answers is no trainer.
    """
    while True:
        for place in places:
            try:
                return _greet(place, name, deadline_s)
            except Unreachable as missed:
                last = missed
        # The trainer may start later, or its run may be ending or not be ready yet.
        if time.monotonic() + RETRY_S >= deadline_s:
            raise last
        time.sleep(RETRY_S)


def call(place: Place, *, name: str, patience_s: float, deadline_s: float) -> socket.socket:
    """A connection to a rank that has been told who calls. Raises Unreachable if that takes longer than `patience_s`.

    `deadline_s`: until when a silence of the host may last.
    """
    host, port = place
    try:
        control = socket.create_connection(place, max(0.01, patience_s))
    except (OSError, UnicodeError) as refusal:
        reason = getattr(refusal, "strerror", None) or str(refusal)
        raise Unreachable(f"no trainer at {host} port {port}: {reason}") from refusal
    try:
        left_s = max(1, int(deadline_s - time.monotonic()))
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, left_s // 2)),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, left_s // 2 // KEEPALIVE_PROBES)),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        ):
            control.setsockopt(level, option, value)
        control.sendall(encode(Hello(version=VERSION, feeder=name)))
    except OSError as lost:
        control.close()
        raise Unreachable(f"no terms from {host} port {port}: {lost.strerror}") from lost
    return control


def _greet(place: Place, name: str, deadline_s: float) -> tuple[socket.socket, Terms]:
    title = f"{place[0]} port {place[1]}"
    left_s = deadline_s - time.monotonic()
    control = call(place, name=name, patience_s=min(CONNECT_S, left_s), deadline_s=deadline_s)
    try:
        line = _line(control, deadline_s)
        if not line:
            raise Unreachable(f"no terms from {title}: closed the connection")
        return control, read_terms(title, decode_line(title, line))
    except BaseException as wrong:
        control.close()
        if isinstance(wrong, OSError):
            raise Unreachable(f"no terms from {title}: {wrong.strerror or wrong}") from wrong
        raise


def _line(control: socket.socket, deadline_s: float) -> bytes:
    """The first line, or nothing if the connection ends before. Bytes behind it stay in the socket."""
    found = bytearray()
    while len(found) < LINE_MAX_BYTES:
        control.settimeout(max(0.01, deadline_s - time.monotonic()))
        there = control.recv(LINE_MAX_BYTES, socket.MSG_PEEK)
        if not there:
            return b""
        end = there.find(b"\n") + 1
        found += control.recv(end or len(there))
        if end:
            return bytes(found[:-1])
    raise FeedError(f"{control.getpeername()[0]}: a line of more than {LINE_MAX_BYTES} bytes; is this a trainer?")


def decode_line(place: str, line: bytes) -> Message:
    try:
        return decode(line)
    except ProtocolError as wrong:
        raise FeedError(f"{place}: {wrong}; is this a trainer?") from wrong


def read_terms(place: str, answer: Message) -> Terms:
    """What a rank answers to the first message. Raises FeedError if it is not terms that this feeder understands."""
    if isinstance(answer, Error):
        raise FeedError(f"{place}: {answer.text}")
    if not isinstance(answer, Terms):
        raise FeedError(f"{place}: answers with {answer.kind}, not with terms")
    if answer.version != VERSION:
        raise FeedError(f"{place}: version {answer.version} of the protocol; this feeder speaks {VERSION}")
    return answer
