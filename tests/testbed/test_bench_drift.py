# SPDX-License-Identifier: Apache-2.0
"""`sennit bench drift`: what is compared with what, and a small run."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("torch")
pytest.importorskip("pyarrow")

from sennit.runtime.stream.synthetic import days_of
from sennit.runtime.stream.synthetic_settings import SyntheticStream
from sennit.runtime.training import launch
from sennit.testbed.bench.training import drift, drift_page
from sennit.testbed.bench.training.drift_learner import Day, Vocabulary

LAB = Path(__file__).parents[2] / "docs" / "lab"
SMALL = drift.Settings(
    stream=SyntheticStream(days=4, rows_per_day=1_024, living=(60, 9), life_days=4, drift_days=4, dense=2),
    first_days=1,
    delays=(1, 2),
    seeds=2,
)


def report(**entropies: list[list[float]]) -> drift.Report:
    """Three days, the last two of which have late models: NE of each way by seed and day."""
    settings = replace(SMALL, stream=replace(SMALL.stream, days=5), seeds=len(entropies["ours"]))
    runs = [
        drift.Run(
            attainable=[{"normalised_entropy": 0.5, "expected": 0.5} for _ in range(3)],
            entropies={drift.IN_ORDER: ours, drift.LEFT: left},
            late={"1": [value + 0.01 for value in ours[1:]], "2": left[1:]},
        )
        for ours, left in zip(entropies["ours"], entropies["left"], strict=True)
    ]
    return drift.Report(settings=settings, machine={}, load_average=[0.0, 0.0], runs=runs)


def test_ways_are_compared_seed_by_seed_above_the_attainable() -> None:
    found = report(
        ours=[[0.6, 0.6, 0.6], [0.7, 0.7, 0.7], [0.8, 0.8, 0.8]],
        left=[[0.6, 0.7, 0.8], [0.7, 0.8, 0.9], [0.8, 0.9, 1.03]],
    )
    assert found.mean(drift.IN_ORDER) == pytest.approx([0.1, 0.2, 0.3])
    assert found.above(drift.LEFT)[2] == pytest.approx([0.3, 0.4, 0.53])
    # Seeds differ by 0.1, what it costs by 0.01 alone.
    cost = found.cost(drift.LEFT)
    assert cost.mean == pytest.approx((0.1 + 0.1 + 0.11) / 3)
    assert cost.half < 0.02
    # Late models have a value for the last two days, and are compared on these.
    assert found.above_late(0) == pytest.approx([0.1, 0.2, 0.3])
    assert found.cost_late(1).mean == pytest.approx(0.01)
    assert found.cost_late(2).mean == pytest.approx((0.15 + 0.15 + 0.165) / 3)
    minus = found.as_json()["minus in order"]
    assert minus[drift.LEFT]["mean"] == pytest.approx(cost.mean)
    assert minus["1 day late"]["mean"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"seeds": 1}, "1 seeds; allowed: 2 to"),
        ({"first_days": 0}, "0 first days"),
        ({"delays": ()}, r"delays of \(\)"),
        ({"delays": (0,)}, r"delays of \(0,\)"),
        ({"delays": (1, 3)}, r"1 first days and delays of \(1, 3\) of 4 days; allowed: 1 or more first days"),
    ],
)
def test_settings_that_have_no_answer_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(SMALL, **changes)


def test_ids_that_are_not_known_share_a_row_of_their_own() -> None:
    days = [Day.read(file) for file in days_of(SMALL.stream)]
    every, few = Vocabulary(rows=(256, 64)), Vocabulary.of(days[:1], (256, 64))
    first, last = days[0], days[-1]
    for ours, all_known in zip(few.samples(first).columns, every.samples(first).columns, strict=True):
        assert ours.values.equal(all_known.values)
    for number, rows in enumerate((256, 64)):
        values = few.samples(last).columns[number].values.numpy()
        is_new = ~np.isin(last.ids[number], first.ids[number])
        assert 0.3 < is_new.mean() < 1
        assert (values[is_new] == rows).all()
        np.testing.assert_array_equal(values[~is_new], every.samples(last).columns[number].values.numpy()[~is_new])
        assert every.samples(last).columns[number].values.max() < rows


@pytest.mark.timeout(240)
@pytest.mark.needs("backend", "shm")
def test_small_run(tmp_path: Path) -> None:
    found = drift.run(SMALL)
    assert len(found.runs) == 2
    assert found.runs[0] != found.runs[1]
    for run in found.runs:
        assert set(run.entropies) == {*drift.WAYS, drift.KNOWS_MIDNIGHT, drift.KNOWS_FIRST}
        assert {len(values) for values in run.entropies.values()} == {len(run.attainable)} == {2}
        # Days 2 and 3 are evaluated, and day 3 has late models. Who is left after day 0 is two days late there.
        assert run.late["2"] == run.entropies[drift.LEFT][1:]
        assert run.late["1"] != run.late["2"]
        # Who knows more is better, and nobody is better than the true probabilities.
        best = [day["normalised_entropy"] for day in run.attainable]
        middle = run.entropies[drift.KNOWS_MIDNIGHT]
        assert statistics.fmean(best) < statistics.fmean(middle)
        assert statistics.fmean(middle) < statistics.fmean(run.entropies[drift.KNOWS_FIRST])
        ours = statistics.fmean(run.entropies[drift.IN_ORDER])
        assert statistics.fmean(middle) < ours < statistics.fmean(run.entropies[drift.LEFT])
    assert drift.Report.from_json(json.loads(json.dumps(found.as_json()))) == found
    # The program on tables and replicas gives the same bits with two ranks.
    seeded = replace(SMALL, stream=replace(SMALL.stream, seed=2))
    assert launch.run_ranks(drift.run_rank, seeded, 2, timeout_s=60) == [found.runs[1]] * 2
    console = Console(record=True, width=200)
    drift.render(found, console)
    assert "2 days late" in console.export_text()
    pytest.importorskip("matplotlib")
    for name in ("first.svg", "second.svg"):
        drift_page.plot([found, found], tmp_path / name)
    drawn = (tmp_path / "first.svg").read_text()
    assert drift.NO_NEW_IDS in drawn
    assert (tmp_path / "second.svg").read_text() == drawn


def test_page_shows_the_figures() -> None:
    """`make drift` writes both."""
    page = (LAB / drift_page.PAGE).read_text()
    assert drift_page.tables(drift_page.read(LAB / drift_page.FIGURES)) in page
