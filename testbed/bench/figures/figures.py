# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/performance.json: tables of cells, each row with the command and the run that gave it.

`make figures` measures them, and no figure is typed by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Self

from sennit.testbed.bench import quiet

BETTER: Final = ("more", "less")
GOAL: Final = "goal"
"""The heading of a column with the goal of the column behind it. In other tables a row has the goals of those below."""

Number = int | float
Cell = list[Number] | dict[str, Number] | str | None
"""What a row has in a column: figures of one run or several; a median with `low` and `high`; words; or nothing."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table."""

    name: str
    cells: list[Cell]
    run: str | None = None
    """The key of its run. A row of goals has none."""

    id: str | None = None
    """The name by which pictures and other pages show its figures."""

    peer: str | None = None
    """Whose time the figures divide by sennit's: below 1, sennit is slower, and the README says so."""

    goal: bool = False
    """Whether the cells are the goals of the rows below."""

    better: str | None = None
    """`more` or `less`, where figures that are short of the goals above are bold."""

    unit: str = ""
    """The unit, written behind the last figure of a cell."""

    digits: int | None = None
    """Digits behind the point; None: as many as the figure has."""

    source: dict[str, Any] | None = None
    """How `make figures` measures it: `command`, words behind `sennit`; `figures`, for each column an expression
    (JMESPath) on the JSON, or `text` around several (`of`), or null for a goal; `scale`, a factor. A row of goals has
    none.
    """

    def __post_init__(self) -> None:
        if self.better not in (None, *BETTER):
            raise ValueError(f"row {self.name!r}: better {self.better!r}; allowed: {', '.join(BETTER)}")

    @property
    def is_behind(self) -> bool:
        """Whether sennit is slower than the peer in a column."""
        if self.peer is None:
            return False
        figures = [
            cell.values() if isinstance(cell, dict) else cell for cell in self.cells if isinstance(cell, list | dict)
        ]
        return any(min(found) < 1 for found in figures)

    def text(self, cell: Cell, goal: Cell) -> str:
        """The cell in Markdown. `goal`: what it is held against, if that is a number."""
        match cell:
            case None:
                return ""
            case str():
                return cell
            case {"median": median, "low": low, "high": high}:
                return f"{self.shown(median)} ({self.shown(low)} to {self.shown(high)})"
            case list():
                return self._listed(cell, goal[0] if isinstance(goal, list) and self.better is not None else None)
        raise ValueError(f"row {self.name!r}: cell {cell!r}; allowed: numbers, median with low and high, words, null")

    def _listed(self, figures: list[Number], goal: Number | None) -> str:
        """Neighbours that are both short of the goal, or both not, are bold together, or not."""
        groups: list[tuple[bool, list[str]]] = []
        for figure in figures:
            short = goal is not None and (figure < goal if self.better == "more" else figure > goal)
            if not groups or groups[-1][0] != short:
                groups.append((short, []))
            groups[-1][1].append(self.shown(figure))
        groups[-1][1][-1] += self.unit
        return ", ".join(f"**{', '.join(texts)}**" if short else ", ".join(texts) for short, texts in groups)

    def shown(self, figure: Number) -> str:
        if isinstance(figure, int):
            return f"{figure:,}"
        if self.digits is not None:
            return f"{figure:.{self.digits}f}"
        return f"{figure:.2f}" if figure < 1 else repr(figure)


@dataclass(frozen=True, kw_only=True)
class Table:
    """`columns`: the headings, that of the rows' names first."""

    name: str
    columns: list[str]
    rows: list[Row]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns) - 1:
                raise ValueError(f"table {self.name!r}, row {row.name!r}: {len(row.cells)} cells, not one a column")

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        rows = [Row(**row) for row in found["rows"]]
        return cls(name=found["name"], columns=found["columns"], rows=rows)

    def lines(self) -> Iterator[str]:
        """The table in Markdown."""
        yield _line(self.columns)
        yield _line(["---"] * len(self.columns))
        goals: list[Cell] = [None] * (len(self.columns) - 1)
        own = self.columns.index(GOAL) - 1 if GOAL in self.columns else None
        for row in self.rows:
            if own is not None:
                goals = [row.cells[own] if number == own + 1 else None for number in range(len(row.cells))]
            texts = [
                _goal(cell, row) if row.goal or number == own else row.text(cell, goals[number])
                for number, cell in enumerate(row.cells)
            ]
            yield _line([row.name, *texts])
            goals = row.cells if row.goal else goals


def _kept(row: Row) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    return {each.name: value for each in fields(row) if (value := getattr(row, each.name)) != each.default}


def _goal(cell: Cell, row: Row) -> str:
    return f"{cell[0]:g}{row.unit}" if isinstance(cell, list) else row.text(cell, None)


