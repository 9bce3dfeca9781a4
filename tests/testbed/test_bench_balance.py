# SPDX-License-Identifier: Apache-2.0
"""The benchmark of slices of equal cost: what it counts, and a small run. No timing is asserted."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from sennit.testbed.bench.training import balance
from sennit.testbed.bench.training.balance import OFF, ON, Measured, Step
from sennit.transport.errors import ConfigError


def step(*stretches_s: float) -> Step:
    return Step(wall_s=1.0, stretches_s=stretches_s, beside_s=0.5)


def test_a_stretch_is_as_long_as_on_the_rank_that_takes_most() -> None:
    found = Measured(
        steps=[[[step(1.0, 6.0), step(3.0, 2.0)]], [[step(2.0, 4.0), step(2.0, 4.0)]]],
        costs=[[[30, 10]], [[20, 20]]],
        mean_length=5.0,
    )
    assert found.hosts_s(OFF) == 9.0
    assert found.hosts_s(ON) == 6.0
    assert found.ratio == pytest.approx(6 / 9)
    assert found.even_s(OFF) == 6.0
    assert found.least_ratio == pytest.approx(6 / 9)
    assert (found.dearest(OFF), found.dearest(ON)) == (1.5, 1.0)


def test_data_with_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="tiny: 23 steps; allowed: 24 or more, half of which are taken"):
        balance.middle(23, balance.Settings(data="tiny"))
    assert balance.middle(24, balance.Settings()) == 12


@pytest.mark.needs("backend", "shm")
def test_ranks_cost_alike_in_a_small_run() -> None:
    data = "synthetic-yambda?rows=2000&users=20&items=50&last=80"
    report = balance.run(balance.Settings(data=data, world=2, batches=(16,), dim=8, steps=2))
    found = report.batches[16]
    assert [[len(ranks) for ranks in found.steps[which]] for which in (OFF, ON)] == [[2, 2]] * 2
    assert all(time_s > 0 for which in (OFF, ON) for ranks in found.steps[which] for one in ranks for time_s in one[1])
    assert 1 <= found.dearest(ON) < found.dearest(OFF)
    console = Console(record=True, width=200)
    balance.render(report, console)
    assert f"{found.ratio:.2f}" in console.export_text()
    assert json.loads(json.dumps(report.as_json()))["batches"]["16"]["ratio"] == found.ratio
