# SPDX-License-Identifier: Apache-2.0
"""The tables and pictures of `sennit bench all`, and the places of the documents that hold them.

`python -m sennit.testbed.bench.comparison_page docs` writes them anew from docs/comparison.json: the pictures, and what
stands between the two marks of docs/comparison.md. All of it is a function of the file, so a test can compare.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from sennit.testbed.bench import quiet
from sennit.testbed.bench.comparison import LOOKUPS, LOOPBACK, SHARED, STEP, Comparison, Row
from sennit.testbed.bench.figures.figures import place
from sennit.testbed.bench.figures.pictures import Chart, svg
from sennit.testbed.marked_page import with_part

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
FIGURES: Final = "comparison.json"
PAGE: Final = "comparison.md"
PICTURES: Final = ("comparison-collectives.svg", "comparison-training.svg")
GLOO: Final = "gloo"


def document(found: Comparison) -> str:
    """Machine, pictures, tables by part, and the peers that did not run, in Markdown."""
    return "\n".join([*_pictures(found), tables(found)])


def tables(found: Comparison) -> str:
    """`document` without pictures, as a terminal can show it."""
    return "\n".join([_machine(found), "", *_tables(found.rows), *_absent(found)]).strip()


def charts(found: Comparison) -> dict[str, Chart]:
    """File name -> picture. A picture without bars is left out."""
    words = {"note": "Medians; above 1 sennit is faster.", "taken": f"{_taken(found)}."}
    groups = []
    for part in (SHARED, LOOPBACK):
        sizes = dict.fromkeys(_size(row) for row in found.rows if row.part == part)
        for size in sizes:
            rows = [row for row in found.rows if (row.part, row.peer, _size(row)) == (part, GLOO, size)]
            groups.append((f"{'shm' if part == SHARED else 'UDP'}, {size}", tuple(_round(row.ratio) for row in rows)))
    made = {}
    if groups:
        names = [row.case.partition(",")[0] for row in found.rows if row.part == SHARED and row.peer == GLOO]
        series = tuple(dict.fromkeys(names))
        made[PICTURES[0]] = Chart(
            title="Collectives: time of gloo / time of sennit", series=series, groups=tuple(groups), **words
        )
    bars = tuple((_bar(row), (_round(row.ratio),)) for row in found.rows if row.part in (LOOKUPS, STEP))
    if bars:
        title = "Embedding tables and training: time of the peer / time of sennit"
        made[PICTURES[1]] = Chart(title=title, series=("peer / sennit",), groups=bars, **words)
    return made


def files(found: Comparison) -> dict[str, str]:
    """Name -> content of what `sennit bench all --report FOLDER` writes beside the JSON."""
    return {PAGE: f"# sennit beside its peers\n\n{document(found)}\n", **_drawn(found)}


def spliced(page: str, measured: str) -> str:
    """`page` with `measured` between its two marks. Raises ValueError without them."""
    return with_part(page, BEGIN, END, measured, what="figures")


def made_anew(docs: Path) -> dict[Path, str]:
    """Path -> content of all that docs/comparison.json determines."""
    raw = json.loads((docs / FIGURES).read_text(encoding="utf-8"))
    quiet.require(raw, FIGURES)
    found = Comparison.from_json(raw)
    page = docs / PAGE
    return {
        page: spliced(page.read_text(encoding="utf-8"), document(found)),
        **{docs / name: text for name, text in _drawn(found).items()},
    }


def _drawn(found: Comparison) -> dict[str, str]:
    return {name: svg(chart) for name, chart in charts(found).items()}


def _machine(found: Comparison) -> str:
    where = found.machine
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    kernel = str(where["kernel"]).partition("-")[0]
    text = f"{_taken(found)}, Linux {kernel}: {versions}."
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _taken(found: Comparison) -> str:
    return f"Measured {str(found.machine['time_utc']).partition('T')[0]} on {place(found.machine)}"


def _pictures(found: Comparison) -> Iterator[str]:
    for name, chart in charts(found).items():
        yield f"![{chart.title}]({name})"
        yield ""


def _tables(rows: Sequence[Row]) -> Iterator[str]:
    for part in dict.fromkeys(row.part for row in rows):
        peers = list(dict.fromkeys(row.peer for row in rows if row.part == part))
        yield f"| {part} | sennit | {' | '.join(f'{peer} / sennit' for peer in peers)} |"
        yield "| --- " * (2 + len(peers)) + "|"
        for case in dict.fromkeys(row.case for row in rows if row.part == part):
            by_peer = {row.peer: row for row in rows if (row.part, row.case) == (part, case)}
            cells = [_cell(by_peer[peer]) if peer in by_peer else "" for peer in peers]
            ours = next(iter(by_peer.values())).ours_s
            yield f"| {case} | {_time(ours)} | " + " | ".join(cells) + " |"
        yield ""


def _cell(row: Row) -> str:
    return f"{_ratio(row.ratio)} ({_ratio(row.low)} to {_ratio(row.high)})"


def _absent(found: Comparison) -> Iterator[str]:
    for peer, why in found.absent.items():
        yield f"- {peer} did not run: {why}"


def _bar(row: Row) -> str:
    """A name short enough to stand beside a bar."""
    return f"{row.peer}, {row.case}" if row.part == LOOKUPS else f"{row.peer.partition(' +')[0]}, a step"


def _size(row: Row) -> str:
    return row.case.partition(", ")[2]


def _round(value: float) -> float:
    """Two digits, as the tables have it."""
    return float(f"{value:.2g}")


def _ratio(value: float) -> str:
    return f"{_round(value):g}" if value >= 1 else f"{value:.2f}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


if __name__ == "__main__":
    for path, text in made_anew(Path(sys.argv[1])).items():
        path.write_text(text, encoding="utf-8")
