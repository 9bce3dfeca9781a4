# SPDX-License-Identifier: Apache-2.0
"""Flowcharts as SVG inside the page, laid out by Graphviz, in the colours of the theme, light or dark (site.css).

Git servers draw charts in the reader's browser, with a library that they bring. The site brings none. It reads the part
of Mermaid's language that our pages use.
"""

from __future__ import annotations

import re
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Final

from sennit.errors import Unsupported

TIMEOUT_S: Final = 60.0
SVG: Final = "http://www.w3.org/2000/svg"
PX: Final = 4 / 3  # Graphviz measures in points.
# Boxes are made for Graphviz's Helvetica. Their margins leave room for wider letters of the reader's own font.
SETTINGS: Final = """
  graph [fontname=Helvetica fontsize=9 labeljust=l nodesep=0.2 ranksep=0.45 bgcolor=transparent]
  node [fontname=Helvetica fontsize=10.5 shape=box style=rounded height=0.3 margin="0.15,0.06"]
  edge [fontname=Helvetica fontsize=9 arrowsize=0.6]"""

_CHART: Final = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NODE: Final = re.compile(r"\s*(\w+)(?:\[\"?([^]\"]*)\"?\])?")
_GROUP: Final = re.compile(r"subgraph (\w+) \[(.+)\]")
# The two forms of an edge, with and without a label, and what it is in Graphviz's language.
_EDGES: Final = (
    (re.compile(r"\s*(?:== *(?P<label>.+?) *==>|==>)"), "penwidth=3"),
    (re.compile(r"\s*(?:-\. *(?P<label>.+?) *\.->|-\.->)"), "style=dashed"),
    (re.compile(r"\s*(?P<label>(?!))?---"), "dir=none"),
    (re.compile(r"\s*(?:-->|-- *(?P<label>.+?) *-->)"), ""),
)


def drawn(markdown: str) -> str:
    """The page with a picture in place of each chart."""
    return _CHART.sub(lambda chart: svg(dot(chart[1])), markdown)


def dot(text: str) -> str:
    """A chart in Graphviz's language. A ValueError quotes the line that is in no form known here."""
    head, *lines = [line.strip() for line in text.strip().splitlines()]
    if head != "flowchart TB":
        raise ValueError(f"{head!r}: the site draws only `flowchart TB`")
    statements = []
    for line in lines:
        if opened := _GROUP.fullmatch(line):
            statements.append(f"subgraph cluster_{opened[1]} {{ label={_quoted(opened[2])}")
        elif line == "end":
            statements.append("}")
        else:
            statements += _chain(line)
    return "\n  ".join([f"digraph {{{SETTINGS}", *statements]) + "\n}\n"


def svg(graph: str) -> str:
    """The picture, without an empty line, as Markdown takes HTML up to one. Raises Unsupported without Graphviz."""
    try:
        done = subprocess.run(
            ["dot", "-Tsvg"], input=graph, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except FileNotFoundError:
        raise Unsupported("dot", "flowcharts of the site need the command dot: install graphviz") from None
    ElementTree.register_namespace("", SVG)
    picture = ElementTree.fromstring(done.stdout)
    for element in picture.iter():
        element.attrib.pop("id", None)  # Identifiers go: a page may have several pictures.
    for element in picture.iter(f"{{{SVG}}}g"):
        for title in element.findall(f"{{{SVG}}}title"):
            element.remove(title)
    width = float(picture.attrib.pop("width").removesuffix("pt"))
    del picture.attrib["height"]
    picture.attrib |= {"class": "flowchart", "role": "img", "width": f"{width * PX:.0f}"}
    lines = ElementTree.tostring(picture, encoding="unicode").splitlines()
    return "\n".join(["<div>", *(line for line in lines if line.strip()), "</div>"])


def _chain(line: str) -> Iterator[str]:
    """The nodes and edges of a line such as a --> b[text] --> c."""
    tail, end, statement = _node(line, 0)
    yield statement
    while end < len(line):
        matches = [(found, kind) for pattern, kind in _EDGES if (found := pattern.match(line, end))]
        if not matches:
            raise ValueError(f"{line!r}: the site draws no such edge")
        ((found, kind),) = matches
        head, end, statement = _node(line, found.end())
        yield statement
        label = f"label={_quoted(' ' + found['label'] + ' ')}" if found["label"] else ""
        yield f"{tail} -> {head} [{kind} {label}]"
        tail = head


def _node(line: str, begin: int) -> tuple[str, int, str]:
    """The name of the node there, where it ends, and its statement."""
    found = _NODE.match(line, begin)
    if found is None:
        raise ValueError(f"{line!r}: the site draws no such node")
    return found[1], found.end(), f"{found[1]} [label={_quoted(found[2])}]" if found[2] else found[1]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", r"\\").replace('"', r"\"").replace("<br>", r"\n") + '"'
