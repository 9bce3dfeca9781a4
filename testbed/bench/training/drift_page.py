# SPDX-License-Identifier: Apache-2.0
"""The tables and the picture of docs/lab/drift.md, from `drift.json` beside it (`make drift`).

`python -m sennit.testbed.bench.training.drift_page docs/lab` writes them anew. With names of files that
`sennit bench drift --json` wrote behind it, it first makes `drift.json` of these. The tables are a function of that
file, so a test can compare.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from sennit.testbed.bench.figures.figures import place
from sennit.testbed.bench.training import quality_plots
from sennit.testbed.bench.training.drift import (
    DYNAMIC,
    HASHED,
    IN_ORDER,
    KNOWS_FIRST,
    KNOWS_MIDNIGHT,
    LEFT,
    NO_NEW_IDS,
    SHARING,
    SHUFFLED,
    WAYS,
    Report,
    late,
    texts,
)
from sennit.testbed.bench.training.quality import interval_half
from sennit.testbed.marked_page import with_part

FIGURES: Final = "drift.json"
PAGE: Final = "drift.md"
PICTURE: Final = "drift.svg"
BEGIN, END = "<!-- results: written by make drift -->", "<!-- end of results -->"
# Okabe and Ito's colours, which differ for the colour-blind, too.
COLOURS: Final = {
    IN_ORDER: "#0072B2",
    SHUFFLED: "#009E73",
    NO_NEW_IDS: "#CC79A7",
    LEFT: "#D55E00",
    DYNAMIC: "#000000",
    SHARING: "#56B4E9",
    HASHED: "#E69F00",
}
FORECASTERS: Final = {KNOWS_MIDNIGHT: COLOURS[IN_ORDER], KNOWS_FIRST: COLOURS[LEFT]}


def read(path: Path) -> list[Report]:
    """A report for each pace of drift."""
    return [Report.from_json(found) for found in json.loads(path.read_text(encoding="utf-8"))]


def tables(reports: Sequence[Report]) -> str:
    """The picture, and two tables for each report, in Markdown."""
    picture = f"![NE above the attainable one by day and way, and by delay]({PICTURE})"
    return "\n\n".join([picture, *map(_tables, reports)])


def pace(report: Report) -> str:
    """How fast the data drift, in words."""
    stream = report.settings.stream
    return f"weights drift in {stream.drift_days:g} days, ids live {stream.life_days:g} days"


def _tables(report: Report) -> str:
    settings = report.settings
    attained, expected = (
        statistics.fmean(day[name] for run in report.runs for day in run.attainable)
        for name in ("normalised_entropy", "expected")
    )
    days = settings.windows
    lines = [
        f"**{pace(report).capitalize()}.** Days {days.start} to {days.stop - 1}, seeds 1 to {settings.seeds}",
        f"({place(report.machine)}). The attainable NE is {attained:.4f}, and {expected:.4f} in expectation.",
        "",
        "| | NE above the attainable | minus in order |",
        "| --- | --- | --- |",
    ]
    for way in report.runs[0].entropies:
        lines.append(_row(way, *texts(report.mean(way), None if way == IN_ORDER else report.cost(way))))
    days = settings.late_windows
    lines += [
        "",
        f"In order, but late, days {days.start} to {days.stop - 1}:",
        "",
        "| | NE above the attainable | minus not late |",
        "| --- | --- | --- |",
        _row("not late", *texts(report.above_late(0), None)),
    ]
    for delay in settings.delays:
        lines.append(_row(late(delay), *texts(report.above_late(delay), report.cost_late(delay))))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def plot(reports: Sequence[Report], path: Path) -> None:
    """NE above the attainable one: by day for each way, and by delay. A row of panels for each report."""
    figure, rows = quality_plots.panels(2, row_count=len(reports), height=0.4 + 4 * len(reports), sharey="row")
    for (by_day, by_delay), report in zip(rows, reports, strict=True):
        _plot_days(by_day, report)
        _plot_delays(by_delay, report)
        by_day.set_title(pace(report))
        by_day.set_ylim(bottom=0)
    rows[0][0].legend(loc="upper left", fontsize=8)
    seeds = {report.settings.seeds for report in reports}
    quality_plots.save(figure, f"What drift costs: {max(seeds)} seeds; bars: 95 % over seeds", path)


def _plot_days(axis: Any, report: Report) -> None:
    days = list(report.settings.windows)
    for number, way in enumerate(WAYS):
        middles, halves = _columns(report.above(way))
        places = [day + 0.06 * (number - 3) for day in days]  # so that bars do not hide each other
        axis.errorbar(places, middles, yerr=halves, color=COLOURS[way], marker="o", ms=4, capsize=3, label=way)
    for way, colour in FORECASTERS.items():
        axis.plot(days, _columns(report.above(way))[0], color=colour, linestyle=":", label=way)
    axis.set_xticks(days)
    axis.set_xlabel(f"day that is predicted; the first days end with day {report.settings.first_days - 1}")
    axis.set_ylabel("NE above the attainable NE")


def _plot_delays(axis: Any, report: Report) -> None:
    delays = [0, *report.settings.delays]
    values = [report.above_late(delay) for delay in delays]
    middles, halves = [statistics.fmean(one) for one in values], [interval_half(one) for one in values]
    axis.errorbar(delays, middles, yerr=halves, color=COLOURS[IN_ORDER], marker="o", ms=4, capsize=3)
    axis.set_xticks(delays)
    axis.set_xlabel("days late, trained in order")


def _columns(by_seed: list[list[float]]) -> tuple[list[float], list[float]]:
    """The mean of each day, and half of its interval."""
    days: list[Any] = list(zip(*by_seed, strict=True))
    return [statistics.fmean(day) for day in days], [interval_half(day) for day in days]


def write(folder: Path, found: Sequence[Path] = ()) -> None:
    """Writes the page's tables and the picture anew. `found`: of which `drift.json` is made first."""
    if found:
        lines = [json.dumps(json.loads(path.read_text(encoding="utf-8"))) for path in found]
        (folder / FIGURES).write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    reports, page = read(folder / FIGURES), folder / PAGE
    text = with_part(page.read_text(encoding="utf-8"), BEGIN, END, f"\n{tables(reports)}\n", what="tables")
    page.write_text(text, encoding="utf-8")
    plot(reports, folder / PICTURE)


if __name__ == "__main__":
    write(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
