# SPDX-License-Identifier: Apache-2.0
"""The command line of `sennit aggregate`. Its modules are imported when it runs, so that `--help` stays quick."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sennit.command_line import fail

if TYPE_CHECKING:
    from sennit.transport.aggregator import Aggregator

# The longest that a signal waits, if it comes between two calls.
SLICE_S = 0.5


def aggregate(
    bind: Annotated[
        list[str] | None, typer.Option(metavar="ADDRESS", help="an address of this machine; may be repeated; all")
    ] = None,
    port: Annotated[int, typer.Option(help="UDP port, 0 for any", min=0, max=65_535)] = 4793,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="for blocks of all jobs together")] = "256MiB",
    interval: Annotated[
        float, typer.Option(help="seconds between two lines of counters; 0: at the end, and on SIGUSR1", min=0.0)
    ] = 0.0,
    native: Annotated[bool, typer.Option("--native", help="use UDP sockets alone")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print objects of JSON, one a line")] = False,
) -> None:
    """Sum vectors of AllReduce for the ranks of other machines, in the network.

    Ranks find it by SENNIT_AGGREGATOR=HOST:PORT. Ctrl-C ends it.
    """
    from sennit.transport.aggregator import Aggregator
    from sennit.transport.errors import ConfigError, SennitError
    from sennit.transport.sizes import format_size, parse_size

    del native
    try:
        try:
            memory_bytes = parse_size(memory)
        except ValueError as error:
            raise ConfigError(f"--memory: {error}") from None
        aggregator = Aggregator(bind or (), port=port, memory_bytes=memory_bytes)
    except SennitError as error:
        fail(error)
    where = ", ".join(bind) if bind else "all addresses"
    if as_json:
        _say(
            as_json, {"mode": "native", "port": aggregator.port, "addresses": bind or [], "memory_bytes": memory_bytes}
        )
    else:
        typer.echo(f"ready: native, port {aggregator.port} of {where}, {format_size(memory_bytes)}")
    _serve(aggregator, interval, lambda: _say(as_json, _report(aggregator)))


def _serve(aggregator: Aggregator, interval_s: float, report: Callable[[], None]) -> None:
    """Answers until SIGTERM or an interrupt."""
    asked = {"end": False, "report": False}

    def note(what: str) -> Callable[[int, FrameType | None], None]:
        return lambda number, frame: asked.update({what: True})

    wanted = {signal.SIGTERM: "end", signal.SIGINT: "end", signal.SIGUSR1: "report"}
    before = {number: signal.signal(number, note(what)) for number, what in wanted.items()}
    try:
        next_s = time.monotonic() + interval_s
        while not asked["end"]:
            aggregator.run(min(SLICE_S, interval_s) if interval_s else SLICE_S)
            if asked["report"] or (interval_s and time.monotonic() >= next_s):
                asked["report"] = False
                next_s = time.monotonic() + interval_s
                report()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    report()


def _report(aggregator: Aggregator) -> dict[str, Any]:
    return {"counters": aggregator.counters(), "jobs": [asdict(job) for job in aggregator.jobs()]}


def _say(as_json: bool, content: Mapping[str, Any]) -> None:
    """For people: the counters that are not 0."""
    if as_json:
        typer.echo(json.dumps(content))
        return
    counted = ", ".join(f"{name} {number:,}" for name, number in content["counters"].items() if number)
    typer.echo(f"{len(content['jobs'])} jobs; {counted or 'no packet'}")
