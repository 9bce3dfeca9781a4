# SPDX-License-Identifier: Apache-2.0
"""Tables on narrow terminals: no figure loses a digit."""

from __future__ import annotations

import io
import json
import random
import re
import sys

import pytest
from rich.console import Group
from rich.progress import BarColumn, Progress
from rich.table import Table
from rich.text import Text

from sennit.fitting_console import FittingConsole
from tests.terminal import run_on_terminal


def shown(width: int, *content: Table) -> list[str]:
    file = io.StringIO()
    FittingConsole(file=file, width=width, markup=False, highlight=False).print(Group(*content))
    return file.getvalue().splitlines()


def made(rng: random.Random) -> tuple[Table, list[str]]:
    """A table, and the words in its cells."""
    headings = [" ".join("abcdefgh"[: rng.randint(1, 8)] for _ in range(rng.randint(1, 3))) for _ in range(6)]
    table = Table(headings[0], title="What it shows", box=rng.choice([None, Table().box]), pad_edge=rng.random() < 0.5)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=rng.random() < 0.3)
    words: list[str] = []
    for _ in range(rng.randint(1, 4)):
        cells = [rng.choice(["", f"{rng.randint(0, 10**9):,}", "two words"]) for _ in headings]
        table.add_row(*(Text(cell, style="red") if rng.random() < 0.5 else cell for cell in cells))
        words += " ".join(cells).split()
    return table, words


def test_no_word_is_cut_at_any_width(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        table, words = made(rng)
        for width in (14, 30, 45, 60, 80, 200):
            lines = shown(width, table)
            assert all(len(line) <= width for line in lines), lines
            found = re.findall(r"[\w,…]+", "\n".join(lines))
            assert not [word for word in words if found.count(word) < words.count(word)], lines


def test_a_table_that_fits_stays_a_table() -> None:
    table = Table("name", "figure of a kind")
    table.add_row("one", "12,345.6")
    assert shown(80, table)[1] == "┃ name ┃ figure of a kind ┃"
    # A heading is wrapped first, and then a row is a block.
    assert [line for line in shown(22, table) if "12,345.6" in line] == ["│ one  │ 12,345.6    │"]
    assert [line.rstrip() for line in shown(15, table)] == ["name one", "  figure of a", "kind  12,345.6"]


def test_a_progress_bar_is_left_alone() -> None:
    file = io.StringIO()
    console = FittingConsole(file=file, width=20, force_terminal=True)
    with Progress(BarColumn(), console=console) as bar:
        bar.add_task("", total=2, completed=1)
    assert "━━━" in file.getvalue()


@pytest.mark.parametrize("columns", [40, 80])
def test_explain_shows_every_figure(columns: int) -> None:
    command = [sys.executable, "-m", "sennit", "explain", "allreduce", "16MiB", "--ranks", "64", "--hosts", "8"]
    _, found = run_on_terminal([*command, "--json"], timeout_s=60, columns=200)
    _, table = run_on_terminal(command, timeout_s=60, columns=columns, NO_COLOR="1")
    for row in json.loads(found)["algorithms"]:
        for figure in (f"{row['sent_to_other_hosts_bytes'] / 1024:,.1f}", f"{row['estimated_s'] * 1e6:,.0f}"):
            assert figure in table, table
