# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a job's start: what torchrun starts is timed, and a job that fails is told as its rank told it."""

from __future__ import annotations

import json
import re

import pytest
from rich.console import Console

from sennit.runtime.training.launch import RankFailure
from sennit.testbed.bench.transport import start

pytestmark = pytest.mark.needs("backend", "shm")


def test_a_job_is_timed_from_the_start_of_torchrun() -> None:
    (job,) = start.run(start.Settings(world=2, rounds=1, against=())).jobs["sennit"]
    assert 0 < job.imported_s < job.seconds < job.ended_s
    assert job.processor_s > 0


def test_the_ratio_is_that_of_first_collectives_round_by_round() -> None:
    jobs = {
        peer: [start.Job(imported_s=1.0, seconds=seconds, ended_s=30.0, processor_s=4.0) for seconds in all_seconds]
        for peer, all_seconds in (("sennit", (2.0, 4.0, 8.0)), ("gloo", (6.0, 4.0, 12.0)))
    }
    report = start.Report(settings=start.Settings(rounds=3), machine={}, jobs=jobs)
    console = Console(record=True, width=160)
    start.render(report, console)
    assert "1.50" in console.export_text()
    assert json.loads(json.dumps(report.as_json()))["results"]["gloo"]["ratio"] == 1.5


def test_ranks_import_torch_alone() -> None:
    imported = set(re.findall(r"^(?:import|from) (\w+)", start.PROGRAM.read_text(), re.MULTILINE))
    assert imported == {"sys", "time", "pathlib", "torch"}


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="peer 'mpi': known are sennit, gloo"):
        start.Settings(against=("mpi",))


@pytest.mark.long
def test_a_job_that_fails_is_told() -> None:
    with pytest.raises(RankFailure, match=r"sennit: SENNIT_TRANSPORT"):
        start.run(start.Settings(world=2, rounds=1, transport="pigeon", against=()))
