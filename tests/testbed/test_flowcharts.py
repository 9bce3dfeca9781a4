# SPDX-License-Identifier: Apache-2.0
"""Flowcharts of the pages as pictures: all that they say is there."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from sennit.errors import Unsupported
from sennit.testbed.site.picture import dot, drawn, svg

ROOT = Path(__file__).resolve().parents[2]
CHART = re.compile(r"^```mermaid\n(.*?)^```", re.MULTILINE | re.DOTALL)
CHARTS = {
    f"{page.name} {number}": text
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for number, text in enumerate(CHART.findall(page.read_text()), 1)
}


def test_there_are_charts() -> None:
    assert len(CHARTS) >= 3


@pytest.mark.needs("dot")
@pytest.mark.parametrize("text", CHARTS.values(), ids=list(CHARTS))
def test_a_picture_has_all_of_its_chart(text: str) -> None:
    picture = ElementTree.fromstring(svg(dot(text)))
    groups = [element.get("class") for element in picture.iter() if element.tag.endswith("}g")]
    assert groups.count("edge") == len(re.findall(r"-->|==>|\.->|---", text))
    assert groups.count("cluster") == text.count("subgraph ")
    labels = dict(re.findall(r"(\w+)\[\"?([^]\"]*)", text))
    named = re.findall(r"subgraph \w+ \[(.+)\]|(?:--|==|-\.) ([^->=.][^->=]*?) (?:-->|==>|\.->)", text)
    words = {line for label in labels.values() for line in label.split("<br>")} | {one or other for one, other in named}
    shown = {(element.text or "").strip() for element in picture.iter() if element.tag.endswith("}text")}
    assert shown >= words
    assert not [element for element in picture.iter() if element.get("id")]


def test_edges_have_kinds_and_labels_and_boxes_what_is_named_inside() -> None:
    text = "flowchart TB\n  subgraph g [x y]\n    a[one<br>two] --> b --- c\n  end\n  a == x ==> c\n  b -. z .-> a"
    lines = [line.strip() for line in dot(text).splitlines()]
    begin, end = lines.index('subgraph cluster_g { label="x y"'), lines.index("}")
    assert lines[begin + 1 : end] == [r'a [label="one\ntwo"]', "b", "a -> b [ ]", "c", "b -> c [dir=none ]"]
    assert {'a -> c [penwidth=3 label=" x "]', 'b -> a [style=dashed label=" z "]'} <= set(lines[end:])


@pytest.mark.parametrize("text", ["flowchart LR\n a --> b", "flowchart TB\n a ~~~ b", "flowchart TB\n a --> (b)"])
def test_a_line_in_another_form_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="the site draws"):
        dot(text)


@pytest.mark.needs("dot")
def test_a_page_keeps_its_text_around_a_picture() -> None:
    text = drawn("before\n\n```mermaid\nflowchart TB\n  a --> b\n```\n\nafter\n")
    assert text.startswith("before\n\n<div>\n<svg")
    assert text.endswith("</div>\n\nafter\n")
    assert "\n\n" not in text[len("before\n\n") : -len("\n\nafter\n")]


def test_without_graphviz_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unsupported, match="install graphviz"):
        svg("digraph {}")
