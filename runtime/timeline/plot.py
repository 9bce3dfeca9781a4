# SPDX-License-Identifier: Apache-2.0
"""A step of a timeline as a picture: SVG, readable on light and dark pages.

A row is a thread of a rank. Bars are work, coloured by what it is for. Waits for communication are orange, waits for
another thread hollow. The line below the bars is the critical path, from rank to rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from sennit.runtime.timeline.critical_path import TRANSFER, Link
from sennit.runtime.timeline.spans import MAIN, Trace
from sennit.runtime.timeline.threads import NOTHING, RankThreads, Wait, threads_of

WIDTH, LEFT, RIGHT, TOP = 1200.0, 118.0, 20.0, 58.0
ROW, BAR, GAP = 26.0, 16.0, 14.0
# The mean width of a letter of 11 px.
LETTER: Final = 6.1
RANKS_MAX: Final = 8

# Okabe and Ito's colours, which people without red or green vision can tell apart.
DENSE, TABLES, INPUT, EXCHANGE, OTHER = "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#999999"
COMMUNICATION, PATH = "#E69F00", "#D55E00"
LEGEND: Final = (
    (DENSE, "dense model"),
    (TABLES, "tables"),
    (INPUT, "input"),
    (EXCHANGE, "preparing exchanges"),
    (OTHER, "other work"),
    (COMMUNICATION, "waiting for communication"),
    ("none", "waiting for another thread"),
    (PATH, "critical path"),
)
# Colours by the first words of phases and tasks.
COLOURS: Final = (
    (("dense", "evaluation", "task step"), DENSE),
    (("lookup", "sparse", "tables", "task lookup", "task sparse", "checkpoint"), TABLES),
    (("input exchange", "AlltoAll", "AllReduce", "AllGather", "task ids"), EXCHANGE),
    (("input", "task input"), INPUT),
)
STYLE: Final = """
text { font: 11px sans-serif; fill: #24292f; } text.name { font-weight: bold; }
text.on { fill: #ffffff; } text.over { fill: #1f2328; }
.hollow { fill: none; stroke: #8c959f; stroke-dasharray: 3 2; } .grid { stroke: #8c959f; stroke-opacity: 0.3; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } }
"""


@dataclass(frozen=True, slots=True)
class _Scale:
    begin_ns: int
    end_ns: int

    def x(self, time_ns: int) -> float:
        inside = min(max(time_ns, self.begin_ns), self.end_ns)
        return LEFT + (WIDTH - LEFT - RIGHT) * (inside - self.begin_ns) / (self.end_ns - self.begin_ns)


def plot(trace: Trace, step: int, path: Sequence[Link]) -> str:
    """The SVG of one step, with its critical path, of the first `RANKS_MAX` ranks."""
    ranks = [rank for rank in threads_of(trace.spans) if step in rank.steps][:RANKS_MAX]
    scale = _Scale(
        min([path[0].start_ns, *(rank.steps[step].start_ns for rank in ranks)]),
        max([path[-1].end_ns, *(rank.steps[step].end_ns for rank in ranks)]),
    )
    rows: dict[tuple[int, str], float] = {}
    y = TOP
    parts: list[str] = []
    for rank in ranks:
        parts.append(f'<text class="name" x="8" y="{y + BAR - 4:.1f}">rank {rank.rank}</text>')
        for name in _rows_of(rank, scale):
            rows[rank.rank, name] = y
            parts.append(f'<text x="{LEFT - 8:.1f}" y="{y + BAR - 4:.1f}" text-anchor="end">{escape(name)}</text>')
            parts += _bars(rank, name, y, scale)
            y += ROW
        y += GAP
    parts += _path_line(path, rows, scale)
    size = f'viewBox="0 0 {WIDTH:.0f} {y:.0f}" width="{WIDTH:.0f}" height="{y:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, f"<style>{STYLE}</style>", *_axis(scale, y - GAP), *_legend(), *parts, "</svg>\n"])


def _rows_of(rank: RankThreads, scale: _Scale) -> list[str]:
    """Threads that did anything in this time, the main one first."""

    def is_busy(name: str) -> bool:
        pieces = rank.thread(name).between(scale.begin_ns, scale.end_ns)
        shown = (piece.what for piece in pieces if piece.what != NOTHING)
        return any(not (isinstance(what, Wait) and what.is_idle) for what in shown)

    return [MAIN, *sorted(name for name in rank.threads if name != MAIN and is_busy(name))]


def _bars(rank: RankThreads, name: str, y: float, scale: _Scale) -> Iterator[str]:
    for piece in rank.thread(name).between(scale.begin_ns, scale.end_ns):
        left, right = scale.x(piece.start_ns), scale.x(piece.end_ns)
        what = piece.what
        took = f"{(piece.end_ns - piece.start_ns) / 1e6:.3f} ms"
        if isinstance(what, Wait):
            if what.is_idle:
                continue
            if what.collective is None:
                yield _bar(left, right, y, "", f"wait for {what.thread}", took)
            else:
                yield _bar(left, right, y, COMMUNICATION, what.collective.name.removeprefix("wait for "), took)
        elif what != NOTHING:
            yield _bar(left, right, y, _colour(what), what.removeprefix("task "), took)


def _bar(left: float, right: float, y: float, colour: str, label: str, took: str) -> str:
    width = max(right - left, 0.4)
    paint = f'fill="{colour}"' if colour else 'class="hollow"'
    text = f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" {paint}>'
    text += f"<title>{escape(label)}: {took}</title></rect>"
    if len(label) * LETTER + 6 <= width:
        ink = "on" if colour in (DENSE, TABLES, INPUT) else "over" if colour else "free"
        place = f'x="{left + width / 2:.1f}" y="{y + BAR - 4:.1f}" text-anchor="middle"'
        text += f'<text class="{ink}" {place}>{escape(label)}</text>'
    return text


def _colour(what: str) -> str:
    return next((colour for begins, colour in COLOURS if what.startswith(begins)), OTHER)


def _path_line(path: Sequence[Link], rows: dict[tuple[int, str], float], scale: _Scale) -> Iterator[str]:
    points = []
    for link in path:
        y = rows.get((link.rank, link.thread))
        if y is None:
            continue
        y += BAR + 3
        # A transfer begins where the other rank came: the line comes down from there.
        points += [(scale.x(link.start_ns), y), (scale.x(link.end_ns), y)]
        if link.kind == TRANSFER:
            x = (points[-1][0] + points[-2][0]) / 2
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{PATH}"/>'
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{drawn}" fill="none" stroke="{PATH}" stroke-width="2.5" stroke-linejoin="round"/>'


def _axis(scale: _Scale, bottom: float) -> Iterator[str]:
    length_ms = (scale.end_ns - scale.begin_ns) / 1e6
    unit = 10.0 ** math.floor(math.log10(length_ms / 4))
    tick = next(unit * factor for factor in (1, 2, 5, 10) if length_ms / (unit * factor) <= 10)
    for number in range(int(length_ms / tick) + 1):
        x = scale.x(scale.begin_ns + round(number * tick * 1e6))
        yield f'<line class="grid" x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
        title = f"{number * tick:g}" + (" ms" if number == 0 else "")
        yield f'<text x="{x:.1f}" y="{TOP - 13}" text-anchor="middle">{title}</text>'


def _legend() -> Iterator[str]:
    x = 8.0
    for colour, name in LEGEND:
        paint = 'class="hollow"' if colour == "none" else f'fill="{colour}"'
        height, y = (3, 15) if colour == PATH else (10, 10)
        yield f'<rect x="{x:.1f}" y="{y}" width="14" height="{height}" {paint}/>'
        yield f'<text x="{x + 19:.1f}" y="19">{name}</text>'
        x += 19 + len(name) * LETTER + 16
