# SPDX-License-Identifier: Apache-2.0
"""Elastic runs with feeders: `sennit feed` goes on with the ranks that are left, and with those that join."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sennit.offload.sketch import Sketch
from sennit.runtime.timeline.trace_file import read
from tests.runtime.whole_run import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PROGRAM = ("-m", "sennit.testbed.scenarios.mortal_trainer")
HIDDEN = (str(Path(__file__).with_name("hidden_trainer.py")),)
DATA = ["--data", "synthetic", "--samples", "700", "--row-limit", "200"]
MODEL = ["--batch-size", "60", "--dim", "4", "--bottom", "8", "--top", "8", "--epochs", "1", "--elastic",
    "--sharding", "table_wise",
]  # fmt: skip
STEP_COUNT = 10
DEADLINE_S = 120.0
LOOK_S = 0.02


@contextmanager
def background(command: list[str], **variables: Any) -> Iterator[subprocess.Popen[str]]:
    environment = {name: json.dumps(value) for name, value in variables.items()}
    with subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def feeder(port: int, *arguments: str) -> Any:
    return background(["-m", "sennit", "feed", *DATA, "--to", f"127.0.0.1:{port}", "--timeout", "60", *arguments])


def trainer(port: int, *arguments: str, program: Sequence[str] = PROGRAM, **variables: Any) -> Any:
    return background([*program, *MODEL, "--ingest", f"cpu://127.0.0.1:{port}", *arguments], **variables)


def join_address(run: subprocess.Popen[str]) -> str:
    assert run.stdout is not None
    before, _, address = run.stdout.readline().rpartition("--join ")
    assert before, ended(run)
    return address.strip()


def wait_for(marker: Path, run: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not marker.exists():
        assert run.poll() is None, ended(run)
        assert time.monotonic() < deadline_s, f"no {marker.name}"
        time.sleep(LOOK_S)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


def report_of(run: subprocess.Popen[str], path: Path) -> dict[str, Any]:
    code, output = ended(run)
    assert code == 0, output
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["steps"]["last"] == STEP_COUNT
    return report


def resumed(folder: Path, step: int, ranks: int) -> dict[str, Any]:
    """The report of an undisturbed run from memory that begins with the checkpoint of this step."""
    other = folder / "other"
    name = f"step-{step:09}"
    shutil.copytree(folder / "saved" / name, other / name)
    arguments = ["--ranks", f"{ranks}", "--checkpoint", str(other), "--resume"]
    return train(folder / "whole.json", *DATA, "--order", "shuffled", *MODEL, *arguments)


@pytest.mark.long
def test_survivors_and_a_newcomer_are_fed_on(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The feeders were told the address of the rank that dies. The newcomer takes its port."""
    monkeypatch.setenv("SENNIT_TRANSPORT", "udp")
    halt, path = tmp_path / "halted", tmp_path / "run.json"
    common = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "3", "--timeout", "60"]
    common += ["--sketch", str(tmp_path / "rows.sketch"), "--timeline", str(tmp_path / "steps.json")]
    deaths, halts = [[1, 5, str(tmp_path / "died")]], [[2, 5, str(halt)]]
    with (
        feeder(port + 1) as one,
        feeder(port + 1, "--workers", "2") as two,
        trainer(port, "--ranks", "3", *common, "--json", str(path), DEATHS=deaths, HALTS=halts) as run,
    ):
        address = join_address(run)
        wait_for(halt, run)
        with trainer(port + 1, "--join", address, *common) as newcomer:
            code, output = ended(newcomer)
            assert code == 0, output
        report = report_of(run, path)
        for feed in (one, two):
            code, output = ended(feed)
            assert code == 0, output
            assert "fed " in output
    lost, joined = report["changes"]
    assert (lost["lost"], lost["world_size"], lost["step"]) == ([1], 2, 3)
    assert (joined["joined"], joined["world_size"], joined["step"]) == ([2], 3, 6)
    # Of the last group: four steps, and seventy held-back rows.
    assert report["ingest"]["records"] == 4 * 60 + 70
    assert report["ingest"]["feeders"] == 3 * 3
    assert report["weights_sha256"] == resumed(tmp_path, 6, 3)["weights_sha256"]
    # Of the first group five steps of the survivors, who have at least five of eight slices; of the others all. And
    # once more what had arrived when a group ended.
    last = 4 * 60 + 70
    sketch = Sketch.load(tmp_path / "rows.sketch")
    assert 5 * 60 * 5 // 8 - 5 * 3 + 3 * 60 + last <= sketch.rows <= 2 * STEP_COUNT * 60 + last
    assert "lost rank 1, went on with 2 from step 4; took in rank 2, went on with 3 from step 7" in sketch.note
    ranks = [[clock.rank for clock in read(tmp_path / f"steps{end}.json").ranks] for end in ("", ".2", ".3")]
    # The first file has the rank that died, too.
    assert ranks == [[0, 1, 2], [0, 1], [0, 1, 2]]


@pytest.mark.long
def test_a_newcomer_that_no_feeder_reaches_ends_and_the_others_go_on(tmp_path: Path, port: int) -> None:
    halt, path = tmp_path / "halted", tmp_path / "run.json"
    common = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "3", "--timeout", "24"]
    with (
        feeder(port) as feed,
        trainer(port, "--ranks", "2", *common, "--json", str(path), HALTS=[[2, 4, str(halt)]]) as run,
    ):
        address = join_address(run)
        wait_for(halt, run)
        with trainer(port + 2, "--join", address, *common, program=HIDDEN) as newcomer:
            code, output = ended(newcomer)
            assert code == 1
            assert "batch 5, rank 2: 0 of 23 records came, and none more within 12 s; feeders: none" in output
        report = report_of(run, path)
        code, output = ended(feed)
        assert code == 0, output
    joined, lost = report["changes"]
    assert (joined["joined"], joined["step"]) == ([2], 5)
    assert (lost["lost"], lost["world_size"], lost["step"]) == ([2], 2, 3)
    assert report["weights_sha256"] == resumed(tmp_path, 3, 2)["weights_sha256"]


@pytest.mark.long
def test_without_feeders_every_rank_says_what_it_waits_for(tmp_path: Path, port: int) -> None:
    """All ranks end at the deadline, though the run could lose some of them."""
    halt = tmp_path / "halted"
    # Feeders have half of it to start in, which takes seconds on a busy machine.
    common = ["--timeout", "28", "--min-ranks", "2", "--sharding", "table_wise"]
    with (
        feeder(port) as feed,
        trainer(port, "--ranks", "2", *common, HALTS=[[2, 4, str(halt)]]) as run,
    ):
        wait_for(halt, run)
        feed.kill()
        feed.wait()
        with trainer(port + 2, "--join", join_address(run), *common) as newcomer:
            code, output = ended(newcomer)
            assert code == 1
            assert "batch 5, rank 2: 0 of 23 records came, and none more within 14 s; feeders: none" in output
        code, output = ended(run)
        assert code == 1
        assert "feeders: none" in output
