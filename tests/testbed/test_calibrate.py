# SPDX-License-Identifier: Apache-2.0
"""`sennit calibrate`: what the fit finds in times, and the command with real ranks."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.errors import SennitError
from sennit.runtime.calibrate import calibrate, codec_speeds, core_sharing, kernel_speeds
from sennit.runtime.calibrate.cost_fit import FitError, Sample, fit
from sennit.runtime.planner.constants import OPTIMIZERS, Constants, cores_here, read_constants
from sennit.transport.choice.calibration import read_calibration
from sennit.transport.choice.coded_cost import SPEEDS
from sennit.transport.choice.costs import NETWORK, SHARED_MEMORY, Costs
from sennit.transport.choice.selection import Selection
from sennit.transport.meeting.store import FileStore
from sennit.transport.plans.hosts import Hosts

TRUE = Costs(round_s=2e-5, message_s=3e-6, byte_s=4e-10, peer_share=0.3, fold_byte_s=5e-11)


def samples(costs: Costs, *worlds: int, noise: float = 0, seed: int = 1) -> list[Sample]:
    """What a cluster with these costs would measure."""
    dice, found = random.Random(seed), []
    for world in worlds:
        for reduction, size_bytes in calibrate.FITTED:
            for work in Selection(hosts=Hosts.equal(world, 1)).rate(reduction, size_bytes=size_bytes).values():
                sample = Sample(traffic=work.near, folded_bytes=work.folded_bytes, seconds=1)
                seconds = sample.estimate(costs) * dice.uniform(1 - noise, 1 + noise)
                found.append(dataclasses.replace(sample, seconds=seconds))
    return found


@pytest.mark.parametrize("worlds", [(4,), (2, 8), (2, 6)])
def test_the_fit_finds_the_constants_behind_the_times(worlds: tuple[int, ...]) -> None:
    found = fit(samples(TRUE._replace(peer_share=0.3 if len(worlds) > 1 else 0), *worlds), default=TRUE)
    assert found.round_s == pytest.approx(TRUE.round_s, rel=0.01)
    assert found.message_s == pytest.approx(TRUE.message_s, rel=0.01)
    assert found.fold_byte_s == pytest.approx(TRUE.fold_byte_s, rel=0.01)
    assert found.byte_s == pytest.approx(TRUE.byte_s, rel=0.01)


def test_times_that_are_ten_percent_off_give_estimates_that_are_little_worse() -> None:
    costs = fit(samples(TRUE, 2, 8, noise=0.1), default=NETWORK)
    ratios = [sample.seconds / sample.estimate(costs) for sample in samples(TRUE, 4, 8)]
    assert 0.85 < min(ratios) < max(ratios) < 1.15


def test_no_constant_is_negative() -> None:
    # Folds that give time back would explain these best.
    odd = [dataclasses.replace(s, seconds=s.seconds - s.folded_bytes * 6e-11) for s in samples(TRUE, 2, 8)]
    found = fit(odd, default=NETWORK)
    assert found.fold_byte_s == 0
    assert min(found) >= 0


def test_what_was_not_measured_keeps_its_default() -> None:
    pairs = samples(TRUE._replace(peer_share=0), 2)
    found = fit(pairs, default=NETWORK, fold_byte_s=TRUE.fold_byte_s)
    assert found.peer_share == NETWORK.peer_share
    assert found.fold_byte_s == TRUE.fold_byte_s


@pytest.mark.parametrize("seconds", [0.0, float("nan"), -1.0])
def test_impossible_times_are_refused(seconds: float) -> None:
    wrong = [*samples(TRUE, 2, 4)[:-1], dataclasses.replace(samples(TRUE, 2)[0], seconds=seconds)]
    with pytest.raises(FitError, match="the clock of this machine"):
        fit(wrong, default=NETWORK)


def test_bytes_cost_something_even_if_all_times_are_equal() -> None:
    found = fit([dataclasses.replace(sample, seconds=1e-3) for sample in samples(TRUE, 2, 4)], default=NETWORK)
    assert 0 < found.byte_s < 1e-9
    assert 0 <= found.peer_share <= 1


@pytest.mark.long
def test_ranks_on_this_machine_write_a_file_that_ranks_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The old file is being replaced, so it does not matter.
    monkeypatch.setenv("SENNIT_CALIBRATION", str(tmp_path / "missing.json"))
    output = tmp_path / "new" / "here.json"
    result = CliRunner().invoke(app, ["calibrate", "--ranks", "3", "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "measured / model" in result.output
    assert f"SENNIT_CALIBRATION={output}" in result.output
    found = read_calibration(str(output))
    assert found.shared_memory != SHARED_MEMORY
    assert found.network.fold_byte_s == found.shared_memory.fold_byte_s
    contents = json.loads(output.read_text())
    assert contents["codecs"].keys() == {kind.name.lower() for kind in SPEEDS}
    assert all(found.codecs[kind] != SPEEDS[kind] for kind in SPEEDS)
    assert min(min(speed) for speed in found.codecs.values()) > 0
    assert {contents["ways"][way]["ranks"] for way in ("shared_memory", "network")} == {3}
    assert {check["way"] for check in contents["checks"]} == {"shared_memory", "network"}
    assert [path.name for path in output.parent.iterdir()] == ["here.json"]
    constants, notes = read_constants(str(output))
    assert notes == []
    assert constants.replicas.table_s + constants.replicas.step_s > 0
    assert constants.optimizers.keys() == set(OPTIMIZERS)
    fastest, slowest = (constants.optimizers[name].row_element_s for name in ("sgd", "adam"))
    assert fastest < slowest
    # Three ranks on fewer cores share them; what they do not share keeps its default.
    measured = {
        name: value != getattr(Constants().sharing, name)
        for name, value in dataclasses.asdict(constants.sharing).items()
    }
    assert measured == {"crowd": cores_here() < 3, "switches": cores_here() <= 3}


def test_a_way_that_is_not_measured_keeps_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads measure with the least work. What they found can be written, and read again."""
    monkeypatch.setenv("SENNIT_TRANSPORT", "shm")
    monkeypatch.setattr(calibrate, "TURNS", 1)
    monkeypatch.setattr(calibrate, "SAMPLE_S", 1e-4)
    monkeypatch.setattr(kernel_speeds, "measure", lambda **_: {})
    monkeypatch.setattr(codec_speeds, "measure", lambda: SPEEDS)
    monkeypatch.setattr(core_sharing, "measure", lambda *_: (1.0, Constants().sharing))

    def measure(rank: int) -> dict[str, Any] | None:
        return calibrate.measure(rank=rank, world=2, store=FileStore(tmp_path / "store"))

    with ThreadPoolExecutor(2) as threads:
        contents, nothing = threads.map(measure, range(2))
    assert contents is not None
    assert nothing is None
    assert contents["ways"]["network"] == {**NETWORK._asdict(), "ranks": 0}
    assert contents["ways"]["shared_memory"]["ranks"] == 2
    assert {check["way"] for check in contents["checks"]} == {"shared_memory"}
    calibrate.write(tmp_path / "here.json", contents)
    found = read_calibration(str(tmp_path / "here.json"))
    assert found.network == NETWORK
    assert found.shared_memory != SHARED_MEMORY


def test_a_rank_that_fails_ends_the_command_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENNIT_PATHS", "none")
    result = CliRunner().invoke(app, ["calibrate", "--ranks", "2", "--output", "never.json"])
    assert result.exit_code == 1
    assert result.output == "error: rank 0 failed: SENNIT_PATHS=none; allowed: a whole number\n"
    assert not Path("never.json").exists()


@pytest.mark.parametrize("variables", [{}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_ranks_are_started_by_one_side_only(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = CliRunner(env={"TERMINAL_WIDTH": "200"}).invoke(
        app, ["calibrate", *(["--ranks", "2"] if variables else [])]
    )
    assert result.exit_code == 2
    assert "give --ranks, or start it with torchrun" in result.output


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old.json"
    path.write_text("old")

    def write_half(self: Path, text: str, encoding: str) -> int:
        with self.open("w", encoding=encoding) as file:
            file.write(text[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(SennitError, match=r"old\.json cannot be written: No space left on device"):
        calibrate.write(path, {"schema": 1})
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["old.json"]
