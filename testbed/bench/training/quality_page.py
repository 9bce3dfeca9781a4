# SPDX-License-Identifier: Apache-2.0
"""The tables and pictures of docs/quality.md, from `quality.json` beside it (`make quality`).

`python -m sennit.testbed.bench.training.quality_page docs` writes them anew. With names of files that
`sennit bench quality --json` wrote behind it, it first makes `quality.json` of these. The tables are a function of that
file, so a test can compare.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from sennit.testbed.bench import quiet
from sennit.testbed.bench.figures.figures import place
from sennit.testbed.bench.training import quality_plots
from sennit.testbed.bench.training.quality import METRICS, Report
from sennit.testbed.bench.training.quality_ways import ASYNCHRONOUS, FP32, SAME_TIME
from sennit.testbed.marked_page import with_part

FIGURES: Final = "quality.json"
PAGE: Final = "quality.md"
BATCHES: Final = "quality-batches.svg"
NE, AUC, CALIBRATION = METRICS
PARTS: Final = ("ways", "batch sizes", "parameter server")
"""Each has a place on the page, between the marks `<!-- PART: begin -->` and `<!-- PART: end -->`."""


def read(path: Path) -> list[Report]:
    """A report for each data set."""
    reports = json.loads(path.read_text(encoding="utf-8"))
    for found in reports:
        quiet.refuse_busy(found, path.name)
        if found.get(quiet.PARTIAL):
            raise ValueError(f"{path.name}: a run that has not ended; go on with it (sennit bench quality --resume)")
    return [Report.from_json(found) for found in reports]


def tables(reports: Sequence[Report]) -> dict[str, str]:
    """Part of the page -> its pictures and tables, for each report that has such ways, in Markdown."""
    ways = [part for report in reports if plain_ways(report) for part in (_picture(report), _ways(report))]
    sizes = [_sizes(report) for report in reports if FP32 in report.qualities and _batches(report)]
    servers = [_servers(report) for report in reports if has_server(report)]
    if servers:
        servers.insert(0, f"![NE of synchronous training minus that of the parameter server, by batch size]({BATCHES})")
    return {part: "\n\n".join(made) for part, made in zip(PARTS, (ways, sizes, servers), strict=True)}


def _picture(report: Report) -> str:
    data = report.settings.data
    return f"![{data}: differences of NE and AUC from fp32, and calibration, by way]({_picture_name(data)})"


def _picture_name(data: str) -> str:
    return f"quality-{data}.svg"


def _ways(report: Report) -> str:
    report, rows = report.against(FP32), []
    for way in (FP32, *plain_ways(report)):
        rows.append([way, *_both(report, way, NE), *_both(report, way, AUC), *_both(report, way, CALIBRATION)])
    return _table(report, ["way", *_names(report, NE), *_names(report, AUC), *_names(report, CALIBRATION)], rows)


def _sizes(report: Report) -> str:
    report, rows = report.against(FP32), []
    for way in (FP32, *_batches(report)):
        if not way.endswith(SAME_TIME):
            quality = [*_both(report, way, NE), *_both(report, way, AUC), report.mean_text(way, CALIBRATION)]
            rows.append([way, _steps(report, way), *quality])
    return _table(report, ["way", "steps", *_names(report, NE), *_names(report, AUC), CALIBRATION], rows)


def _servers(report: Report) -> str:
    beside, rows = report.against(ASYNCHRONOUS), []
    for way in (ASYNCHRONOUS, *_batches(report)):
        ratio = beside.time_ratio(way)
        assert ratio is not None
        quality = [*_both(beside, way, NE), beside.text(way, AUC), beside.mean_text(way, CALIBRATION)]
        rows.append([way, _steps(beside, way), f"{ratio:.2f}", *quality])
    names = ["way", "steps", "time", *(name.replace(ASYNCHRONOUS, "server") for name in _names(beside, NE))]
    return _table(beside, [*names, "AUC - server", CALIBRATION], rows)


def spliced(page: str, made: dict[str, str]) -> str:
    """`page` with each table between its two marks. Raises ValueError without them."""
    for part, table in made.items():
        begin, end = (f"<!-- {part}: {mark} -->" for mark in ("begin", "end"))
        page = with_part(page, begin, end, f"\n{table}\n", what="tables")
    return page


def merged(paths: Iterable[Path]) -> str:
    """What `quality.json` holds: the reports, one a line."""
    reports = [json.dumps(json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return "[\n" + ",\n".join(reports) + "\n]\n"


def write(docs: Path) -> None:
    """Writes the page's tables and the pictures anew."""
    reports, page = read(docs / FIGURES), docs / PAGE
    page.write_text(spliced(page.read_text(encoding="utf-8"), tables(reports)), encoding="utf-8")
    for report in reports:
        if plain_ways(report):
            quality_plots.differences(report, docs / _picture_name(report.settings.data), plain_ways(report))
    quality_plots.batches([report for report in reports if has_server(report)], docs / BATCHES)


def has_server(report: Report) -> bool:
    """Whether there is the parameter server, and large batches for as long as it took."""
    return ASYNCHRONOUS in report.qualities and report.settings.equal_time


def plain_ways(report: Report) -> list[str]:
    """The ways with the default batch size beside fp32; none in a report without fp32."""
    if FP32 not in report.qualities:
        return []
    return [way for way in report.qualities if not way.startswith(("batch ", ASYNCHRONOUS, FP32))]


def _batches(report: Report) -> list[str]:
    return [way for way in report.qualities if way.startswith("batch ")]


def _table(report: Report, names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    settings = report.settings
    title = f"{settings.title} ({place(report.machine)}):"
    return "\n".join([title, "", *(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))])


def _names(report: Report, metric: str) -> list[str]:
    return [METRICS[metric], f"{METRICS[metric]} - {report.settings.base}"]


def _both(report: Report, way: str, metric: str) -> list[str]:
    return [report.mean_text(way, metric), report.text(way, metric)]


def _steps(report: Report, way: str) -> str:
    found = report.steps[way]
    return f"{found[0]:,}" if len(set(found)) == 1 else f"{min(found):,} to {max(found):,}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if sys.argv[2:]:
        (target / FIGURES).write_text(merged(map(Path, sys.argv[2:])), encoding="utf-8")
    write(target)
