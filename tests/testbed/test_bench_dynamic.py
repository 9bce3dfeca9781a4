# SPDX-License-Identifier: Apache-2.0
# Torch types some functions thinly:
# mypy: disable-error-code="no-untyped-call"
"""A small run of the benchmark of dynamic tables. No timing is asserted."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rich.console import Console

from sennit.testbed.bench.tables import dynamic


def test_each_shape_is_beside_its_peer() -> None:
    settings: dict[str, Any] = {"rows": 2000, "dim": 8, "bags": 20, "length": 3, "rounds": 2, "seed": 1}
    found, growth = dynamic.run(**settings)
    assert [(one.peer, one.shape.load, one.shape.new) for one in found] == [
        (dynamic.FIXED, 0.8, 0.0),
        (dynamic.FIXED, 0.95, 0.0),
        (dynamic.FIXED, 0.95, 0.02),
        (dynamic.BY_HAND, 0.8, 0.0),
    ]
    report: Any = dynamic.as_json(found, growth, **settings)
    assert report["settings"] == settings
    assert all(len(times) == 2 for one in report["results"] for times in one["step_s"].values())
    console = Console(width=160, record=True)
    dynamic.render(found, growth, console)
    told = console.export_text()
    assert "fixed table" in told
    # 1,900 ids in steps of 60; the last step is left out if it has fewer.
    assert "growth: 31 steps of new ids alone, until 95% of rows are in use; longest / median" in told
    assert report["growth"]["step_s"] == growth.step_s


def test_torchrec_has_a_row_for_each_known_id() -> None:
    pytest.importorskip("torchrec")
    shape = dynamic.Shape(rows=1000, dim=4, bags=10, length=2, load=0.8)
    ids = dynamic.Ids(shape, seed=2)
    rows = dynamic.managed(shape, ids)(ids.known)
    assert len(rows.unique()) == len(ids.known)
    assert int(rows.max()) < shape.rows


def test_ids_and_rows_of_a_batch_belong_together() -> None:
    ids = dynamic.Ids(dynamic.Shape(rows=100, dim=4, bags=5, length=2, load=0.5), seed=3)
    assert len(ids.known.unique()) == 50
    for number in range(3):
        given, rows = ids.of(number)
        assert given.equal(ids.known[rows])
    fresh = dynamic.Ids(dynamic.Shape(rows=100, dim=4, bags=50, length=2, load=0.5, new=0.5), seed=3)
    given, _ = fresh.of(0)
    assert 20 < int(torch.isin(given, fresh.known).logical_not().sum()) < 80
