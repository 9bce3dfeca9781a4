# SPDX-License-Identifier: Apache-2.0
"""Counters as OpenMetrics text, which Prometheus scrapes (https://prometheus.io/docs/specs/om/open_metrics_spec/)."""

from __future__ import annotations

import http.server
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from sennit.runtime.telemetry import samples

CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def render(found: Iterable[samples.Sample]) -> str:
    """One exposition: a family for each name. Labels tell its samples apart."""
    families: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for sample in found:
        labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
        suffix = "" if sample.is_gauge else "_total"
        families[sample.name, sample.is_gauge].append(f"{sample.name}{suffix}{{{labels}}} {sample.value}")
    lines = []
    for (name, is_gauge), rows in sorted(families.items()):
        lines += [f"# TYPE {name} {'gauge' if is_gauge else 'counter'}", *rows]
    return "\n".join([*lines, "# EOF\n"])


class Handler(http.server.BaseHTTPRequestHandler):
    """The handler of GET /metrics."""

    # A client that connects and says nothing is disconnected.
    timeout = 5.0

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        body = render(samples.read()).encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        del format, arguments


def server(address: str, port: int) -> http.server.ThreadingHTTPServer:
    """A bound server, to be run by `serve_forever`; port 0 takes a free port.

    Raises OSError if the address is not available.
    """
    return http.server.ThreadingHTTPServer((address, port), Handler)
