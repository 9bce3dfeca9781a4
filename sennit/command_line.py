# SPDX-License-Identifier: Apache-2.0
"""What the commands share: output, its width and its end, errors, and checks of files named by options."""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO

import typer

from sennit.errors import ConfigError, SennitError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# A file or pipe has no width. The widest table needs this much.
PIPE_WIDTH: Final = 160
# sysexits.h, EX_UNAVAILABLE: this machine lacks something, and the message says what.
EXIT_UNAVAILABLE: Final = 69
# EX_IOERR
EXIT_NO_OUTPUT: Final = 74
ANOTHER_FILE: Final = "choose a file in a folder with room that can be written"
ANOTHER_FOLDER: Final = "choose another folder"
FIGURE_SUFFIXES: Final = (".png", ".svg", ".pdf")
# Plain letters for terminals that have ASCII or Latin-1 alone. Bars become digits.
PLAIN: Final = str.maketrans(
    {
        "µ": "u",
        "×": "x",
        "·": ".",
        "…": "...",
        "→": "->",
        "–": "-",
        "≥": ">=",
        "≤": "<=",
        "²": "2",
        "━": "-",
        "╸": "-",
        "✓": "ok",
    }
    | {bar: f"{height}" for height, bar in enumerate("▁▂▃▄▅▆▇█", 1)}
)


class OutputLost(OSError, SennitError):
    """Standard output or standard error cannot be written."""


class ReaderGone(OutputLost, BrokenPipeError):
    """It is a pipe whose reader has gone, as `head` does. That is no fault, and nobody is told."""


class _Stream(io.FileIO):
    """What is below `sys.stdout`: tells a failure of it from every other OSError."""

    def write(self, content: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(content)
        except BrokenPipeError as error:
            raise ReaderGone(error.errno, error.strerror) from None
        except OSError as error:
            raise OutputLost(error.errno, error.strerror) from None


def watch_output() -> None:
    """From now on `sys.stdout` and `sys.stderr` raise `OutputLost` where they cannot be written.

    A letter that their encoding lacks becomes a plain one.
    """
    codecs.register_error("sennit", _plain)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        buffer = getattr(stream, "buffer", None)
        old = getattr(buffer, "raw", buffer)  # (With -u, Python has no buffer.)
        # Tests, and programs that call a command, have other streams.
        if isinstance(old, io.FileIO) and not isinstance(old, _Stream):
            stream.flush()
            new = _Stream(stream.fileno(), "wb", closefd=False)
            replaced = io.TextIOWrapper(
                new if old is buffer else io.BufferedWriter(new),
                stream.encoding,
                errors="sennit",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, replaced)


@contextlib.contextmanager
def output() -> Iterator[None]:
    """Around a command. Its output fits every terminal, and the command ends in order where it cannot be written.

    A closed pipe ends the command without a word, as `| head` does, with 1. Any other failure, such as a full disk, is
    said in one line, with 74.
    """
    watch_output()
    try:
        try:
            yield
        finally:
            # Now, because at the end of Python nobody could say it.
            if sys.stdout is not None:
                sys.stdout.flush()
    except OutputLost as error:
        sys.exit(give_up_output(error))


def give_up_output(error: OutputLost) -> int:
    """What could not be written goes nowhere. One line says why, unless a reader has gone. Returns the exit code."""
    is_gone = isinstance(error, ReaderGone)
    _discard(sys.stdout)
    if not is_gone:
        with contextlib.suppress(OutputLost):
            print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
    _discard(sys.stderr)
    return 1 if is_gone else EXIT_NO_OUTPUT


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end].translate(PLAIN)
    return found.encode(error.encoding, "replace").decode(error.encoding), error.end


def _discard(stream: TextIO) -> None:
    """If the stream cannot be written, its text goes nowhere: Python would complain of it at its end."""
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def stdout_console() -> Console:
    # Imported late, so that --help stays quick.
    from sennit.fitting_console import FittingConsole

    # Without markup: rich would take `[mpi]` in an advice to install for a style, and not show it.
    return FittingConsole(width=None if sys.stdout.isatty() else PIPE_WIDTH, markup=False, highlight=False)


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


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """As `busy`, without a thread: for a process whose forks will be ranks."""
    text = f"loading {what}"
    shown = sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None
    try:
        if shown is not None:
            print(text, end="", file=shown, flush=True)
        yield
    finally:
        if shown is not None:
            print(f"\r{' ' * len(text)}\r", end="", file=shown, flush=True)


