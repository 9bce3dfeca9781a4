# SPDX-License-Identifier: Apache-2.0
"""Bar charts as SVG. The text is a function of the figures alone, so a test can compare committed pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any, Final, Self

COLOURS: Final = ("#1f6fb4", "#e08214", "#4d9221", "#8073ac")
WIDTH, LEFT, RIGHT = 760, 170, 60
BAR, BAR_GAP, GROUP_GAP, HEAD, FOOT, LINE = 16, 3, 14, 58, 28, 18


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Groups of horizontal bars. `values` of a group has one number above 0 for each name in `series`."""

    title: str
    series: tuple[str, ...]
    groups: tuple[tuple[str, tuple[float, ...]], ...]
    note: str
    taken: str
    """When, and on what machine."""

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        groups = tuple((str(group["name"]), tuple(map(float, group["values"]))) for group in found["groups"])
        series = tuple(map(str, found["series"]))
        for name, values in groups:
            if len(values) != len(series) or not all(value > 0 for value in values):
                raise ValueError(f"group {name!r} has {values}; allowed: {len(series)} numbers above 0")
        words = {name: str(found[name]) for name in ("title", "note", "taken")}
        return cls(series=series, groups=groups, **words)

    @property
    def is_logarithmic(self) -> bool:
        """A linear scale could not show bars of very different lengths."""
        values = [value for _, group in self.groups for value in group]
        return max(values) / min(values) > 100 and min(values) > 1


def svg(chart: Chart) -> str:
    return "\n".join(["<!-- made by sennit.testbed.bench.figures.pictures -->", *_lines(chart), "</svg>", ""])


def _lines(chart: Chart) -> Iterator[str]:
    group_height = len(chart.series) * (BAR + BAR_GAP) + GROUP_GAP
    height = HEAD + len(chart.groups) * group_height + FOOT + LINE
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">'
    )
    yield f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    yield f'<text x="10" y="20" font-size="15">{escape(chart.title)}</text>'
    for index, name in enumerate(chart.series):
        x = LEFT + index * (WIDTH - LEFT - 20) // len(chart.series)
        yield f'<rect x="{x}" y="32" width="12" height="12" fill="{COLOURS[index]}"/>'
        yield f'<text x="{x + 17}" y="42">{escape(name)}</text>'
    longest = max(value for _, values in chart.groups for value in values)
    top = HEAD
    for name, values in chart.groups:
        middle = top + (group_height - GROUP_GAP) / 2 + 4
        yield f'<text x="{LEFT - 8}" y="{middle:.0f}" text-anchor="end">{escape(name)}</text>'
        for index, value in enumerate(values):
            share = math.log(value) / math.log(longest) if chart.is_logarithmic else value / longest
            length = max(2, round(share * (WIDTH - LEFT - RIGHT)))
            y = top + index * (BAR + BAR_GAP)
            yield f'<rect x="{LEFT}" y="{y}" width="{length}" height="{BAR}" fill="{COLOURS[index]}"/>'
            yield f'<text x="{LEFT + length + 5}" y="{y + 12}">{value:g}</text>'
        top += group_height
    scale = " The scale is logarithmic and begins at 1." if chart.is_logarithmic else ""
    yield f'<text x="10" y="{height - 10 - LINE}" fill="#555">{escape(chart.note + scale)}</text>'
    yield f'<text x="10" y="{height - 10}" fill="#555">{escape(chart.taken)}</text>'
