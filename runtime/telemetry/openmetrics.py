# SPDX-License-Identifier: Apache-2.0
"""Counters as OpenMetrics text, which Prometheus scrapes (https://prometheus.io/docs/specs/om/open_metrics_spec/).

prometheus_client writes the text. The server is ours: it keeps no client longer than `CLIENT_S`, and of more than
`CLIENTS_MAX` clients the newest, so that none of them can hold it up. All clients that wait get one text.
"""

from __future__ import annotations

import contextlib
import http.server
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition
from prometheus_client.samples import Sample as Line

from sennit.runtime.telemetry import samples

CONTENT_TYPE: Final = exposition.CONTENT_TYPE_LATEST
CLIENT_S: Final = 10.0
"""Seconds that a client has, from its connection to its answer."""

CLIENTS_MAX: Final = 32
LOOK_S: Final = 0.1
"""How often a thread that waits looks whether its client is still there."""


def render(found: Iterable[samples.Sample]) -> str:
    """One exposition: a family for each name. Labels tell its samples apart.

    Prometheus refuses all for one sample that comes twice, or for a name that two families have. Of such samples the
    first stands.
    """
    text: bytes = exposition.generate_latest(_Families(found))  # type: ignore[no-untyped-call]
    return text.decode()


class _Families:
    """What prometheus_client calls a registry."""

    def __init__(self, found: Iterable[samples.Sample]) -> None:
        self._families: dict[str, Metric] = {}
        self._taken: set[str] = set()
        """What samples of the families may be called (OpenMetrics 1.0, "Suffixes")."""

        families: dict[tuple[str, bool], Metric | None] = {}
        known: set[tuple[int, tuple[tuple[str, str], ...]]] = set()
        labels: dict[str, str] = {}
        labels_key: tuple[tuple[str, str], ...] = ()
        for sample in found:
            kind = sample.name, sample.is_gauge
            if kind not in families:
                families[kind] = self._family(*kind)
            if (family := families[kind]) is None:
                continue
            if sample.labels is not labels:  # samples of one block have the same
                labels, labels_key = sample.labels, tuple(sorted(sample.labels.items()))
            if (key := (id(family), labels_key)) not in known:
                known.add(key)
                suffix = "" if sample.is_gauge else "_total"
                family.samples.append(Line(f"{family.name}{suffix}", sample.labels, sample.value))

    def _family(self, name: str, is_gauge: bool) -> Metric | None:
        """A new family, or one that has samples; None: its names are another's."""
        new = (GaugeMetricFamily if is_gauge else CounterMetricFamily)(name, name)
        if (old := self._families.get(new.name)) is not None:
            return old if old.type == new.type else None
        names = {new.name} if is_gauge else {new.name, f"{new.name}_total", f"{new.name}_created"}
        if names & self._taken:
            return None
        self._taken |= names
        self._families[new.name] = new
        return new

    def collect(self) -> Iterator[Metric]:
        return iter([self._families[name] for name in sorted(self._families)])


class Latest:
    """The text, made by one thread at a time. Threads that wait for it get one that was begun after they had asked."""

    def __init__(self, read: Callable[[], Iterable[samples.Sample]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._begun_s = float("-inf")
        self._text = b""

    def text(self, is_awaited: Callable[[], bool]) -> bytes:
        """Raises ConnectionAbortedError if it is not awaited any more before its turn."""
        asked_s = time.monotonic()
        while not self._lock.acquire(timeout=LOOK_S):
            if not is_awaited():
                raise ConnectionAbortedError
        try:
            if self._begun_s <= asked_s:
                begun_s = time.monotonic()
                self._text, self._begun_s = render(self._read()).encode(), begun_s
                if (took_s := time.monotonic() - begun_s) > CLIENT_S:
                    say(f"the text, {len(self._text):,} bytes, took {took_s:.0f} s; a client has {CLIENT_S:.0f} s")
            return self._text
        finally:
            self._lock.release()


def say(what: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed: the server goes on
        print(f"sennit metrics: {what}", file=sys.stderr, flush=True)


class Handler(http.server.BaseHTTPRequestHandler):
    """The handler of GET and HEAD of /metrics."""

    server: Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        body = self.server.latest.text(lambda: self.server.has(self.connection))
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        del format, arguments


class Server(http.server.ThreadingHTTPServer):
    """Answers each client in a thread, which ends with the client's time."""

    request_queue_size = CLIENTS_MAX

    def __init__(self, family: int, address: tuple[Any, ...]) -> None:
        self.address_family = family
        self._clients: dict[socket.socket, float] = {}
        """Connected clients and when their time is over, the oldest first."""

        self._lock = threading.Lock()
        self.latest = Latest(lambda: samples.read())
        super().__init__(address, Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            only = self.server_address[0] != "::"
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        # (HTTPServer would ask a name server for the name of this host, and may wait for it.)
        socketserver.TCPServer.server_bind(self)
        self.server_port = self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            over = [next(iter(self._clients))] if len(self._clients) >= CLIENTS_MAX else []
            self._clients[request] = time.monotonic() + CLIENT_S
        self._drop(over)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called between two clients, and every half second."""
        now_s = time.monotonic()
        with self._lock:
            over = [client for client, end_s in self._clients.items() if end_s <= now_s]
        self._drop(over)

    def has(self, client: socket.socket) -> bool:
        """Whether the client is still to be answered."""
        with self._lock:
            return client in self._clients

    def _drop(self, clients: Iterable[socket.socket]) -> None:
        for client in clients:
            with self._lock:
                if self._clients.pop(client, None) is None:
                    continue
                # Its thread sees the end of the connection, and closes it. (Closed already: no error.)
                try:
                    client.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no event. Anything else is a fault of ours, or of the machine."""
        del request
        if not isinstance(error := sys.exception(), OSError):
            say(f"no answer to {client_address[0]}: {error!r}")


def server(address: str, port: int) -> Server:
    """A bound server, to be run by `serve_forever`; port 0 takes a free port.

    `address`: of IPv4 or IPv6, or a name; `*` or nothing: all addresses of this machine, of both kinds if it has both.
    Raises OSError if the address is not available.
    """
    if address in ("", "*"):
        try:
            return Server(socket.AF_INET6, ("::", port))
        except OSError:  # a machine without IPv6, or a port that is taken, which is then said of IPv4
            return Server(socket.AF_INET, ("0.0.0.0", port))
    family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return Server(family, found)
