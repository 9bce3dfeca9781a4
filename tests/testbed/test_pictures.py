# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md, its pictures and the README's figures say what docs/performance.json says, digit by digit."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sennit.testbed.bench.figures import performance_page, pictures
from sennit.testbed.bench.figures.figures import Figures, Row

DOCS = Path(__file__).resolve().parents[2] / "docs"
CHART = {"title": "t", "series": ["a", "b"], "groups": [{"name": "g", "values": [1, 2]}], "note": "n", "taken": "t"}


def test_the_committed_pages_and_pictures_are_what_the_figures_say() -> None:
    for path, text in performance_page.made_anew(DOCS).items():
        assert path.read_text(encoding="utf-8") == text, f"make pictures writes {path.name} anew"
        if path.suffix == ".svg":
            ElementTree.fromstring(text)
            assert f"({path.name})" in (DOCS / "performance.md").read_text(encoding="utf-8")


def numbers(found: Any) -> Iterator[tuple[Any, Any]]:
    """Each figure in cells: what holds it, and its place there."""
    if isinstance(found, list | dict):
        for key, value in found.items() if isinstance(found, dict) else enumerate(found):
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield found, key
            else:
                yield from numbers(value)


def test_every_figure_is_shown() -> None:
    """Any figure that changes alone changes the page: none is typed into a template, and none is left out."""
    figures = Figures.read(DOCS / performance_page.FIGURES)
    shown = performance_page.rendered(figures, "performance.md.j2")
    changed = 0
    for table in figures.tables:
        before = "\n".join(table.lines())
        assert before in shown, table.name
        for row in table.rows:
            for holder, key in numbers(row.cells):
                kept = holder[key]
                holder[key] = kept + 1
                assert "\n".join(table.lines()) != before, f"{table.name}, {row.name}: {kept}"
                holder[key] = kept
                changed += 1
    assert changed > 300


def test_no_figure_is_typed_into_a_cell_of_a_template() -> None:
    for template in performance_page.TEMPLATES.glob("*.j2"):
        for line in template.read_text(encoding="utf-8").splitlines():
            typed = re.sub(r"\{\{.*?\}\}", "", line)
            if line.startswith("| ") and not typed.startswith("| ---"):
                cells = typed.split("|")[2:]
                assert not [cell for cell in cells if re.search(r"\d", cell.replace("1 (TCP)", ""))], line


@pytest.mark.parametrize(("ratio", "shown"), [(0.6, "**AllReduce 0.60**"), (1.5, "AllReduce 1.5")])
def test_the_readme_says_where_a_peer_is_faster(ratio: float, shown: str) -> None:
    figures = Figures.read(DOCS / performance_page.FIGURES)
    _, row = figures.row("udp 8 16MiB gloo")
    row.cells[0] = [2.5, ratio]
    page = performance_page.rendered(figures, "readme.md.j2")
    (line,) = (line for line in page.splitlines() if "8 ranks; 16 MiB" in line)
    assert f"| {shown}, " in line


def test_every_row_in_which_a_peer_is_faster_is_in_the_readme() -> None:
    figures = Figures.read(DOCS / performance_page.FIGURES)
    template = (performance_page.TEMPLATES / "readme.md.j2").read_text(encoding="utf-8")
    behind = [(table.name, row) for table in figures.tables for row in table.rows if row.is_behind]
    assert behind, "the rows of 8 ranks over UDP were behind"
    assert [f"{name}: {row.name}" for name, row in behind if f'beside("{row.id}"' not in template] == []


def test_a_row_beside_a_peer_names_it() -> None:
    """Or else nobody would see that it is behind."""
    rows = [row for table in Figures.read(DOCS / performance_page.FIGURES).tables for row in table.rows]
    for row in rows:
        command = "" if row.source is None else row.source["figures"]
        is_beside = any(f'"{peer}"' in str(command) for peer in ("gloo", "openmpi", "fbgemm", "torch", "torchrec"))
        assert row.peer is not None or not is_beside, row.name


@pytest.mark.parametrize(
    ("peer", "cells", "is_behind"),
    [
        ("gloo", [[1.0, 0.98], None], True),
        ("gloo", [[1.0], {"median": 1.1, "low": 0.9, "high": 1.2}], True),
        ("gloo", [[1.0, 3], "words"], False),
        (None, [[0.5]], False),
    ],
)
def test_a_row_is_behind_where_a_figure_is_below_one(peer: str | None, cells: list[Any], is_behind: bool) -> None:
    assert Row(name="r", cells=cells, peer=peer).is_behind is is_behind


def test_a_figure_is_bold_where_it_is_short_of_its_goal() -> None:
    more = Row(name="r", cells=[], better="more", unit=" %")
    assert more.text([80, 70, 75], [75]) == "80, **70**, 75 %"
    assert more.text([70, 60], [75]) == "**70, 60 %**"
    assert Row(name="r", cells=[], better="less").text([0.5, 1.1], [1]) == "0.50, **1.1**"
    assert Row(name="r", cells=[], digits=2).text({"median": 1.5, "low": 1, "high": 2.0}, None) == "1.50 (1 to 2.00)"
    with pytest.raises(ValueError, match="better 'most'; allowed: more, less"):
        Row(name="r", cells=[], better="most")


def test_a_figure_needs_a_run(tmp_path: Path) -> None:
    found = json.loads((DOCS / performance_page.FIGURES).read_text(encoding="utf-8"))
    found["tables"][0]["rows"][1]["run"] = "a run that nobody made"
    path = tmp_path / "performance.json"
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="comes from run 'a run that nobody made'; allowed: sennit bench"):
        Figures.read(path)


def test_what_is_read_is_what_was_written() -> None:
    path = DOCS / performance_page.FIGURES
    assert Figures.read(path).text() == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("values", [[1], [1, 0], [1, -2]])
def test_a_group_needs_a_length_for_each_bar(values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"'g' has .*allowed: 2 numbers above 0"):
        pictures.Chart.from_json({**CHART, "groups": [{"name": "g", "values": values}]})


def test_scale_is_logarithmic_only_where_lengths_differ_much() -> None:
    def chart(values: list[float]) -> pictures.Chart:
        return pictures.Chart.from_json({**CHART, "groups": [{"name": "g", "values": values}]})

    assert not chart([1, 98]).is_logarithmic
    assert chart([1.5, 243]).is_logarithmic
    assert "logarithmic" in pictures.svg(chart([1.5, 243]))
