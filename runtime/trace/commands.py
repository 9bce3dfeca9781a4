# SPDX-License-Identifier: Apache-2.0
"""`sennit trace`: sessions on tracepoints. Each command imports its modules when it runs."""

from __future__ import annotations

import contextlib
import functools
import importlib
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from sennit.command_line import ANOTHER_FILE, EXIT_UNAVAILABLE, busy, stdout_console, writable_file, write_json

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
Interval = Annotated[
    float, typer.Option(help="seconds between two tables of what came since; 0: one table at the end", min=0)
]
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
    _session("ops", command, process, seconds, interval, json_path, by_rank=by_rank)


def _add_plain(name: str, example: str, what: str) -> None:
    """Adds a session without options of its own."""

    @app.command(name, help=what, context_settings=SESSION, epilog=f"Example: sennit trace {example}")
    def run(
        command: Command = None,
        process: Process = None,
        seconds: Seconds = None,
        interval: Interval = 0,
        json_path: Json = None,
    ) -> None:
        _session(name, command, process, seconds, interval, json_path)


_add_plain(
    "loss",
    "loss --seconds 10",
    "Show the losses of each path, how soon they were noticed, and where packets were sent again.",
)
_add_plain("paths", "paths --interval 1", "Show packets, bytes, losses, round trips and states of each path.")


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
    _session("stalls", command, process, seconds, interval, json_path, by_peer=by_peer)


_add_plain(
    "ingest",
    "ingest --interval 1",
    "Show whether batches from feeders wait for the trainer, or the trainer for them; and what was lost or refused.",
)


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
    from sennit.runtime.trace.target import SessionError

    try:
        flow = Flow(peer=None if peer is None else ip_address(peer), qpn=qpn, source_port=source_port)
    except ValueError as error:
        raise typer.BadParameter(f"{error}", param_hint="--peer") from None
    try:
        capture = PacketCapture(interface, flow, write, count)
    except SessionError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{write}: {error.strerror}; {ANOTHER_FILE}")
    try:
        with capture, session.interrupts() as interrupted:
            typer.echo(f"sennit trace: packets of {interface} to {write}", err=True)

            def drain() -> bool:
                # The last wanted packet ends the capture, but not a command.
                return capture.drain() and not command

            watched = session.run(command or [], seconds, DRAIN_EVERY_S, drain, interrupted)
            dropped, was_interrupted = capture.dropped(), interrupted()
    except OSError as error:
        _fail(f"{(command or [''])[0]}: {error.strerror}; give a program that can be started behind --")
    typer.echo(f"{write}: {capture.packets:,} packets, {dropped:,} dropped")
    # The capture is over. The command beside it goes on.
    with session.interrupts() as interrupted:
        raise typer.Exit(session.end(watched, lambda: interrupted() or was_interrupted))


@app.command(epilog="Example: sennit trace headers")
def headers() -> None:
    """Unpack the kernel headers that `ops` and `loss` need into the cache, if they are not installed (Debian)."""
    from sennit import debian
    from sennit.runtime.trace import kernel_headers

    if kernel_headers.installed():
        typer.echo("bcc finds kernel headers by itself")
        return
    try:
        with busy("fetching the headers of this kernel"):
            path = kernel_headers.provide()
        typer.echo(str(path))
    except (debian.Unavailable, debian.StepFailed) as error:
        _fail(str(error))


def _session(
    name: str,
    command: list[str] | None,
    process: int | None,
    seconds: float | None,
    interval_s: float,
    json_path: Path | None,
    **choices: bool,
) -> None:
    """Runs the session of the module `name`: what `attach` opens, with tables of what `collect` finds by `choices`."""
    from sennit.runtime.trace import session
    from sennit.runtime.trace.target import SessionError, target_of, why_empty
    from sennit.transport.errors import Unsupported

    kind: Any = importlib.import_module(f"sennit.runtime.trace.{name}")
    with contextlib.ExitStack() as held:
        try:
            target = target_of(kind.LIBRARY, process)
            program = held.enter_context(kind.attach(target))
        except (SessionError, Unsupported) as error:
            _fail(str(error))
        interrupted = held.enter_context(session.interrupts())
        until = "" if command or seconds else "; an interrupt ends it"
        typer.echo(f"sennit trace: {len(kind.PROBES)} tracepoints of {target}{until}", err=True)
        console = stdout_console()
        collect = functools.partial(kind.collect, program, **choices)
        before: list[Any] = []

        def show() -> None:
            nonlocal before
            now = collect()
            console.print(kind.table(session.since(before, now)))
            before = now

        try:
            watched = session.run(command or [], seconds, interval_s, show, interrupted)
            rows = collect()
        except OSError as error:
            _fail(f"{(command or [''])[0]}: {error.strerror}; give a program that can be started behind --")
        uncounted = program.uncounted()
        was_interrupted = interrupted()
    if not rows:
        typer.echo(f"nothing was seen: {why_empty(target, kind.LIBRARY)}", err=True)
    if interval_s:
        console.print("the whole session:")
    console.print(kind.table(rows))
    if any(uncounted.values()):
        typer.echo(f"not counted: {uncounted['map_full']:,} hits for which there was no room, "
                   f"{uncounted['unmatched']:,} ends of what had begun before", err=True)  # fmt: skip
    if json_path is not None:
        write_json(json_path, {"rows": [row.as_json() for row in rows], "uncounted": uncounted})
    # The session is over. The command that it watched goes on.
    with session.interrupts() as interrupted:
        raise typer.Exit(session.end(watched, lambda: interrupted() or was_interrupted))


def _fail(message: str) -> NoReturn:
    typer.echo(f"sennit trace: {message}", err=True)
    raise typer.Exit(EXIT_UNAVAILABLE)
