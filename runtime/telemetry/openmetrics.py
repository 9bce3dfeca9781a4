# SPDX-License-Identifier: Apache-2.0
"""Counters as OpenMetrics text, which Prometheus scrapes (https://prometheus.io/docs/specs/om/open_metrics_spec/).

prometheus_client writes the text. The server is ours: it keeps no client longer than `CLIENT_S`, and of more than
`CLIENTS_MAX` clients the newest, so that none of them can hold it up.
"""

from __future__ import annotations

import http.server
import socket
import socketserver
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition

from sennit.runtime.telemetry import samples

CONTENT_TYPE: Final = exposition.CONTENT_TYPE_LATEST
CLIENT_S: Final = 10.0
"""Seconds that a client has, from its connection to its answer."""

CLIENTS_MAX: Final = 32


def render(found: Iterable[samples.Sample]) -> str:
    """One exposition: a family for each name. Labels tell its samples apart."""
    text: bytes = exposition.generate_latest(_Families(found))  # type: ignore[no-untyped-call]
    return text.decode()


class _Families:
    """What prometheus_client calls a registry."""

    def __init__(self, found: Iterable[samples.Sample]) -> None:
        self._families: dict[str, Metric] = {}
        known: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        for sample in found:
            new = (GaugeMetricFamily if sample.is_gauge else CounterMetricFamily)(sample.name, sample.name)
            family = self._families.setdefault(new.name, new)
            # Prometheus would refuse all for one sample that comes twice, or in a family of another type.
            key = family.name, tuple(sorted(sample.labels.items()))
            if family.type == new.type and key not in known:
                known.add(key)
                suffix = "" if sample.is_gauge else "_total"
                family.add_sample(f"{family.name}{suffix}", sample.labels, sample.value)

    def collect(self) -> Iterator[Metric]:
        return iter([self._families[name] for name in sorted(self._families)])


class Handler(http.server.BaseHTTPRequestHandler):
    """The handler of GET and HEAD of /metrics."""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        body = render(samples.read()).encode()
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
        """A client that goes away in the middle is no event."""
        del request, client_address


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
