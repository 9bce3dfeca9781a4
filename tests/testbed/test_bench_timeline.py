# SPDX-License-Identifier: Apache-2.0
"""The benchmark of timelines takes turns, with the same weights. No timing is asserted."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from sennit.testbed.bench.training import timeline
from sennit.testbed.bench.training.turns import median_and_interval


@pytest.mark.needs("backend", "shm")
def test_trainers_with_and_without_a_timeline_take_turns() -> None:
    settings = timeline.Settings(data="synthetic", batch_size=64, steps=2, rounds=3)
    report = timeline.run(settings)
    assert [[len(turns) for turns in rank] for rank in report.turns] == [[3, 3], [3, 3]]
    console = Console(record=True, width=160)
    timeline.render(report, console)
    assert f"{median_and_interval(report.ratios(0))[0]:.4f}" in console.export_text()
    assert len(json.loads(json.dumps(report.as_json()))["processor time"]) == 3


def test_the_slowest_rank_counts_and_the_processor_time_of_all() -> None:
    turns = [[[(1.0, 1.0)], [(2.0, 1.0)]], [[(4.0, 3.0)], [(3.0, 4.0)]]]
    report = timeline.Report(settings=timeline.Settings(rounds=1), machine={}, turns=turns)
    assert report.ratios(0) == [3 / 4]
    assert report.ratios(1) == [5 / 4]
    middle, low, high = median_and_interval([1.0, 1.0, 1.0, 2.0, 3.0])
    assert low <= middle == 1.0 <= high <= 3.0
