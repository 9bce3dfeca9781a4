# SPDX-License-Identifier: Apache-2.0
"""`sennit trace`: sessions on tracepoints. Each command imports its modules when it runs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from sennit.command_line import (
    EXIT_UNAVAILABLE,
    OutputLost,
    ReaderGone,
    busy,
    give_up_output,
    stdout_console,
    writable_file,
    write_json,
)
from sennit.errors import SennitError

if TYPE_CHECKING:
    from sennit.runtime.trace.watched import Watched

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Watch running ranks through their tracepoints, as root: all of this machine, or one process.",
)

SESSION = {"allow_interspersed_args": False}
ROWS_MAX: Final = 1000
"""Of a table on the screen: any user's process may count as 65,536 paths, which take minutes to show."""

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
    with _watching(command or []) as watched:
        with capture:
            typer.echo(f"sennit trace: packets of {interface} to {write}", err=True)

            def drain() -> bool:
                # The last wanted packet ends the capture, but not a command.
                return capture.drain() and not command

            watched.watch(seconds, DRAIN_EVERY_S, drain)
            dropped = capture.dropped()
        typer.echo(f"{write}: {capture.packets:,} packets, {dropped:,} dropped")


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
    from sennit.runtime.trace.target import SessionError, not_seen, target_of, why_empty
    from sennit.transport.errors import Unsupported

    kind: Any = importlib.import_module(f"sennit.runtime.trace.{name}")
    with contextlib.ExitStack() as attached:
        try:
            target = target_of(kind.LIBRARY, process)
            program = attached.enter_context(kind.attach(target))
        except (SessionError, Unsupported) as error:
            _fail(str(error))
        console = stdout_console()

        def show_table(found: list[Any]) -> None:
            console.print(kind.table(found[:ROWS_MAX]))
            if len(found) > ROWS_MAX:
                typer.echo(f"and {len(found) - ROWS_MAX:,} more rows; --json FILE has all of the session", err=True)

        is_said = False

        def hint() -> None:
            """Says once who is not seen: at the start, or as soon as they are there and nothing was seen."""
            nonlocal is_said
            if not is_said and (others := not_seen(target, kind.LIBRARY)):
                typer.echo(f"not seen: {others}", err=True)
                is_said = True

        with _watching(command or []) as watched:
            with attached.pop_all():
                until = "" if command or seconds else "; an interrupt ends it"
                typer.echo(f"sennit trace: {len(kind.PROBES)} tracepoints of {target}{until}", err=True)
                hint()
                collect = functools.partial(kind.collect, program, **choices)
                before: list[Any] = []

                def show() -> None:
                    nonlocal before
                    now = collect()
                    if not now:
                        hint()
                    show_table(session.since(before, now))
                    before = now

                watched.watch(seconds, interval_s, show)
                rows, uncounted = collect(), program.uncounted()
            if not rows:
                typer.echo(f"nothing was seen: {why_empty(target, kind.LIBRARY)}", err=True)
            if interval_s:
                console.print("the whole session:")
            show_table(rows)
            if any(uncounted.values()):
                typer.echo(f"not counted: {uncounted['map_full']:,} hits for which there was no room, "
                           f"{uncounted['unmatched']:,} ends of what had begun before", err=True)  # fmt: skip
            if json_path is not None:
                write_json(json_path, {"rows": [row.as_json() for row in rows], "uncounted": uncounted})


@contextlib.contextmanager
def _watching(command: list[str]) -> Iterator[Watched]:
    """Around a session. What fails in it is said, and ends the session alone. The command goes on, and this one ends
    when it has ended: with its exit code, or that of the failure if that is 0.
    """
    from sennit.runtime.trace.watched import Watched

    with Watched(command) as watched:
        code = 0
        try:
            yield watched
        except Exception as error:
            if watched.started is None and isinstance(error, OutputLost | typer.Exit):
                raise
            code = _tell(error)
        if watched.is_running:
            with contextlib.suppress(OutputLost):
                typer.echo(f"sennit trace: the session has ended, process {watched.started} goes on", err=True)
        code = watched.wait() or code
    raise typer.Exit(code)


def _tell(error: Exception) -> int:
    """Says what ended a session, if nobody has. Returns the exit code: a reader that has gone is no failure."""
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, OutputLost):
        code = give_up_output(error)
        return 0 if isinstance(error, ReaderGone) else code
    with contextlib.suppress(OutputLost):
        if isinstance(error, SennitError | OSError):
            typer.echo(f"sennit trace: {error}", err=True)
            return EXIT_UNAVAILABLE
        traceback.print_exception(error)
    return 1


def _fail(message: str) -> NoReturn:
    typer.echo(f"sennit trace: {message}", err=True)
    raise typer.Exit(EXIT_UNAVAILABLE)
