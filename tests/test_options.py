# SPDX-License-Identifier: Apache-2.0
"""Options of a command that are fields of a dataclass."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from sennit.errors import ConfigError, Unsupported
from sennit.options import Option, check, with_options
from sennit.transport.sizes import parse_size

HERE = Path("here")


def parse(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    folder: Annotated[Path, Option(flag="--store")]
    """Folder of rows."""

    size: Annotated[int, Option(metavar="SIZE", parse=parse_size)]
    """Memory for rows, such as 64MiB."""

    gpu_size: Annotated[int | None, Option(parse=parse_size)] = None
    """GPU memory for rows."""

    timeout_s: float = 60.0
    """No option."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    steps: Annotated[int, Option(low=1, high=9)] = 3
    """Steps of the
    run. The second sentence is for programs."""

    rate: Annotated[float, Option(above=0, below=2)] = 0.5
    """L2 rate."""

    wait_s: Annotated[float | None, Option(flag="--wait", above=0, high=60)] = None
    """Wait for `steps` or `wait_s`, not `this`; default: for ever."""

    decay: Annotated[float, Option(low=0)] = 0.0
    """Decay."""

    kind: Annotated[str, Option(choices=("plain", "fast"))] = "plain"
    """How it runs."""

    model: Annotated[str, Option(help="small, or package.module:factory")] = "small"
    """No help."""

    widths: Annotated[tuple[int, ...], Option(parse=parse, text=lambda widths: ",".join(map(str, widths)))] = (8, 4)
    """Widths of the model."""

    again: Annotated[bool, Option()] = False
    """Go on."""

    store: Store | None = None
    """No option: its fields are."""

    apart: int = 0
    """No option."""

    def __post_init__(self) -> None:
        check(self)


def run(*arguments: str) -> tuple[int, str, list[Any]]:
    """Status, output, and what the command got."""
    got: list[Any] = []

    def command(
        *,
        first: Annotated[int, typer.Option(help="an option of its own")] = 0,
        settings: Settings,
        last: Annotated[bool, typer.Option("--last")] = False,
    ) -> None:
        """Do it."""
        got.extend([first, settings, last])
        if last:
            raise Unsupported("gpu", "none is here")

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(with_options(command))
    done = CliRunner(env={"TERMINAL_WIDTH": "160"}).invoke(app, list(arguments))
    return done.exit_code, done.output, got


def test_the_help_has_an_option_for_each_field_in_its_order() -> None:
    status, output, _ = run("--help")
    assert status == 0
    lines = [" ".join(line.split()) for line in output.partition("Options:")[2].splitlines() if line]
    # Names of types are typer's.
    lines = [re.sub(r" (<\w+>|INTEGER|FLOAT|TEXT|PATH)(?= )", "", line) for line in lines]
    assert lines == [
        "--first an option of its own [default: 0]",
        "--steps steps of the run [default: 3]",
        "--rate L2 rate [default: 0.5]",
        "--wait wait for --steps or --wait, not this; default: for ever",
        "--decay decay [default: 0.0]",
        "--kind how it runs: plain, fast [default: plain]",
        "--model small, or package.module:factory [default: small]",
        "--widths widths of the model [default: 8,4]",
        "--again go on",
        "--store folder of rows",
        "--size SIZE memory for rows, such as 64MiB",
        "--gpu-size GPU memory for rows",
        "--last",
        "--help Show this message and exit.",
    ]


def test_a_command_gets_what_a_program_would_make() -> None:
    assert run() == (0, "", [0, Settings(), False])
    given = ["--first=7", "--steps=9", "--wait=60", "--kind=fast", "--widths=2", "--again"]
    place = ["--store=here", "--size=1MiB", "--gpu-size=2KiB"]
    store = Store(folder=HERE, size=1 << 20, gpu_size=2048)
    settings = Settings(steps=9, wait_s=60, kind="fast", widths=(2,), again=True, store=store)
    assert run(*given, *place) == (0, "", [7, settings, False])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", 0, " 0; allowed: 1 to 9"),
        ("steps", 10, " 10; allowed: 1 to 9"),
        ("rate", 0.0, " 0.0; allowed: above 0, below 2"),
        ("rate", 2.0, " 2.0; allowed: above 0, below 2"),
        ("rate", float("nan"), " nan; allowed: above 0, below 2"),
        ("wait", 60.5, " 60.5; allowed: above 0, at most 60"),
        ("decay", -0.5, " -0.5; allowed: 0 or more"),
        ("kind", "slow", " 'slow'; allowed: plain, fast"),
        ("kind", "fsat", " 'fsat'; allowed: plain, fast; did you mean fast?"),
    ],
)
def test_what_is_not_allowed_is_refused_on_the_command_line_and_in_programs(
    field: str, value: Any, message: str
) -> None:
    """The error has the name that was written there."""
    assert run(f"--{field}={value}") == (1, f"error: --{field}{message}\n", [])
    name = "wait_s" if field == "wait" else field
    with pytest.raises(ConfigError, match=f"^{re.escape(name + message)}$"):
        Settings(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--store=here"], "--store without --size; allowed: both, or neither"),
        (["--size=1MiB"], "--size without --store; allowed: both, or neither"),
        (["--gpu-size=1MiB"], "--gpu-size without --store; allowed: both, or neither"),
        (["--size=1MB"], "--size: size '1MB': expected a number with one of B, KiB, MiB, GiB, TiB"),
        (["--widths=x"], "--widths: invalid literal for int() with base 10: 'x'"),
        (["--last"], "gpu: none is here"),
    ],
)
def test_every_error_is_one_line(arguments: list[str], message: str) -> None:
    assert run(*arguments)[:2] == (1, f"error: {message}\n")
