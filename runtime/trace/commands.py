# SPDX-License-Identifier: Apache-2.0
"""`sennit trace`: sessions on tracepoints. Each command imports its modules when it runs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from sennit.command_line import EXIT_UNAVAILABLE, stdout_console, writable_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rich.console import RenderableType

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Watch running ranks through their tracepoints, as root: all of this machine, or one process.",
)

SESSION = {"allow_interspersed_args": False}

Command = Annotated[list[str] | None, typer.Argument(help="run this command and end with it; put it after --")]
Process = Annotated[
    int | None, typer.Option("--pid", help="watch only this process; default: all that use this installation")
]
Seconds = Annotated[float | None, typer.Option(help="end after this many seconds; default: at Ctrl-C", min=0.1)]
Interval = Annotated[float, typer.Option(help="seconds between two tables; 0: one table at the end", min=0)]
Json = Annotated[
    Path | None, typer.Option("--json", help="also write the last table to this file", callback=writable_file)
]


@app.command("list", epilog="Example: sennit trace list")
def list_() -> None:
    """List the tracepoints of this installation, with the sizes of their arguments in bytes."""
    from sennit.ebpf import usdt
    from sennit.offload import tracepoints as of_ingest
    from sennit.transport import tracepoints
    from sennit.transport.errors import Unsupported

    try:
        paths = [tracepoints.library(), of_ingest.library()]
    except Unsupported as error:
        _fail(str(error))
    for path in paths:
        found = usdt.read(path)
        for point in found:
            widths = " ".join(f"{argument.size_bytes}" for argument in point.arguments)
            typer.echo(f"{path}:{point.provider}:{point.name} {widths}")
        if not found:
            _fail(f"{path} was built without sys/sdt.h (Debian: systemtap-sdt-dev): install it, then build again")


@app.command(context_settings=SESSION, epilog="Example: sennit trace ops -- python program.py")
def ops(
    command: Command = None,
    process: Process = None,
    seconds: Seconds = None,
    interval: Interval = 0,
    by_rank: Annotated[bool, typer.Option("--by-rank", help="one row for each rank")] = False,
    json_path: Json = None,
) -> None:
    """Show latency and throughput of collectives and messages, by kind and size."""
    from sennit.runtime.trace import ops, session

    _session(
        session.open_bcc(ops.PROGRAM, ops.PROBES, process), len(ops.PROBES),
        command, process, seconds, interval, json_path,
        collect=lambda program: ops.collect(program, by_rank=by_rank), table=ops.table,
    )  # fmt: skip


@app.command(context_settings=SESSION, epilog="Example: sennit trace loss --seconds 10")
def loss(
    command: Command = None,
    process: Process = None,
    seconds: Seconds = None,
    interval: Interval = 0,
    json_path: Json = None,
) -> None:
    """Show the losses of each path, how soon they were noticed, and where packets were sent again."""
    from sennit.runtime.trace import loss, session

    _session(
        session.open_bcc(loss.PROGRAM, loss.PROBES, process), len(loss.PROBES),
        command, process, seconds, interval, json_path,
        collect=loss.collect, table=loss.table,
    )  # fmt: skip


@app.command(context_settings=SESSION, epilog="Example: sennit trace paths --interval 1")
def paths(
    command: Command = None,
    process: Process = None,
    seconds: Seconds = None,
    interval: Interval = 0,
    json_path: Json = None,
) -> None:
    """Show packets, bytes, losses, round trips and states of each path."""
    from sennit.runtime.trace import paths
    from sennit.runtime.trace.tracing import attached
    from sennit.transport import tracepoints

    _session(
        attached(paths.PROGRAM, paths.PROBES, tracepoints.library, process), len(paths.PROBES),
        command, process, seconds, interval, json_path,
        collect=paths.collect, table=paths.table,
    )  # fmt: skip


@app.command(context_settings=SESSION, epilog="Example: sennit trace stalls -- python program.py")
def stalls(
    command: Command = None,
    process: Process = None,
    seconds: Seconds = None,
    interval: Interval = 0,
    by_peer: Annotated[bool, typer.Option("--by-peer", help="also one row for each peer")] = False,
    json_path: Json = None,
) -> None:
    """Show what operations wait for: the network, the receiver's credit, or the reduction."""
    from sennit.runtime.trace import stalls
    from sennit.runtime.trace.tracing import attached
    from sennit.transport import tracepoints

    _session(
        attached(stalls.PROGRAM, stalls.PROBES, tracepoints.library, process), len(stalls.PROBES),
        command, process, seconds, interval, json_path,
        collect=lambda tracing: stalls.collect(tracing, by_peer=by_peer), table=stalls.table,
    )  # fmt: skip


