# SPDX-License-Identifier: Apache-2.0
"""`make figures`: measures the figures of docs/performance.json anew, and makes the pages of them.

A row's `source` names a command of `sennit` that writes `--json`, and for each column where that has the figure
(JMESPath). A command whose figures of two runs stand side by side runs twice. What has been measured is written
after each command. Figures of a busy machine are refused.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import jmespath

from sennit.errors import FormatError
from sennit.runtime.calibrate import machine
from sennit.testbed.bench import quiet
from sennit.testbed.bench.figures import performance_page
from sennit.testbed.bench.figures.figures import Cell, Figures, Number, Row

RUNS: Final = 2
SETTLE_S: Final = 3.0
"""Processes of a command may end so long after it."""

WHERE: Final = ("processor", "cores", "load_average")
"""What a run of the page says of the machine."""

Measure = Callable[[str], dict[str, Any]]
"""A command -> the JSON that it wrote, with `machine` before it ran, and the fields of `quiet.Watch.noted`."""


class NotThereError(FormatError):
    """A report lacks the figure of a cell: a peer did not run."""


def commands(figures: Figures) -> list[str]:
    """The commands that rows name, each once, in the order of the page."""
    return list(dict.fromkeys(row.source["command"] for _, row in _rows(figures) if row.source is not None))


def measured(figures: Figures, command: str, measure: Measure) -> list[str]:
    """Runs a command, and changes the rows that it gives. Returns those that it did not give, and why.

    Raises ValueError if the machine was busy.
    """
    key = f"sennit {command}"
    rows = [row for _, row in _rows(figures) if row.source is not None and row.source["command"] == command]
    reports: list[dict[str, Any]] = []
    while not reports or (len(reports) < RUNS and _gives_a_number(rows, reports[0])):
        reports.append(measure(command))
        quiet.require(reports[-1], key)
    where = reports[0]["machine"]
    figures.runs[key] = {"measured": str(where["time_utc"]).partition("T")[0]}
    figures.runs[key] |= {name: where[name] for name in WHERE}
    # The most of all runs whose figures stand side by side.
    figures.runs[key][quiet.OTHERS] = [
        max(used) for used in zip(*(report[quiet.OTHERS] for report in reports), strict=True)
    ]
    missing = []
    for table in figures.tables:
        for place, row in enumerate(table.rows):
            if row.source is not None and row.source["command"] == command:
                try:
                    table.rows[place] = _renewed(row, key, reports)
                except NotThereError as error:
                    missing.append(f"{table.name}: {row.name}: {error}")
    if not any(row.run == key for _, row in _rows(figures)):
        del figures.runs[key]
    return missing


def _gives_a_number(rows: Sequence[Row], report: dict[str, Any]) -> bool:
    """Whether a cell has one number of each run. One with a list, or with words, has those of one run."""
    wanted = [each for row in rows if row.source is not None for each in row.source["figures"]]
    return any(isinstance(each, str) and isinstance(jmespath.search(each, report), int | float) for each in wanted)


def _renewed(row: Row, key: str, reports: Sequence[dict[str, Any]]) -> Row:
    assert row.source is not None
    found = zip(row.source["figures"], row.cells, strict=True)
    return replace(
        row, cells=[cell if wanted is None else _cell(row, wanted, reports) for wanted, cell in found], run=key
    )


def _cell(row: Row, wanted: str | dict[str, Any], reports: Sequence[dict[str, Any]]) -> Cell:
    """`wanted`: an expression; or several, and the text around them."""
    scale = 1 if row.source is None else row.source.get("scale", 1)

    def find(expression: str, report: dict[str, Any]) -> Any:
        value = jmespath.search(expression, report)
        if value is None or value == [] or (isinstance(value, list) and None in value):
            raise NotThereError(f"no {expression}")
        return value

    def rounded(value: float) -> Number:
        value *= scale
        if row.digits is not None:
            return round(value, row.digits)
        return round(value) if abs(value) >= 100 else float(f"{value:.{2 if abs(value) < 10 else 3}g}")

    if isinstance(wanted, dict):
        return str(wanted["text"]).format(*(rounded(find(each, reports[0])) for each in wanted["of"]))
    values = [find(wanted, report) for report in reports]
    match values[0]:
        case dict():
            return {name: rounded(value) for name, value in values[0].items()}
        case list():
            return [rounded(value) for value in values[0]]
    return [rounded(value) for value in values]


def _rows(figures: Figures) -> Iterator[tuple[str, Row]]:
    return ((table.name, row) for table in figures.tables for row in table.rows)


def _run(folder: Path) -> Measure:
    path = folder.resolve() / "figures.json"
    # In the VM `sennit` is found as here, and one folder is written for real.
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}

    def measure(command: str) -> dict[str, Any]:
        print(f"figures: sennit {command}", flush=True)
        path.unlink(missing_ok=True)  # what another command has left is not this one's
        words = shlex.split(command)
        is_in_vm = words[:2] == ["testbed", "vm"]
        if is_in_vm:
            words[2:2] = ["--bring-back", str(path.parent)]
        time.sleep(SETTLE_S)
        where = machine.describe()
        # Benchmarks say themselves how busy others were, scenarios do not.
        with quiet.watched(is_forced=True):
            subprocess.run(
                [sys.executable, "-m", "sennit", *words, "--json", str(path)],
                env=environment,
                check=True,
                stdout=subprocess.DEVNULL,
            )
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            # A guest sees nothing of what its host does beside it.
            if quiet.BUSY not in found or is_in_vm:
                time.sleep(SETTLE_S)
                found = dict(quiet.noted(found))
            return {**found, "machine": where}

    return measure


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make figures")
    parser.add_argument("docs", type=Path)
    parser.add_argument("--only", default="", help="commands that begin with this")
    asked = parser.parse_args(arguments)
    path = asked.docs / performance_page.FIGURES
    figures = Figures.read(path)
    wanted = [command for command in commands(figures) if command.startswith(asked.only)]
    if not wanted:
        parser.error(f"no command begins with {asked.only!r}; allowed: {'; '.join(commands(figures))}")
    folder = Path("build/figures")
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for command in wanted:
        try:
            failed += measured(figures, command, _run(folder))
        except subprocess.CalledProcessError as error:
            # The command has said why it failed: the machine is busy, or lacks something.
            failed.append(f"sennit {command}: ended with {error.returncode}")
            continue
        except ValueError as error:
            failed.append(str(error))
            continue
        path.write_text(figures.without_unused_runs().text(), encoding="utf-8")
        performance_page.main([str(asked.docs)])
    for text in failed:
        print(f"figures: not measured: {text}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
