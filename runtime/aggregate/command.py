# SPDX-License-Identifier: Apache-2.0
"""The command line of `sennit aggregate`. Its modules are imported when it runs, so that `--help` stays quick."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sennit.command_line import fail

if TYPE_CHECKING:
    from sennit.runtime.aggregate.serving import Serving

# The longest that a signal waits, if it comes between two calls.
SLICE_S = 0.5


def aggregate(
    interface: Annotated[
        str | None, typer.Argument(help="where packets arrive, to be summed by XDP; none: UDP sockets alone")
    ] = None,
    bind: Annotated[
        list[str] | None, typer.Option(metavar="ADDRESS", help="an address of this machine; may be repeated; all")
    ] = None,
    port: Annotated[int, typer.Option(help="UDP port; without XDP 0 takes any", min=0, max=65_535)] = 4793,
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
    from sennit.ebpf.library import BpfError
    from sennit.offload.interfaces import interface_index
    from sennit.runtime.aggregate.serving import Serving
    from sennit.transport.errors import ConfigError, SennitError
    from sennit.transport.sizes import format_size, parse_size

    try:
        try:
            memory_bytes = parse_size(memory)
        except ValueError as error:
            raise ConfigError(f"--memory: {error}") from None
        if interface is not None:
            interface_index(interface)
        uses_xdp = interface is not None and not native
        if uses_xdp and port == 0:
            raise ConfigError("--port 0 with XDP; allowed: 1 to 65535")
        serving = Serving(interface if uses_xdp else None, addresses=bind or (), port=port, memory_bytes=memory_bytes)
    except (SennitError, BpfError) as error:
        fail(error)
    with serving:
        if serving.why_native:
            typer.echo(f"note: {serving.why_native}; UDP sockets alone do it, as with --native", err=True)
        if serving.left_out:
            typer.echo(f"note: sockets alone for {', '.join(serving.left_out)}; XDP takes 8 addresses", err=True)
        where = ", ".join(bind) if bind else "all addresses"
        at = f" at {interface}" if serving.mode != "native" else ""
        if as_json:
            ready = {"mode": serving.mode, "port": serving.port, "addresses": bind or [], "memory_bytes": memory_bytes}
            _say(as_json, ready)
        else:
            typer.echo(f"ready: {serving.mode}{at}, port {serving.port} of {where}, {format_size(memory_bytes)}")
        _serve(serving, interval, lambda: _say(as_json, serving.report()))


def _serve(serving: Serving, interval_s: float, report: Callable[[], None]) -> None:
    """Answers until SIGTERM or an interrupt."""
    asked = {"end": False, "report": False}

    def note(what: str) -> Callable[[int, FrameType | None], None]:
        return lambda number, frame: asked.update({what: True})

    wanted = {signal.SIGTERM: "end", signal.SIGINT: "end", signal.SIGUSR1: "report"}
    before = {number: signal.signal(number, note(what)) for number, what in wanted.items()}
    try:
        next_s = time.monotonic() + interval_s
        while not asked["end"]:
            serving.run(min(SLICE_S, interval_s) if interval_s else SLICE_S)
            if asked["report"] or (interval_s and time.monotonic() >= next_s):
                asked["report"] = False
                next_s = time.monotonic() + interval_s
                report()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    report()


def _say(as_json: bool, content: Mapping[str, Any]) -> None:
    """For people: the counters that are not 0."""
    if as_json:
        typer.echo(json.dumps(content))
        return
    counted = ", ".join(f"{name} {number:,}" for name, number in content["counters"].items() if number)
    typer.echo(f"{len(content['jobs'])} jobs; {counted or 'no packet'}")
