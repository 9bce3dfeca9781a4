# SPDX-License-Identifier: Apache-2.0
"""The comparison with all peers: figures, pages and pictures made of them, and the pages that are committed."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.testbed.bench import comparison, comparison_page
from sennit.testbed.bench.comparison import CORE, LOOKUPS, LOOPBACK, SHARED, STEP, Comparison, Row
from sennit.testbed.bench.tables import embedding
from sennit.testbed.bench.tables.embedding_peers import Shape
from sennit.testbed.bench.training import sharded

DOCS = Path(__file__).resolve().parents[2] / "docs"
MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "kernel": "6.1",
    "load_average": [0.26, 0.5, 0.5],
    "time_utc": "2026-11-24T01:02:03Z",
    "versions": {"torch": "2.13.0", "sennit": "0.1.0"},
}


STEPS = sharded.Report(
    settings=sharded.Settings(),
    machine={},
    seconds={"table_wise": [1.0, 1.0], "torchrec": [2.0, 4.0]},
    absent=None,
)


def made() -> Comparison:
    """Two collectives at one size, beside one peer or two, and no training step."""
    rows = [
        Row.of(SHARED, "AllReduce, 4 KiB", "gloo", [3.0, 2.0, 8.0], [1.0, 1.0, 2.0]),
        Row.of(CORE, "AllReduce, 4 KiB", "openmpi", [0.5, 0.5, 0.5], [1.0, 1.0, 2.0]),
        Row.of(SHARED, "ReduceScatter, 4 KiB", "gloo", [4.0, 4.0], [2.0, 2.0]),
        Row.of(LOOPBACK, "AllReduce, 64 MiB", "gloo", [0.06, 0.06], [0.03, 0.03]),
        Row.of(LOOPBACK, "ReduceScatter, 64 MiB", "gloo", [0.09, 0.09], [0.03, 0.03]),
        Row.of(LOOKUPS, "fp32, Zipf", "torch", [1.2, 1.2], [0.1, 0.1]),
    ]
    return Comparison(machine=MACHINE, rows=rows, absent={"TorchRec + FBGEMM": "cannot be imported"})


def test_a_ratio_is_of_the_same_round() -> None:
    row = made().rows[0]
    assert (row.ratio, row.peer, row.ours_s) == (3.0, "gloo", 1.0)
    assert (row.low, row.high) == (2.2, 3.8)
    assert made().rows[1].peer == "OpenMPI"


def test_the_document_has_every_row_and_names_who_did_not_run() -> None:
    text = comparison_page.document(made())
    assert f"| {SHARED} | sennit | gloo / sennit" in text
    assert "| AllReduce, 4 KiB | 1e+03 ms | 3 (2.2 to 3.8) |" in text
    assert "| ReduceScatter, 4 KiB | 2e+03 ms | 2 (2 to 2) |" in text
    assert "| AllReduce, 4 KiB | 1e+03 ms | 0.50 (0.30 to 0.50) |" in text
    assert "| fp32, Zipf | 100 ms | 12 (12 to 12) |" in text
    assert "- TorchRec + FBGEMM did not run: cannot be imported" in text
    assert "Measured 2026-11-24 on a processor, 2 cores, load 0.3, Linux 6.1: torch 2.13.0, sennit 0.1.0." in text
    assert STEP not in text


def test_the_pictures_have_a_bar_for_each_collective_beside_gloo() -> None:
    found = comparison_page.charts(made())
    collectives, training = (found[name] for name in comparison_page.PICTURES)
    assert collectives.series == ("AllReduce", "ReduceScatter")
    assert collectives.groups == (("shm, 4 KiB", (3.0, 2.0)), ("UDP, 64 MiB", (2.0, 3.0)))
    assert training.groups == (("plain torch, fp32, Zipf", (12.0,)),)


def test_what_is_read_is_what_was_written() -> None:
    found = made()
    assert Comparison.from_json(json.loads(json.dumps(found.as_json()))) == found
    with pytest.raises(ValueError, match="not a comparison of sennit bench all"):
        Comparison.from_json({"rows": [{"part": "x"}], "machine": {}, "absent": {}})


def test_a_page_without_marks_is_refused() -> None:
    page = f"before\n{comparison_page.BEGIN}\nold\n{comparison_page.END}\nafter"
    anew = comparison_page.spliced(page, "new")
    assert anew == f"before\n{comparison_page.BEGIN}\nnew\n{comparison_page.END}\nafter"
    assert comparison_page.spliced(anew, "new") == anew
    with pytest.raises(ValueError, match="a page without"):
        comparison_page.spliced("before", "new")


def test_the_committed_pages_and_pictures_are_what_the_figures_say() -> None:
    for path, text in comparison_page.made_anew(DOCS).items():
        assert path.read_text(encoding="utf-8") == text, f"python -m sennit.testbed.bench.comparison_page docs: {path}"
        if path.suffix == ".svg":
            ElementTree.fromstring(text)


@pytest.mark.needs("backend", "shm")
@pytest.mark.long
def test_the_command_runs_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Shape(name="fp32, Zipf", table_count=2, row_count=100, bags=10, length=3, zipf=1.2)
    monkeypatch.setattr(embedding, "shapes", lambda: [small])
    # It has a test of its own, and starts two more processes.
    monkeypatch.setattr(sharded, "run", lambda settings: replace(STEPS, settings=settings))
    folder = tmp_path / "report"
    result = CliRunner().invoke(app, ["bench", "all", "--quick", "--rounds", "2", "--force", "--report", str(folder)])
    assert result.exit_code == 0, result.output
    found = Comparison.from_json(json.loads((folder / comparison_page.FIGURES).read_text()))
    assert {row.part for row in found.rows} - {CORE} == {SHARED, LOOPBACK, LOOKUPS, STEP}
    assert found.rows[-1].ratio == 3
    assert all(row.low <= row.ratio <= row.high for row in found.rows)
    assert {path.name for path in folder.iterdir()} == {
        comparison_page.FIGURES,
        comparison_page.PAGE,
        *comparison_page.PICTURES,
    }
    assert (folder / comparison_page.PAGE).read_text() == comparison_page.files(found)[comparison_page.PAGE]


def test_a_spread_needs_two_rounds() -> None:
    with pytest.raises(ValueError, match="rounds 1; allowed: 2 or more"):
        comparison.Settings(rounds=1)
