# SPDX-License-Identifier: Apache-2.0
"""Flowcharts of the pages as pictures: all that they say is there, and nothing lies on anything else."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from sennit.testbed.site.flowchart import Edge, parse
from sennit.testbed.site.layers import layers
from sennit.testbed.site.picture import drawn, svg

ROOT = Path(__file__).resolve().parents[2]
CHART = re.compile(r"^```mermaid\n(.*?)^```", re.MULTILINE | re.DOTALL)
CHARTS = {
    f"{page.name} {number}": text
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for number, text in enumerate(CHART.findall(page.read_text()), 1)
}


def rectangles(picture: ElementTree.Element, kind: str) -> list[tuple[float, float, float, float]]:
    """Left, top, right, bottom."""
    found = []
    for element in picture.iter("rect"):
        if element.get("class") == kind:
            left, top, width, height = (float(element.get(name, "nan")) for name in ("x", "y", "width", "height"))
            found.append((left, top, left + width, top + height))
    return found


def test_there_are_charts() -> None:
    assert len(CHARTS) >= 3


@pytest.mark.parametrize("text", CHARTS.values(), ids=list(CHARTS))
def test_a_picture_has_all_of_the_chart_side_by_side(text: str) -> None:
    chart = parse(text)
    assert len(chart.edges) == len(re.findall(r"-->|==>|\.->|---", text))
    (picture,) = ElementTree.fromstring(svg(chart)).iter("svg")
    words = [element.text for element in picture.iter("text")]
    for line in [*itertools.chain(*chart.labels.values()), *(edge.label for edge in chart.edges if edge.label)]:
        assert line in words
    for kind in ("arrow", "thick", "dotted", "line"):
        paths = [element for element in picture.iter("path") if element.get("class") == kind]
        assert len(paths) == sum(edge.kind == kind for edge in chart.edges)
    nodes = rectangles(picture, "node")
    assert len(nodes) == len(chart.labels)
    right, bottom = (float(number) for number in picture.get("viewBox", "").split()[2:])
    for node in nodes:
        assert 0 <= node[0] < node[2] <= right
        assert 0 <= node[1] < node[3] <= bottom
    for one, other in itertools.combinations(nodes, 2):
        assert one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]
    boxes = dict(zip(dict.fromkeys(chart.group_of.values()), rectangles(picture, "box"), strict=True))
    for name, node in zip(chart.labels, nodes, strict=True):
        for title, box in boxes.items():
            inside = box[0] < node[0] and node[2] < box[2] and box[1] < node[1] and node[3] < box[3]
            outside = node[2] < box[0] or box[2] < node[0] or node[3] < box[1] or box[3] < node[1]
            assert inside if chart.group_of.get(name) == title else outside


def test_edges_have_kinds_and_labels() -> None:
    chart = parse("flowchart TB\n  a[one<br>two] --> b --- c\n  a == x y ==> c\n  b -. z .-> a\n  a -- q --> c")
    assert chart.labels == {"a": ["one", "two"], "b": ["b"], "c": ["c"]}
    assert chart.edges == [
        Edge("a", "b", "arrow"),
        Edge("b", "c", "line"),
        Edge("a", "c", "thick", "x y"),
        Edge("b", "a", "dotted", "z"),
        Edge("a", "c", "arrow", "q"),
    ]


@pytest.mark.parametrize("text", ["flowchart LR\n a --> b", "flowchart TB\n a ~~~ b", "flowchart TB\n a --> (b)"])
def test_a_line_in_another_form_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="the site draws"):
        parse(text)


def test_a_chain_is_straight_and_a_circle_has_one_edge_up() -> None:
    text = "flowchart TB\n  a --> b --> c --> a\n  c --> d"
    chart = parse(text)
    placed = layers(chart, {"a": 20.0, "b": 90.0, "c": 40.0, "d": 10.0})
    assert [[name for name in layer if ">" not in name] for layer in placed.order] == [["a"], ["b"], ["c"], ["d"]]
    assert placed.routes["c", "a"][0] == "a"
    assert placed.centre["c"] == pytest.approx(placed.centre["d"], abs=1.0)


def test_crossings_are_taken_out() -> None:
    chart = parse("flowchart TB\n  a --> f\n  b --> e\n  c --> d")
    upper, lower = layers(chart, dict.fromkeys("abcdef", 20.0)).order
    assert [{"a": "f", "b": "e", "c": "d"}[name] for name in upper] == lower


def test_a_page_keeps_its_text_around_a_picture() -> None:
    text = drawn("before\n\n```mermaid\nflowchart TB\n  a --> b\n```\n\nafter\n")
    assert text.startswith("before\n\n<div>\n<svg")
    assert text.endswith("</div>\n\nafter\n")
    assert "\n\n" not in text[len("before\n\n") : -len("\n\nafter\n")]
