# SPDX-License-Identifier: Apache-2.0
"""`sennit top` and `sennit metrics`. Each imports its modules when it runs."""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from sennit.command_line import EXIT_UNAVAILABLE, listen_address, stdout_console


def top(
    interval: Annotated[float, typer.Option(help="seconds between two updates", min=0.1)] = 1.0,
    paths: Annotated[bool, typer.Option("--paths", help="also show every path")] = False,
    once: Annotated[
        bool, typer.Option("--once", help="print one table, counted from the start of each rank, and end")
    ] = False,
) -> None:
    """Show the ranks of this machine as they run: throughput, losses, round trips, batches from feeders, new ids.

    An aggregator has a table of its own.
    Ctrl-C ends it.
    """
    from rich.console import Group
    from rich.live import Live

    from sennit.runtime.telemetry import top as view

    def shown(look: view.Look) -> Group:
        tables = [view.ranks_table(look.ranks)] if look.ranks else []
        tables += [view.paths_table(look.ranks)] if look.ranks and paths else []
        tables += [view.ingests_table(look.ingests)] if look.ingests else []
        tables += [view.ids_table(look.ids)] if look.ids else []
        tables += [view.aggregators_table(look.aggregators)] if look.aggregators else []
        said = [] if tables else ["no rank or aggregator of this user runs here"]
        return Group(*tables, *said, *([view.left_out_text(look.left_out)] if look.left_out else []))

    console = stdout_console()
    looks = view.looks(interval)
    if once:
        console.print(shown(next(looks)))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        for look in itertools.islice(looks, 1, None):
            live.update(shown(look), refresh=True)


def metrics(
    listen: Annotated[str | None, typer.Option(help="serve GET /metrics for Prometheus at ADDRESS:PORT")] = None,
    otlp: Annotated[str | None, typer.Option(help="send to the OpenTelemetry collector at this URL")] = None,
    bpffs: Annotated[bool, typer.Option("--bpffs", help="publish as pinned BPF maps, for bpftool (root)")] = False,
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="with --bpffs: a BPF file system, if not /sys/fs/bpf")
    ] = None,
    interval: Annotated[float, typer.Option(help="seconds between two updates of --otlp and --bpffs", min=0.1)] = 10.0,
) -> None:
    """Export the counters of this machine's ranks and RDMA devices.

    Without an option, print them once as OpenMetrics text.
    """
    if (listen is not None) + (otlp is not None) + bpffs > 1:
        raise typer.BadParameter("--listen, --otlp and --bpffs: one of them")
    if directory is not None and not bpffs:
        raise typer.BadParameter(f"{directory}: only --bpffs takes a directory")
    if bpffs:
        _publish(directory, interval)
        return
    if otlp is not None:
        _send(otlp, interval)
        return
    from sennit.runtime.telemetry import openmetrics, samples

    if listen is None:
        typer.echo(openmetrics.render(samples.read()), nl=False)
        return
    address, port = listen_address("--listen", listen, "127.0.0.1:9464")
    try:
        server = openmetrics.server(address.strip("[]"), port)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no name of a host"
        typer.echo(f"sennit metrics: {listen}: {reason}", err=True)
        raise typer.Exit(1) from None
    with server, _until_ended():
        typer.echo(f"sennit metrics: http://{address or '*'}:{server.server_port}/metrics", err=True)
        server.serve_forever()


@contextlib.contextmanager
def _until_ended() -> Iterator[None]:
    """Makes SIGTERM, which ends services, and an interrupt end the command in order."""

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
    from sennit import surroundings
    from sennit.runtime.telemetry.otlp import Exporter

    with _until_ended(), contextlib.closing(Exporter(endpoint)) as exporter:
        typer.echo(f"sennit metrics: to {endpoint} every {interval_s:g} s; an interrupt ends it", err=True)
        while True:
            if not exporter.send():
                why = "" if (behind := surroundings.proxy()).fine else f" ({behind.what}; {behind.remedy})"
                typer.echo(
                    f"sennit metrics: {endpoint} did not take it{why}; trying again in {interval_s:g} s", err=True
                )
            time.sleep(interval_s)


def _publish(directory: Path | None, interval_s: float) -> None:
    from sennit.ebpf import kernel_features
    from sennit.ebpf.library import BpfError
    from sennit.ebpf.pins import BPFFS
    from sennit.runtime.telemetry.bpf_maps import Publisher
    from sennit.transport import counters

    maps = kernel_features.probe("map")
    if not maps.available:
        typer.echo(f"sennit metrics: BPF maps: {maps.absent_because}; {maps.remedy}", err=True)
        raise typer.Exit(EXIT_UNAVAILABLE)
    with _until_ended():
        try:
            publisher = Publisher(directory or BPFFS)
        except BpfError as error:
            typer.echo(f"sennit metrics: {error.strerror}", err=True)
            raise typer.Exit(EXIT_UNAVAILABLE) from None
        with publisher:
            typer.echo(f"sennit metrics: {publisher.path} every {interval_s:g} s; an interrupt ends it", err=True)
            said: set[tuple[str, str]] = set()
            while True:
                publisher.publish(counters.pages())
                for what, why in publisher.refused.items() - said:
                    typer.echo(f"sennit metrics: not all of {what!r} is in maps: {why}", err=True)
                said = set(publisher.refused.items())
                time.sleep(interval_s)
