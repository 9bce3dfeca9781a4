# SPDX-License-Identifier: Apache-2.0
"""How a feeder finds a rank: it connects until the deadline, introduces itself, and receives the run's terms."""

from __future__ import annotations

import socket
import time
from typing import Final

from sennit.errors import SennitError
from sennit.offload.ingest.protocol import LINE_MAX_BYTES, VERSION, Error, Hello, ProtocolError, Terms, decode, encode

RETRY_S: Final = 0.1
# A host that vanished without a word is noticed after this many keep-alive probes (tcp(7)).
KEEPALIVE_PROBES: Final = 5


class FeedError(SennitError):
    """The run cannot be fed, or no longer. The message says why."""


def meet(host: str, port: int, *, name: str, deadline_s: float) -> tuple[socket.socket, Terms]:
    """Returns a connection to the rank, and its terms.

    `deadline_s` is on the monotonic clock. Raises FeedError if nobody answers in time, or not a trainer.
    """
    place = f"{host} port {port}"
    while True:
        control = _connect(host, port, deadline_s)
        try:
            control.sendall(encode(Hello(version=VERSION, feeder=name)))
            line = _line(control, deadline_s)
            if line:
                return control, _terms(place, line)
        except (OSError, FeedError) as lost:
            control.close()
            if isinstance(lost, FeedError):
                raise
            reason = lost.strerror or str(lost)
        else:
            control.close()
            reason = "closed the connection"
        # A run that is just ending, or not ready yet.
        if time.monotonic() + RETRY_S >= deadline_s:
            raise FeedError(f"no terms from {place}: {reason}")
        time.sleep(RETRY_S)


def _connect(host: str, port: int, deadline_s: float) -> socket.socket:
    """Tries until the deadline, because the trainer may start later."""
    while True:
        try:
            control = socket.create_connection((host, port), max(0.01, deadline_s - time.monotonic()))
        except (OSError, UnicodeError) as refusal:
            reason = getattr(refusal, "strerror", None) or str(refusal)
            if time.monotonic() + RETRY_S >= deadline_s:
                raise FeedError(f"no trainer at {host} port {port}: {reason}") from refusal
            time.sleep(RETRY_S)
            continue
        left_s = max(1, int(deadline_s - time.monotonic()))
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, left_s // 2)),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, left_s // 2 // KEEPALIVE_PROBES)),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        ):
            control.setsockopt(level, option, value)
        return control


def _line(control: socket.socket, deadline_s: float) -> bytes:
    """The first line, or nothing if the connection ends before. Bytes behind it stay in the socket."""
    found = bytearray()
    while len(found) < LINE_MAX_BYTES:
        control.settimeout(max(0.01, deadline_s - time.monotonic()))
        byte = control.recv(1)
        if not byte:
            return b""
        if byte == b"\n":
            return bytes(found)
        found += byte
    raise FeedError(f"{control.getpeername()[0]}: a line of more than {LINE_MAX_BYTES} bytes; is this a trainer?")


def _terms(place: str, line: bytes) -> Terms:
    try:
        terms = decode(line)
    except ProtocolError as wrong:
        raise FeedError(f"{place}: {wrong}; is this a trainer?") from wrong
    if isinstance(terms, Error):
        raise FeedError(f"{place}: {terms.text}")
    if not isinstance(terms, Terms):
        raise FeedError(f"{place}: answers with {terms.kind}, not with terms")
    if terms.version != VERSION:
        raise FeedError(f"{place}: version {terms.version} of the protocol; this feeder speaks {VERSION}")
    return terms
