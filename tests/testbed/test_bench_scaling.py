# SPDX-License-Identifier: Apache-2.0
"""The scaling benchmark: what efficiency is, and a small run. No timing is asserted."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from sennit.testbed.bench.training import scaling
from sennit.testbed.bench.training.turns import Exposed


def measured(step_s: float, processor_s: float, alltoall_ms: float) -> scaling.Measured:
    exposed = Exposed(step_ms=step_s * 1e3, alltoall_ms=alltoall_ms, others_ms=1.0)
    return scaling.Measured(step_s=step_s, processor_s=processor_s, exposed=exposed)


def test_the_ideal_takes_turns_on_cores_that_are_shared() -> None:
    report = scaling.Report(
        settings=scaling.Settings(worlds=(1, 2, 8)),
        machine={},
        cores=2,
        runs={
            1: [measured(0.010, 0.010, 0.0)],
            2: [measured(0.010, 0.025, 1.0)],
            8: [measured(0.050, 0.100, 4.0), measured(0.080, 0.200, 6.0), measured(0.100, 0.160, 9.0)],
        },
    )
    assert report.efficiency(1) == 1.0
    assert report.efficiency(2) == 1.0
    # Eight ranks on two cores take four turns of 10 ms each at best.
    assert report.efficiency(8) == pytest.approx(0.5)
    assert report.processor_efficiency(2) == pytest.approx(0.8)
    assert report.processor_efficiency(8) == pytest.approx(0.5)
    assert report.exposed_share(2) == pytest.approx(0.2)
    assert report.exposed_share(8) == pytest.approx(0.1)


@pytest.mark.needs("backend", "shm")
def test_small_run() -> None:
    settings = scaling.Settings(samples=600, worlds=(1, 2), local_batch=32, dim=8, steps=1, turns=1, rounds=1)
    report = scaling.run(settings)
    assert {world: len(runs) for world, runs in report.runs.items()} == {1: 1, 2: 1}
    assert 0 <= report.exposed_share(1) < 1
    assert 0 < report.exposed_share(2) < 1
    console = Console(record=True, width=200)
    scaling.render(report, console)
    assert "32 samples a rank" in console.export_text()
    assert json.loads(json.dumps(report.as_json()))["worlds"]["1"]["efficiency"] == 1.0


@pytest.mark.parametrize("worlds", [(2, 4), (1, 32), (1, 3), (1, 0)])
def test_worlds_that_make_no_sense_are_refused(worlds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="allowed: 1, and others of"):
        scaling.Settings(worlds=worlds)
