# SPDX-License-Identifier: Apache-2.0
"""`sennit top` and `sennit metrics`. Each imports what it needs late."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Annotated

import typer

from sennit.testbed.command_line import EXIT_UNAVAILABLE, stdout_console


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
    listen: Annotated[str | None, typer.Option(help="ADDRESS:PORT to answer GET /metrics on, for Prometheus")] = None,
    otlp: Annotated[
        str | None, typer.Option(help="URL of an OpenTelemetry collector, which is sent everything")
    ] = None,
    interval: Annotated[float, typer.Option(help="seconds between two sendings with --otlp", min=0.1)] = 10.0,
) -> None:
    """Counters of this machine's ranks and RDMA devices: served, sent, or else written once, as OpenMetrics text."""
    from sennit.testbed.telemetry import openmetrics, samples

    if listen is not None and otlp is not None:
        raise typer.BadParameter("--listen and --otlp: one of them")
    if otlp is not None:
        _send(otlp, interval)
        return
    if listen is None:
        typer.echo(openmetrics.render(samples.read()), nl=False)
        return
    address, separator, port = listen.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65_535:
        raise typer.BadParameter(f"--listen {listen}, must be ADDRESS:PORT, such as 127.0.0.1:9464")
    try:
        server = openmetrics.server(address.strip("[]"), int(port))
    except OSError as error:
        typer.echo(f"sennit metrics: {listen}: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    with server, _until_ended():
        typer.echo(f"sennit metrics: http://{address}:{server.server_port}/metrics", err=True)
        server.serve_forever()


@contextlib.contextmanager
def _until_ended() -> Iterator[None]:
    """SIGTERM, which ends services, and an interrupt are the orderly end."""

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _send(endpoint: str, interval_s: float) -> None:
    if importlib.util.find_spec("opentelemetry.exporter") is None:
        typer.echo("sennit metrics: the OpenTelemetry SDK is not installed: pip install 'sennit[telemetry]'", err=True)
        raise typer.Exit(EXIT_UNAVAILABLE)
    from sennit.testbed.telemetry.otlp import Exporter

    with _until_ended(), contextlib.closing(Exporter(endpoint)) as exporter:
        typer.echo(f"sennit metrics: to {endpoint} every {interval_s:g} s; an interrupt ends it", err=True)
        while True:
            if not exporter.send():
                typer.echo(f"sennit metrics: {endpoint} did not take it; trying again in {interval_s:g} s", err=True)
            time.sleep(interval_s)