def fail(reason: object, code: int = 1) -> NoReturn:
    """Ends a command with one line that says why. What `output` says itself it raises again."""
    if isinstance(reason, OutputLost):
        raise reason
    typer.echo(f"error: {reason}", err=True)
    raise typer.Exit(code) from None


def printable(text: str) -> str:
    """What strangers have named, such as a file, for a terminal, which takes some letters for orders.

    Letters that do not show, or turn others round, stand as Python writes them.
    """
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def listen_address(option: str, value: str, example: str) -> tuple[str, int]:
    """ADDRESS:PORT of an option in its parts; an IPv6 address stays in its brackets."""
    address, separator, port = value.rpartition(":")
    is_plain = ":" not in address or (address.startswith("[") and address.endswith("]"))
    if not separator or not is_plain or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65_535:
        raise typer.BadParameter(f"{option} {value}, must be ADDRESS:PORT, such as {example}")
    return address, int(port)


def check_writable(path: Path, option: str = "") -> None:
    """Creates the folder of a file that a command will write: now, not after minutes of work.

    Raises `ConfigError` for a file that cannot be written, which it names behind the option, such as "--json".
    """
    named = f"{option} {path}".strip()
    if path == Path("-"):
        raise ConfigError(f"{named} is no name of a file; give one, such as ./report")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_writable = not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)
    except OSError as error:
        raise ConfigError(f"{named} cannot be written: {error.strerror}; {ANOTHER_FILE}") from None
    if not is_writable:
        raise ConfigError(f"{named} cannot be written: a folder, or no permission; {ANOTHER_FILE}")


def check_folder(path: Path, option: str = "") -> None:
    """The same for a folder that a command will write into."""
    named = f"{option} {path}".strip()
    try:
        path.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(path, os.W_OK)
    except OSError as error:
        raise ConfigError(f"{named} cannot be written: {error.strerror}; {ANOTHER_FOLDER}") from None
    if not is_writable:
        raise ConfigError(f"{named} cannot be written: no permission; {ANOTHER_FOLDER}")


def writable_file(path: Path | None) -> Path | None:
    """Callback of an option that names a file: `check_writable`."""
    return _tried(path, check_writable)


def writable_folder(path: Path | None) -> Path | None:
    """Callback of an option that names a folder: `check_folder`."""
    return _tried(path, check_folder)


def _tried(path: Path | None, check: Callable[[Path], None]) -> Path | None:
    if path is not None:
        try:
            check(path)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from None
    return path


def json_text(content: object, indent: int = 1) -> str:
    """The content as JSON, which knows no NaN and no infinity: null stands for numbers that are not finite.

    Of objects that JSON does not know, `str()` is written.
    """
    plain = json.loads(json.dumps(content, default=str), parse_constant=lambda name: None)
    return json.dumps(plain, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def write_whole(path: Path, text: str, check: Callable[[Path], object] = lambda written: None) -> None:
    """Writes a file whole or not at all, in a folder that may have to be made. Raises `SennitError`.

    `check` reads the new file before it replaces an old one, and raises what is wrong. What must not be replaced is
    written where it is, unchecked.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not is_replaceable(path):
            path.write_text(text, encoding="utf-8")
            return
        partial.write_text(text, encoding="utf-8")
        check(partial)
        partial.replace(path)
    except OSError as error:
        raise SennitError(f"{path} cannot be written: {error.strerror}; {ANOTHER_FILE}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def is_replaceable(path: Path) -> bool:
    """Not a link, a device such as /dev/stdout, a pipe, or a file in a folder where this process can make none."""
    return not path.is_symlink() and (not path.exists() or (path.is_file() and os.access(path.parent, os.W_OK)))


def write_json(path: Path, content: object) -> None:
    """Writes what a command found. Ends the command if that fails."""
    write_text(path, json_text(content))


def write_text(path: Path, text: str) -> None:
    """Writes a file, whole or not at all. Ends the command if that fails."""
    try:
        write_whole(path, text)
    except SennitError as error:
        fail(error)


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
