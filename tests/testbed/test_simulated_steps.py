# SPDX-License-Identifier: Apache-2.0
"""Steps of simulated hosts: sizes of exchanges, what adds up to a step, a small run from end to end."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.runtime.planner.constants import Constants
from sennit.runtime.planner.problem import Fixed
from sennit.testbed.simulation import report, training, training_report
from sennit.testbed.simulation.scenario import Pattern
from sennit.testbed.simulation.training import Shape

SHAPE = Shape(tables=8, rows=1_000, dim=16, column_shards=2, length=3.0, samples=32)
CONSTANTS = Constants()
FIXED = Fixed(slice_s=0.004, early_s=0.001, update_s=0.0005, gradient_bytes=4_000)


@pytest.mark.parametrize("hosts", [1, 4, 8, 16])
def test_every_host_owns_equally_many_shards(hosts: int) -> None:
    owned = np.bincount(np.concatenate([owners.ravel() for owners in SHAPE.owners(hosts)]), minlength=hosts)
    assert owned.tolist() == [SHAPE.shards // hosts] * hosts


def test_exchanges_have_the_bytes_of_the_model() -> None:
    """Of 32 samples: two tables a host, or half of one, whose ids then go to both of its hosts."""
    of_4 = training.exchange_bytes(SHAPE, 4, CONSTANTS, FIXED)
    assert of_4 == {"ids": 32 * 2 * (3 * 4 + 4), "vectors": 32 * 2 * 16 * 4, "gradients": 4_000}
    of_16 = training.exchange_bytes(SHAPE, 16, CONSTANTS, FIXED)
    assert of_16 == {"ids": 32 * (3 * 4 + 4), "vectors": 32 * 8 * 4, "gradients": 4_000}


def test_the_network_of_the_calibration_plays_no_part() -> None:
    slow = CONSTANTS.network.network._replace(round_s=0.5, message_s=0.5, byte_s=0.5)
    other = dataclasses.replace(CONSTANTS, network=CONSTANTS.network._replace(network=slow))
    simulated = {"ids": 0.001, "vectors": 0.002, "gradients": 0.003}
    one, two = (training.step(SHAPE, 16, constants, FIXED, simulated) for constants in (CONSTANTS, other))
    assert one.times == two.times


def test_a_step_is_what_hosts_compute_and_what_they_wait_for() -> None:
    simulated = {"ids": 0.001, "vectors": 0.002, "gradients": 0.003}
    alone = training.step(SHAPE, 1, CONSTANTS, FIXED, {})
    step = training.step(SHAPE, 16, CONSTANTS, FIXED, simulated)
    assert alone.seconds(overlapped=False) == pytest.approx(alone.computed_s)
    assert alone.exposed_share(overlapped=False) == pytest.approx(0)
    # Vectors come, and their gradients go.
    assert step.seconds(overlapped=False) == pytest.approx(step.computed_s + 0.001 + 2 * 0.002 + 0.003)
    assert step.computed_s <= step.seconds(overlapped=True) < step.seconds(overlapped=False)
    assert 0 < step.exposed_share(overlapped=True) < step.exposed_share(overlapped=False) < 1
    faster = training.step(dataclasses.replace(SHAPE, speed=10.0), 16, CONSTANTS, FIXED, simulated)
    assert faster.computed_s == pytest.approx(step.computed_s / 10)
    assert faster.exposed_share(overlapped=True) > step.exposed_share(overlapped=True)


def test_cases_name_what_they_simulate() -> None:
    cases = training.cases(SHAPE, (4, 16), CONSTANTS, FIXED, 3)
    assert [case.name for case in cases] == [
        f"training_{hosts}-{name}" for hosts in (4, 16) for name in ("ids", "vectors", "gradients")
    ]
    patterns = {case.way: case.scenario.pattern for case in cases}
    assert patterns == {"ids": Pattern.ALLTOALL, "vectors": Pattern.ALLTOALL, "gradients": Pattern.ALLREDUCE}
    assert all(case.scenario.seed == 3 for case in cases)


@pytest.mark.timeout(120)
def test_small_run_writes_a_page_and_reuses_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "measure", lambda shape: FIXED)
    page, out = tmp_path / "scaling.md", tmp_path / "out"
    page.write_text(f"before\n{training_report.BEGIN}\n{report.END}\nafter\n")
    arguments = ["testbed", "simulate-steps", "--hosts", "4", "--tables", "8", "--dim", "16", "--samples", "8"]
    arguments += ["--out", str(out), "--page", str(page), "--speeds", "1,64"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| 64 cores | 4 |" in text
    assert page.with_suffix(".svg").exists()
    told = json.loads((out / "steps.json").read_text())
    assert [step["hosts"] for step in told["speeds"]["64"]] == [1, 4]
    assert told["speeds"]["1"][0]["overlapped"]["efficiency"] == 1.0
    written = {path.name: path.stat().st_mtime_ns for path in out.glob("training_*.json")}
    assert len(written) == 3
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("training_*.json")} == written


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--hosts", "12"], "powers of two"),
        (["--hosts", "2048"], "4 to 1024"),
        (["--hosts", "many"], "numbers above 0"),
        (["--dim", "12"], "a multiple of 8"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, ["testbed", "simulate-steps", *arguments])
    assert result.exit_code == 2
    assert reason in result.output