@app.command(context_settings=SESSION, epilog="Example: sennit trace ingest --interval 1")
def ingest(
    command: Command = None,
    process: Process = None,
    seconds: Seconds = None,
    interval: Interval = 0,
    json_path: Json = None,
) -> None:
    """Show whether batches from feeders wait for the trainer, or the trainer for them; and what was lost or refused."""
    from sennit.offload import tracepoints
    from sennit.runtime.trace import ingest
    from sennit.runtime.trace.tracing import attached

    _session(
        attached(ingest.PROGRAM, ingest.PROBES, tracepoints.library, process), len(ingest.PROBES),
        command, process, seconds, interval, json_path,
        collect=ingest.collect, table=ingest.table,
    )  # fmt: skip


@app.command(context_settings=SESSION, epilog="Example: sennit trace packets --interface eth0 --write flow.pcapng")
def packets(
    interface: Annotated[str, typer.Option(help="network interface to capture at")],
    write: Annotated[Path, typer.Option(help="pcap-ng file to write", metavar="FILE", callback=writable_file)],
    command: Command = None,
    peer: Annotated[str | None, typer.Option(help="only to or from this IP address", metavar="ADDRESS")] = None,
    qpn: Annotated[int | None, typer.Option(help="only to this queue pair", min=0, max=0xFFFFFF)] = None,
    source_port: Annotated[int | None, typer.Option(help="only from this UDP port", min=1, max=65535)] = None,
    count: Annotated[int | None, typer.Option(help="end after this many packets", min=1)] = None,
    seconds: Seconds = None,
) -> None:
    """Write the RoCEv2 packets of an interface to a file for Wireshark."""
    from ipaddress import ip_address

    from sennit.runtime.trace import session
    from sennit.runtime.trace.packets import DRAIN_EVERY_S, Flow, PacketCapture

    try:
        flow = Flow(peer=None if peer is None else ip_address(peer), qpn=qpn, source_port=source_port)
    except ValueError as error:
        raise typer.BadParameter(f"{error}", param_hint="--peer") from None
    try:
        capture = PacketCapture(interface, flow, write, count)
    except session.SessionError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{write}: {error.strerror}")
    typer.echo(f"sennit trace: packets of {interface} to {write}", err=True)
    try:
        with capture:
            # The last wanted packet ends the capture, but not a command.
            code = session.run(command or [], seconds, DRAIN_EVERY_S, lambda: capture.drain() and not command)
            dropped = capture.dropped()
    except OSError as error:
        _fail(f"{(command or [''])[0]}: {error.strerror}")
    typer.echo(f"{write}: {capture.packets:,} packets, {dropped:,} dropped")
    raise typer.Exit(code)


@app.command(epilog="Example: sennit trace headers")
def headers() -> None:
    """Unpack the kernel headers that `ops` and `loss` need into the cache, if they are not installed (Debian)."""
    from sennit import debian
    from sennit.runtime.trace import kernel_headers

    if kernel_headers.installed():
        typer.echo("bcc finds kernel headers by itself")
        return
    try:
        typer.echo(f"{kernel_headers.provide()}")
    except (debian.Unavailable, debian.StepFailed) as error:
        _fail(str(error))


def _session(
    opening: AbstractContextManager[Any],
    probes: int,
    command: list[str] | None,
    process: int | None,
    seconds: float | None,
    interval_s: float,
    json_path: Path | None,
    *,
    collect: Callable[[Any], list[Any]],
    table: Callable[[list[Any]], RenderableType],
) -> None:
    from sennit.runtime.trace import session
    from sennit.transport.errors import Unsupported

    with contextlib.ExitStack() as held:
        try:
            program = held.enter_context(opening)
        except (session.SessionError, Unsupported) as error:
            _fail(str(error))
        who = "every process" if process is None else f"process {process}"
        until = "" if command or seconds else "; an interrupt ends it"
        typer.echo(f"sennit trace: {probes} tracepoints of {who}{until}", err=True)
        console = stdout_console()
        try:
            code = session.run(command or [], seconds, interval_s, lambda: console.print(table(collect(program))))
            rows = collect(program)
        except OSError as error:
            _fail(f"{(command or [''])[0]}: {error.strerror}")
        # (bcc's sessions do not count this.)
        uncounted = program.uncounted() if hasattr(program, "uncounted") else None
    console.print(table(rows))
    if not rows:
        typer.echo("nothing was seen: did the processes use this installation's library?", err=True)
    if uncounted is not None and any(uncounted.values()):
        typer.echo(f"not counted: {uncounted['map_full']:,} hits for which there was no room, "
                   f"{uncounted['unmatched']:,} ends of what had begun before", err=True)  # fmt: skip
    if json_path is not None:
        found: object = [row.as_json() for row in rows]
        document = found if uncounted is None else {"rows": found, "uncounted": uncounted}
        json_path.write_text(json.dumps(document, indent=1) + "\n")
    raise typer.Exit(code)


def _fail(message: str) -> NoReturn:
    typer.echo(f"sennit trace: {message}", err=True)
    raise typer.Exit(EXIT_UNAVAILABLE)
