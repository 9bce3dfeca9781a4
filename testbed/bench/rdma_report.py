# SPDX-License-Identifier: Apache-2.0
"""Shows the result of `sennit bench rdma`: goodput each way, the share that is kept, CPU time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from sennit.testbed.bench.transport.rdma import NONE, Report, Row, describe


def render(report: Report, console: Console) -> None:
    """One line per netem setting, then the CPU time."""
    table = Table(
        title=describe(report.settings),
        caption="kept: of the first row's goodput; of ideal: of what the delay leaves, with so many in flight",
    )
    table.add_column("in flight", justify="right")
    table.add_column("netem")
    for peer in report.settings.peers:
        for what in (f"{peer}, MB/s each way", "kept", "of ideal"):
            table.add_column(what, justify="right")
    for row in report.rows:
        is_first = row is report.base(row)
        if is_first:
            table.add_section()
        cells = [cell for peer in report.settings.peers for cell in _cells(report, row, peer)]
        table.add_row(str(row.in_flight) if is_first else "", row.netem or NONE, *cells)
    console.print(table)
    for peer, samples in report.cpu_s_per_gb.items():
        console.print(f"CPU of the whole VM, {peer}: {_spread(samples)} s a GB sent and received by each rank")


def _cells(report: Report, row: Row, peer: str) -> Sequence[str]:
    ideal = report.of_ideal(row, peer)
    return (
        f"{report.goodput(row, peer) / 1e6:.3g}",
        "" if row is report.base(row) else f"{report.kept(row, peer):.0%}",
        "" if ideal is None else f"{ideal:.0%}",
    )


def _spread(samples: list[float]) -> str:
    return f"{statistics.median(samples):.1f} ({min(samples):.1f} to {max(samples):.1f})"
