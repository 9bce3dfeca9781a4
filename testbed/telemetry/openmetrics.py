# SPDX-License-Identifier: Apache-2.0
"""Counters as OpenMetrics text, which Prometheus scrapes (https://prometheus.io/docs/specs/om/open_metrics_spec/).

A counter that RDMA devices have is exported under their name as well as ours would be understood: with the prefix
`sennit_`, and `rdma_` names where the kernel's hw_counters have one (`STANDARD_NAMES`).
"""

from __future__ import annotations

import http.server
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from sennit.transport import counters

CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PREFIX: Final = "sennit_"
# Ours -> what mlx5 and rxe call the same (drivers/infiniband/hw/mlx5/counters.c, sw/rxe/rxe_hw_counters.c).
STANDARD_NAMES: Final = {
    "data_bytes_sent": "rdma_tx_bytes",
    "data_bytes_received": "rdma_rx_bytes",
    "data_packets_sent": "rdma_tx_packets",
    "data_packets_received": "rdma_rx_packets",
    "duplicate_packets": "duplicate_request",
    "bad_icrc": "rx_icrc_encapsulated",
}
GAUGES: Final = frozenset({"window_packets", "rtt_us", "rto_us", "state", "registered_bytes"})
UNUSED: Final = "none"
"""The reason that no refused packet has."""


def exported_name(name: str) -> str:
    return PREFIX + STANDARD_NAMES.get(name, name)


def render(pages: Iterable[counters.Page]) -> str:
    """One exposition: a family for each counter, a sample for each rank, peer and path that has it."""
    families: dict[str, list[str]] = defaultdict(list)
    gauges: set[str] = set()
    for page in pages:
        for block in page.blocks:
            labels = {"rank": page.rank, "process": page.process, "group": block.group}
            labels |= {"peer": block.peer} if block.peer is not None else {}
            labels |= {"path": block.path} if block.path is not None else {}
            text = ",".join(f'{key}="{value}"' for key, value in labels.items())
            for name, value in block.values.items():
                if name == UNUSED:
                    continue
                family = exported_name(name)
                if name in GAUGES:
                    gauges.add(family)
                families[family].append(f"{family}{'' if name in GAUGES else '_total'}{{{text}}} {value}")
    lines = []
    for family in sorted(families):
        lines += [f"# TYPE {family} {'gauge' if family in gauges else 'counter'}", *families[family]]
    return "\n".join([*lines, "# EOF\n"])


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET /metrics."""

    # Somebody who connects and says nothing is let go.
    timeout = 5.0

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        body = render(counters.pages()).encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        del format, arguments


def server(address: str, port: int) -> http.server.ThreadingHTTPServer:
    """Bound, to be run by `serve_forever`; port 0 takes a free one.

    Raises OSError where the address cannot be had.
    """
    return http.server.ThreadingHTTPServer((address, port), Handler)
