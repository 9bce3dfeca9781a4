# SPDX-License-Identifier: Apache-2.0
"""Flowcharts of pages: the part of Mermaid's language that our pages use, as nodes and edges.

Git servers draw them in the reader's browser, with a library that they bring. The site brings none: it has pictures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

_NODE: Final = re.compile(r"\s*(\w+)(?:\[\"?([^]\"]*)\"?\])?")
# Kind -> the two forms of an edge: with and without a label.
_EDGES: Final = {
    "thick": re.compile(r"\s*(?:== *(?P<label>.+?) *==>|==>)"),
    "dotted": re.compile(r"\s*(?:-\. *(?P<label>.+?) *\.->|-\.->)"),
    "line": re.compile(r"\s*(?P<label>(?!))?---"),
    "arrow": re.compile(r"\s*(?:-->|-- *(?P<label>.+?) *-->)"),
}
_GROUP: Final = re.compile(r"subgraph (\w+) \[(.+)\]")


@dataclass(frozen=True)
class Edge:
    tail: str
    head: str
    kind: str
    """A key of _EDGES: `line` has no arrow head."""

    label: str = ""


@dataclass
class Flowchart:
    """A chart whose edges run from the top to the bottom."""

    labels: dict[str, list[str]] = field(default_factory=dict)
    """Node -> its lines of text."""

    edges: list[Edge] = field(default_factory=list)
    group_of: dict[str, str] = field(default_factory=dict)
    """Node -> the name of the box around it, for nodes that have one."""


def parse(text: str) -> Flowchart:
    """Reads a chart. A ValueError quotes the line that is in no form known here."""
    chart = Flowchart()
    group = ""
    head, *lines = [line.strip() for line in text.strip().splitlines()]
    if head != "flowchart TB":
        raise ValueError(f"{head!r}: the site draws only `flowchart TB`")
    for line in lines:
        if opened := _GROUP.fullmatch(line):
            group = opened[2]
        elif line == "end":
            group = ""
        else:
            _read_chain(chart, line, group)
    return chart


def _read_chain(chart: Flowchart, line: str, group: str) -> None:
    """Reads nodes with edges between them: a --> b[text] --> c."""
    tail, end = _read_node(chart, line, 0, group)
    while end < len(line):
        matches = [(kind, found) for kind, pattern in _EDGES.items() if (found := pattern.match(line, end))]
        if not matches:
            raise ValueError(f"{line!r}: the site draws no such edge")
        ((kind, found),) = matches
        head, end = _read_node(chart, line, found.end(), group)
        chart.edges.append(Edge(tail, head, kind, found["label"] or ""))
        tail = head


def _read_node(chart: Flowchart, line: str, begin: int, group: str) -> tuple[str, int]:
    found = _NODE.match(line, begin)
    if found is None:
        raise ValueError(f"{line!r}: the site draws no such node")
    name, label = found[1], found[2]
    if name not in chart.labels or label:
        chart.labels[name] = (label or name).split("<br>")
    if group:
        chart.group_of.setdefault(name, group)
    return name, found.end()
