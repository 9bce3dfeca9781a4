# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/performance.md match the committed figures, which the page's tables contain too."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from sennit.testbed.bench import pictures

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIGURES = DOCS / "performance.json"
CHART = {"title": "t", "series": ["a", "b"], "groups": [{"name": "g", "values": [1, 2]}], "note": "n"}


def test_the_committed_pictures_are_what_the_command_makes() -> None:
    for path, text in pictures.pictures(FIGURES).items():
        assert path.read_text() == text, f"make pictures writes {path.name} anew"
        ElementTree.fromstring(text)
        assert f"({path.name})" in (DOCS / "performance.md").read_text()


def test_every_figure_of_the_pictures_is_on_the_page() -> None:
    page = (DOCS / "performance.md").read_text()
    for chart in json.loads(FIGURES.read_text()).values():
        for group in chart["groups"]:
            for value in group["values"]:
                assert f" {value:g}" in page, f"{group['name']}: {value:g}"


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
