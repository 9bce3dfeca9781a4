# SPDX-License-Identifier: Apache-2.0
"""The benchmark of placements: they take turns and end with the same weights. No timing is asserted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from sennit.testbed.bench.training import placements
from sennit.testbed.bench.training.confinement import confined
from sennit.transport.errors import Unsupported

pytestmark = [pytest.mark.needs("backend", "shm"), pytest.mark.timeout(180)]


def test_placements_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SENNIT_CALIBRATION", raising=False)
    shape = {"embedding_dim": 4, "batch_size": 64, "bottom": (4,), "top": (4,)}
    report = placements.run(placements.Settings(ranks=2, steps=3, samples=200, options=shape))
    names = {placements.BEST, placements.ROBIN, *([] if report.absent else [placements.TORCHREC])}
    assert {name: len(seconds) for name, seconds in report.seconds.items()} == dict.fromkeys(names, 3)
    assert report.gain(placements.BEST) == (1, 1, 1)
    assert report.predicted_s[placements.BEST] <= report.predicted_s[placements.ROBIN]
    assert all(one >= 1 for one in report.imbalance.values())
    console = Console(record=True, width=160)
    placements.render(report, console)
    text = console.export_text()
    assert f"{report.gain(placements.ROBIN)[0]:.2f}" in text
    assert report.absent is None or "did not choose: torchrec: cannot be imported" in text
    assert json.loads(json.dumps(report.as_json()))["gain"][placements.BEST] == [1, 1, 1]


@pytest.mark.parametrize("is_second", [True, False])
def test_a_confined_process_has_a_quota_while_it_lasts(tmp_path: Path, is_second: bool) -> None:
    parent = tmp_path if is_second else tmp_path / "cpu"
    parent.mkdir(exist_ok=True)
    if is_second:
        (tmp_path / "cgroup.controllers").write_text("cpu")
    with confined(0.5, name="a", root=tmp_path):
        (folder,) = parent.glob("sennit-bench-*")
        assert (folder / "cgroup.procs").read_text() == str(os.getpid())
        if is_second:
            assert (folder / "cpu.max").read_text() == "2500 5000"
        else:
            assert (folder / "cpu.cfs_quota_us").read_text() == "2500"
    assert (parent / "cgroup.procs").read_text() == str(os.getpid())


def test_without_control_groups_it_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(Unsupported, match="it needs root"),
        confined(0.5, name="a", root=tmp_path),
    ):
        pass
