# SPDX-License-Identifier: Apache-2.0
"""A flowchart as SVG inside the page, in the colours of the theme, light or dark (site.css)."""

from __future__ import annotations

import itertools
import re
from html import escape
from typing import Final

from sennit.testbed.site.flowchart import Edge, Flowchart, parse
from sennit.testbed.site.layers import Layers, layers

CHARACTER: Final = 7.6  # the mean width of a letter of 14 px, with some room
LINE: Final = 18.0
PADDING: Final = 12.0
BETWEEN: Final = 64.0  # layers
BOX_PADDING: Final = 14.0
BOX_TITLE: Final = 16.0
BESIDE: Final = 14.0  # between edges that leave or enter a node
LABELLED: Final = 60.0  # the same, where they have labels
MARGIN: Final = 16.0

_CHART: Final = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def drawn(markdown: str) -> str:
    """The page with a picture in place of each chart."""
    return _CHART.sub(lambda chart: svg(parse(chart[1])), markdown)


def svg(chart: Flowchart) -> str:
    """The picture, without an empty line, as Markdown takes HTML up to one."""
    width = {name: _width(chart, name) for name in chart.labels}
    height = {name: LINE * len(lines) + PADDING for name, lines in chart.labels.items()}
    placed = layers(chart, width)
    tall = [max(height.get(name, 0.0) for name in layer) for layer in placed.order]
    tops = [MARGIN + BOX_TITLE, *(MARGIN + BOX_TITLE + end + BETWEEN * n for n, end in enumerate(_ends(tall), 1))]
    row = {name: number for number, layer in enumerate(placed.order) for name in layer}
    x = {name: centre + MARGIN + BOX_PADDING for name, centre in placed.centre.items()}
    top = {name: tops[row[name]] + (tall[row[name]] - height.get(name, tall[row[name]])) / 2 for name in row}
    bottom = {name: top[name] + height.get(name, tall[row[name]]) for name in row}

    parts = [_box(title, chart, x, width, top, bottom) for title in dict.fromkeys(chart.group_of.values())]
    starts = _ports(chart, placed, x, width, at=0)
    ends = _ports(chart, placed, x, width, at=-1)
    for edge, start, end in zip(chart.edges, starts, ends, strict=True):
        parts.append(_edge(edge, placed.routes[edge.tail, edge.head], x, top, bottom, start, end))
    for name, lines in chart.labels.items():
        left = x[name] - width[name] / 2
        size = _size(width[name], height[name])
        parts.append(f'<rect class="node" x="{left:.0f}" y="{top[name]:.0f}" rx="4" {size}/>')
        first = top[name] + PADDING / 2 + LINE * 0.75
        for number, text in enumerate(lines):
            parts.append(_text(text, x[name], first + LINE * number))
    right = max(x[name] + width.get(name, 0.0) / 2 for name in x) + BOX_PADDING + MARGIN
    end = max(bottom.values()) + BOX_PADDING + MARGIN
    names = ", ".join(" ".join(lines) for lines in chart.labels.values())
    head = f'<svg class="flowchart" role="img" viewBox="0 0 {right:.0f} {end:.0f}" width="{right:.0f}">'
    return "\n".join(["<div>", head, f"<title>{escape(names)}</title>", *parts, "</svg>", "</div>"])


def _ends(tall: list[float]) -> list[float]:
    return list(itertools.accumulate(tall))


def _width(chart: Flowchart, name: str) -> float:
    labels = [sum(bool(edge.label) for edge in chart.edges if name == end(edge)) for end in (_tail, _head)]
    text = max(len(line) for line in chart.labels[name]) * CHARACTER
    return max(text + 2 * PADDING, *(count * LABELLED for count in labels))


def _tail(edge: Edge) -> str:
    return edge.tail


def _head(edge: Edge) -> str:
    return edge.head


def _ports(chart: Flowchart, placed: Layers, x: dict[str, float], width: dict[str, float], *, at: int) -> list[float]:
    """Where each edge leaves its upper node (at 0) or enters its lower one (at -1): side by side, as they come."""
    routes = [placed.routes[edge.tail, edge.head] for edge in chart.edges]
    places = [0.0] * len(routes)
    for node in chart.labels:
        here = [number for number, route in enumerate(routes) if route[at] == node]
        here.sort(key=lambda number: (x[routes[number][1 if at == 0 else -2]], number))
        room = LABELLED if any(chart.edges[number].label for number in here) else BESIDE
        for position, number in enumerate(here):
            step = min(room, width[node] / len(here))
            places[number] = x[node] + (position - (len(here) - 1) / 2) * step
    return places


def _size(width: float, height: float) -> str:
    return f'width="{width:.0f}" height="{height:.0f}"'


def _text(text: str, x: float, y: float, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def _box(
    title: str,
    chart: Flowchart,
    x: dict[str, float],
    width: dict[str, float],
    top: dict[str, float],
    bottom: dict[str, float],
) -> str:
    inside = [name for name in chart.labels if chart.group_of.get(name) == title]
    left = min(x[name] - width[name] / 2 for name in inside) - BOX_PADDING
    right = max(x[name] + width[name] / 2 for name in inside) + BOX_PADDING
    high = min(top[name] for name in inside) - BOX_PADDING / 2 - BOX_TITLE
    low = max(bottom[name] for name in inside) + BOX_PADDING / 2
    rect = f'<rect class="box" x="{left:.0f}" y="{high:.0f}" rx="6" {_size(right - left, low - high)}/>'
    return rect + _text(title, left + 8, high + BOX_TITLE, "title")


def _edge(
    edge: Edge,
    route: list[str],
    x: dict[str, float],
    top: dict[str, float],
    bottom: dict[str, float],
    start: float,
    end: float,
) -> str:
    """A curve that leaves straight down (or up), and passes bends and arrives so."""
    points = [(start, bottom[route[0]], bottom[route[0]])]
    points += [(x[bend], top[bend], bottom[bend]) for bend in route[1:-1]]
    points.append((end, top[route[-1]], top[route[-1]]))
    path = f"M{points[0][0]:.0f},{points[0][1]:.0f}"
    for (from_x, _, from_y), (to_x, to_y, out_y) in itertools.pairwise(points):
        half = (from_y + to_y) / 2
        path += f" C{from_x:.0f},{half:.0f} {to_x:.0f},{half:.0f} {to_x:.0f},{to_y:.0f} V{out_y:.0f}"
    drawing = f'<path class="{edge.kind}" d="{path}"/>'
    if edge.kind != "line":
        up = edge.head == route[0]
        tip_x, tip_y = points[0 if up else -1][:2]
        drawing += f'<path class="tip" d="M{tip_x:.0f},{tip_y:.0f} l-4,{8 if up else -8} h8 z"/>'
    if edge.label:
        (from_x, _, from_y), (to_x, to_y, _) = points[:2]
        drawing += _text(edge.label, (from_x + to_x) / 2, (from_y + to_y) / 2 + 4, "label")
    return drawing
