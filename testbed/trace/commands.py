# SPDX-License-Identifier: Apache-2.0
"""`sennit trace`: sessions on tracepoints. Each command imports what it needs late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from sennit.testbed.command_line import EXIT_UNAVAILABLE, stdout_console, writable_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Watch the native core through its tracepoints, as root. Of all processes, of one, or of a command.",
)

SESSION = {"allow_interspersed_args": False}

Command = Annotated[list[str] | None, typer.Argument(help="run this, best after --, and end with it")]
Process = Annotated[int | None, typer.Option("--pid", help="only this process; all that use this library without")]
Seconds = Annotated[float | None, typer.Option(help="end after so long; without, at an interrupt", min=0.1)]
Interval = Annotated[float, typer.Option(help="seconds between two tables; 0: only one, at the end", min=0)]
Json = Annotated[Path | None, typer.Option("--json", help="also write the last table here", callback=writable_file)]


@app.command("list")
def list_() -> None:
    """Name the tracepoints of this installation, with the widths of their arguments."""
    from sennit.ebpf import usdt
    from sennit.transport import tracepoints
    from sennit.transport.errors import Unsupported

    try:
        path = tracepoints.library()
        found = usdt.read(path)
    except Unsupported as error:
        _fail(str(error))
    for point in found:
        widths = " ".join(f"{argument.size_bytes}" for argument in point.arguments)
        typer.echo(f"{path}:{point.provider}:{point.name} {widths}")
    if not found:
        _fail(f"{path} was built without sys/sdt.h (Debian: systemtap-sdt-dev): install it, then build again")


@app.command(context_settings=SESSION)
def ops(
    command: Command = None,
    process: Process = None,
    seconds: Seconds = None,
    interval: Interval = 0,
    by_rank: Annotated[bool, typer.Option("--by-rank", help="each rank in a row of its own")] = False,
    json_path: Json = None,
) -> None:
    """Latency and throughput of collectives and messages, by kind and size."""
    from sennit.testbed.trace import ops

    _session(
        ops.PROGRAM, ops.PROBES, command, process, seconds, interval, json_path,
        collect=lambda program: ops.collect(program, by_rank=by_rank), table=ops.table,
    )  # fmt: skip


@app.command(context_settings=SESSION)
def loss(
    command: Command = None,
    process: Process = None,
    seconds: Seconds = None,
    interval: Interval = 0,
    json_path: Json = None,
) -> None:
    """What is lost on which path, how soon that is known, and what is sent again where."""
    from sennit.testbed.trace import loss

    _session(
        loss.PROGRAM, loss.PROBES, command, process, seconds, interval, json_path,
        collect=loss.collect, table=loss.table,
    )  # fmt: skip


@app.command()
def headers() -> None:
    """Unpack kernel headers for bcc into the cache, where those of the running kernel are not installed (Debian)."""
    from sennit.testbed.trace import kernel_headers
    from sennit.testbed.vm import debian

    if kernel_headers.installed():
        typer.echo("bcc finds kernel headers by itself")
        return
    try:
        typer.echo(f"{kernel_headers.provide()}")
    except (debian.Unavailable, debian.StepFailed) as error:
        _fail(str(error))


def _session(
    program_name: str,
    probes: Sequence[str],
    command: list[str] | None,
    process: int | None,
    seconds: float | None,
    interval_s: float,
    json_path: Path | None,
    *,
    collect: Callable[[Any], list[Any]],
    table: Callable[[list[Any]], Table],
) -> None:
    from sennit.testbed.trace import session
    from sennit.transport.errors import Unsupported

    try:
        program = session.open_program(program_name, probes, process)
    except (session.SessionError, Unsupported) as error:
        _fail(str(error))
    who = "every process" if process is None else f"process {process}"
    until = "" if command or seconds else "; an interrupt ends it"
    typer.echo(f"sennit trace: {len(probes)} tracepoints of {who}{until}", err=True)
    console = stdout_console()
    try:
        code = session.run(command or [], seconds, interval_s, lambda: console.print(table(collect(program))))
        rows = collect(program)
    except OSError as error:
        _fail(f"{(command or [''])[0]}: {error.strerror}")
    finally:
        program.cleanup()
    console.print(table(rows))
    if not rows:
        typer.echo("nothing was seen: did the processes use this installation's library?", err=True)
    if json_path is not None:
        json_path.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    raise typer.Exit(code)


def _fail(message: str) -> NoReturn:
    typer.echo(f"sennit trace: {message}", err=True)
    raise typer.Exit(EXIT_UNAVAILABLE)
