# SPDX-License-Identifier: Apache-2.0
"""`sennit top` and `sennit metrics`. Each imports what it needs late."""

from __future__ import annotations

import contextlib
import itertools
from typing import Annotated

import typer

from sennit.testbed.command_line import stdout_console


def top(
    interval: Annotated[float, typer.Option(help="seconds between two looks", min=0.1)] = 1.0,
    paths: Annotated[bool, typer.Option("--paths", help="every path as well")] = False,
    once: Annotated[bool, typer.Option("--once", help="one look: everything since each rank began")] = False,
) -> None:
    """The ranks of this machine: operations, throughput, losses, round trips, paths. An interrupt ends it."""
    from rich.console import Group
    from rich.live import Live

    from sennit.testbed.telemetry import top as view
    from sennit.testbed.telemetry.rates import RankRates

    def shown(ranks: list[RankRates]) -> Group:
        tables = [view.ranks_table(ranks), *([view.paths_table(ranks)] if paths else [])]
        return Group(*tables) if ranks else Group("no rank of this user runs here")

    console = stdout_console()
    looks = view.looks(interval)
    if once:
        console.print(shown(next(looks)))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        for ranks in itertools.islice(looks, 1, None):
            live.update(shown(ranks), refresh=True)


def metrics(
    listen: Annotated[
        str | None, typer.Option(help="ADDRESS:PORT to answer GET /metrics on; without it, one text on stdout")
    ] = None,
) -> None:
    """Counters of this machine's ranks in the OpenMetrics format, for Prometheus."""
    from sennit.testbed.telemetry import openmetrics
    from sennit.transport import counters

    if listen is None:
        typer.echo(openmetrics.render(counters.pages()), nl=False)
        return
    address, separator, port = listen.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65_535:
        raise typer.BadParameter(f"--listen {listen}, must be ADDRESS:PORT, such as 127.0.0.1:9464")
    try:
        server = openmetrics.server(address.strip("[]"), int(port))
    except OSError as error:
        typer.echo(f"sennit metrics: {listen}: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    with server, contextlib.suppress(KeyboardInterrupt):
        typer.echo(f"sennit metrics: http://{address}:{server.server_port}/metrics", err=True)
        server.serve_forever()