def _line(cells: Iterable[str]) -> str:
    """A line of the table. An empty cell has no space."""
    return re.sub(r"\|\s+(?=\|)", "| ", f"| {' | '.join(cells)} |")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All that the page shows."""

    runs: dict[str, dict[str, Any]]
    """Where and when: `measured` (a date), `processor`, `cores`, `load_average` and `others` (`quiet.OTHERS`)."""

    tables: list[Table]
    charts: dict[str, Any] = field(default_factory=dict)
    """Pictures: see `performance_page.charts`."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ValueError for rows without a command, and for runs that are not there, or of a busy machine."""
        found = json.loads(path.read_text(encoding="utf-8"))
        tables = [Table.from_json(table) for table in found.pop("tables")]
        figures = cls(tables=tables, **found)
        for row in (row for table in tables for row in table.rows):
            if row.goal != (row.source is None):
                raise ValueError(f"{path.name}: row {row.name!r}: allowed: a source, or `goal`")
        for key, about in figures.runs.items():
            quiet.require(about, f"{path.name}: {key}")
        for name, run in figures._runs_named():
            if run not in figures.runs:
                raise ValueError(f"{path.name}: {name!r} comes from run {run!r}; allowed: {', '.join(figures.runs)}")
        return figures

    def _runs_named(self) -> Iterator[tuple[str, str | None]]:
        for table in self.tables:
            yield from ((f"{table.name}: {row.name}", row.run) for row in table.rows if not row.goal)

    def text(self) -> str:
        """What `read` reads. A list of figures is one line. Raises ValueError for one that is not finite."""
        tables = [{**vars(table), "rows": [_kept(row) for row in table.rows]} for table in self.tables]
        text = json.dumps({**vars(self), "tables": tables}, indent=1, ensure_ascii=False, allow_nan=False)
        return (
            re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda found: "[" + re.sub(r",\n\s+", ", ", found[1]) + "]", text) + "\n"
        )

    def without_unused_runs(self) -> Self:
        used = {run for _, run in self._runs_named()}
        return replace(self, runs={key: run for key, run in self.runs.items() if key in used})

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)

    def row(self, wanted: str) -> tuple[Table, Row]:
        """The row with this id."""
        return next((table, row) for table in self.tables for row in table.rows if row.id == wanted)

    def lowest(self, wanted: str, column: str) -> Number:
        """The lowest figure, or the median, of a row in a column."""
        table, row = self.row(wanted)
        cell = row.cells[table.columns.index(column) - 1]
        if isinstance(cell, dict):
            return cell["median"]
        if not isinstance(cell, list):
            raise ValueError(f"row {wanted!r}, column {column!r}: {cell!r}; allowed: numbers")
        return min(cell)

    def each(self, wanted: str, column: str) -> list[str]:
        """The figures of a row in a column as the page shows them, without a spread."""
        table, row = self.row(wanted)
        cell = row.cells[table.columns.index(column) - 1]
        if isinstance(cell, list):
            return [row.shown(figure) for figure in cell]
        return [row.text(cell, None).partition(" (")[0]]

    def taken(self, keys: Iterable[str | None]) -> str:
        """When, and on what machine, in words, these runs were."""
        runs = [self.runs[key] for key in dict.fromkeys(keys) if key is not None]
        by_machine: dict[str, tuple[list[str], list[float], list[float]]] = {}
        for run in sorted(runs, key=lambda run: str(run["measured"])):
            dates, loads, others = by_machine.setdefault(_name(run), ([], [], []))
            dates += [] if run["measured"] in dates else [run["measured"]]
            loads += run["load_average"][:1]
            others += run[quiet.OTHERS]
        return " ".join(
            f"Measured {', '.join(dates)} on {name}, {_loaded(loads)}{_beside(others)}."
            for name, (dates, loads, others) in by_machine.items()
        )


def place(machine: Mapping[str, Any]) -> str:
    """Processor, cores and load at the beginning, in words."""
    return f"{_name(machine)}, {_loaded((machine.get('load_average') or [])[:1])}"


def _name(machine: Mapping[str, Any]) -> str:
    return f"{machine['processor'].replace('(R)', '').removesuffix(' Processor')}, {machine['cores']} cores"


def _loaded(loads: Sequence[float]) -> str:
    if not loads:
        return "load not recorded"
    least, most = f"{min(loads):.1f}", f"{max(loads):.1f}"
    return f"load {least}" if least == most else f"load {least} to {most}"


def _beside(others: Sequence[float]) -> str:
    """What others used while nothing was measured. The load average still has the ranks of the command before."""
    return f" (others used at most {max(others):.2f} of a core)"
