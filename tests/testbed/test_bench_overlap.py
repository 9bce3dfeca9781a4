# SPDX-License-Identifier: Apache-2.0
"""The benchmark of overlapped steps: schedules take turns, with the same weights. No timing is asserted."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from sennit.testbed.bench.training import overlap


@pytest.mark.needs("backend", "shm", "netns")
def test_schedules_take_turns_between_two_hosts() -> None:
    report = overlap.run(overlap.Settings(data="synthetic", hosts=2, batch_size=64, steps=1, rounds=2))
    assert {name: len(turns) for name, turns in report.turns.items()} == dict.fromkeys(overlap.SCHEDULES, 2)
    assert all(exposed.step_ms > 0 for exposed in report.exposed.values())
    assert report.exposed[overlap.SERIAL].alltoall_ms > 0
    console = Console(record=True, width=200)
    overlap.render(report, console)
    assert f"{report.step_ms('tables'):.2f}" in console.export_text()
    assert json.loads(json.dumps(report.as_json()))["schedules"]["serial"]["to_serial"][0] == 1.0


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks on 2 hosts"):
        overlap.Settings(world=3, hosts=2)
    with pytest.raises(ValueError, match="a network, but 1 host"):
        overlap.Settings(round_trip_us=1_000)
