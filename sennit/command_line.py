# SPDX-License-Identifier: Apache-2.0
"""What the commands share: output width, errors, and checks of files named by options."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# A file or pipe has no width. The widest table needs this much.
PIPE_WIDTH: Final = 160
# sysexits.h, EX_UNAVAILABLE: this machine lacks something, and the message says what.
EXIT_UNAVAILABLE: Final = 69
ANOTHER_FILE: Final = "choose a file in a folder with room that can be written"
FIGURE_SUFFIXES: Final = (".png", ".svg", ".pdf")


def stdout_console() -> Console:
    # Imported late, so that --help stays quick.
    from rich.console import Console

    # Without markup: rich would take `[mpi]` in an advice to install for a style, and not show it.
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, markup=False)


def red(text: str) -> Text:
    """What is wrong in a table: red on a terminal, plain elsewhere."""
    from rich.text import Text

    return Text(text, style="red")


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """While the block runs, says on a terminal (stderr) what goes on and for how long. For all that may take 2 s."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    console = Console(stderr=True, markup=False)
    # What the block prints goes above the line, but into a file or pipe as ever.
    to_terminal = sys.stdout.isatty()
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=to_terminal, disable=not console.is_terminal
    ) as line:
        line.add_task(what, total=None)
        yield


def fail(reason: object, code: int = 1) -> NoReturn:
    """Ends a command with one line that says why."""
    typer.echo(f"error: {reason}", err=True)
    raise typer.Exit(code) from None


def writable_file(path: Path | None) -> Path | None:
    """Callback of an option that names a file: creates its folder now, not after minutes of measuring."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"{path} cannot be written: {error.strerror}; {ANOTHER_FILE}") from None
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written: a folder, or no permission; {ANOTHER_FILE}")
    return path


def write_json(path: Path, content: object) -> None:
    """Writes what a command found. Ends the command if that fails."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file. Ends the command if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}; {ANOTHER_FILE}")


def figure_file(path: Path | None) -> Path | None:
    """Callback of an option that names a figure. It needs matplotlib."""
    if path is not None:
        if path.suffix not in FIGURE_SUFFIXES:
            raise typer.BadParameter(f"{path}; allowed: names that end in {', '.join(FIGURE_SUFFIXES)}")
        require_package("matplotlib")
    return writable_file(path)


def require_package(module: str) -> None:
    """Raises ModuleNotFoundError at once, where it would only be raised after minutes of measuring."""
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
