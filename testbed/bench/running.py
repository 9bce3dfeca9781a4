# SPDX-License-Identifier: Apache-2.0
"""What commands of `sennit bench` have in common: options, checks, and how a benchmark is run and reported."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

import typer

from sennit.command_line import busy, fail, figure_file, stdout_console, writable_file, write_json
from sennit.doctor import capabilities
from sennit.testbed.bench import quiet


class Update(Protocol):
    """Says what is measured, and how much of it is done."""

    def __call__(self, what: str, done: int | None = None, total: int | None = None, /) -> None: ...


@contextlib.contextmanager
def progress() -> Iterator[Update]:
    """Shows a line on a terminal. The line goes when measuring ends."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, markup=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done=None, total=None: bar.update(task, description=what, completed=done, total=total)


Figures = Annotated[Path | None, typer.Option("--json", help="write the figures to this file", callback=writable_file)]
Picture = Annotated[
    Path | None, typer.Option("--plot", help="write a figure to this file (.png, .svg, .pdf)", callback=figure_file)
]
Force = Annotated[bool, typer.Option("--force", help="write figures though others are busy; the file says so")]
WRITES: Final = ("json_path", "report")
"""Parameters of commands that name what figures are written to."""


def measured(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with one option more, `--force`. Without it, figures are written on a quiet machine only."""
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(*, force: bool = False, **given: Any) -> None:
        is_written = any(given.get(name) is not None for name in WRITES)
        with quiet.watched(is_forced=force) if is_written else contextlib.nullcontext():
            command(**given)

    more = inspect.Parameter("force", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Force)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), more])  # type: ignore[attr-defined]
    run.__annotations__ = {name: one.annotation for name, one in own.parameters.items()} | {"force": Force}
    return run


def need(*names: str) -> None:
    """Ends the command if this machine lacks a capability."""
    if reason := capabilities.missing(*names):
        fail(reason)


@contextlib.contextmanager
def mistakes_told() -> Iterator[None]:
    """Inside, a `ValueError` is a mistake in the command line."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def write(json_path: Path | None, figures: Mapping[str, Any]) -> None:
    """Writes the figures to `json_path`, if it is given, with the load of the machine."""
    if json_path is not None:
        write_json(json_path, quiet.noted(figures))


def run_ranks(
    bench: Any,
    json_path: Path | None,
    *,
    doing: str = "measuring in turns",
    around: contextlib.AbstractContextManager[object] | None = None,
    **settings: Any,
) -> None:
    """Runs a benchmark whose ranks are processes of this machine, with these settings of its module; shows and writes
    what came of it. `doing`: what is said meanwhile. `around`: entered while it runs.
    """
    from sennit.runtime.training.launch import RankFailure
    from sennit.transport.errors import SennitError

    with mistakes_told():
        chosen = bench.Settings(**settings)
    try:
        with busy(doing), around or contextlib.nullcontext():
            report = bench.run(chosen)
    except (RankFailure, SennitError) as error:
        fail(error)
    bench.render(report, stdout_console())
    write(json_path, report.as_json())
