# SPDX-License-Identifier: Apache-2.0
"""The command line of training: a run from start to end, under torchrun too, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sennit.runtime.train import main

TINY = [
    "--data", "synthetic", "--samples", "600", "--row-limit", "200", "--batch-size", "64", "--dim", "4",
    "--bottom", "8", "--top", "8",
]  # fmt: skip


def run(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, "-m", "sennit.runtime.train", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
def test_a_run_its_resumption_and_torchrun_end_with_the_same_weights(tmp_path: Path) -> None:
    """Checkpoint after half of the steps by a run that is then thrown away; the rest under torchrun."""
    whole, rest = tmp_path / "whole.json", tmp_path / "rest.json"
    folder = str(tmp_path / "saved")
    done = run(*TINY, "--ranks", "2", "--epochs", "1", "--checkpoint", folder, "--checkpoint-every", "4",
               "--tensorboard", str(tmp_path / "events"), "--json", str(whole))  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(whole.read_text())
    assert report["steps"] == {"first": 0, "last": 8}
    assert report["world_size"] == 2
    assert report["samples"] == 8 * 64
    assert report["bytes_moved"]
    assert 0 <= report["quality"]["auc"] <= 1
    assert report["weights_sha256"] in done.stdout
    assert "bytes moved, all ranks" in done.stdout
    assert sorted(name for rank in report["ranks"] for name in rank["tables"]) == [f"table_{n:02d}" for n in range(26)]
    assert list((tmp_path / "events").glob("events.out.tfevents.*"))
    assert sorted(entry.name for entry in (tmp_path / "saved").iterdir()) == ["step-000000004", "step-000000008"]

    (tmp_path / "saved" / "step-000000008").rename(tmp_path / "lost")
    done = run(*TINY, "--epochs", "1", "--checkpoint", folder, "--resume", "--json", str(rest),
               launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    resumed = json.loads(rest.read_text())
    assert resumed["steps"] == {"first": 4, "last": 8}
    assert resumed["weights_sha256"] == report["weights_sha256"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "criteo"], "error: data set 'criteo'; allowed: flights, movielens, adult, synthetic"),
        ([*TINY, "--ranks", "3"], "error: batch size 64 cannot be cut into 3 equal parts; allowed: multiples of 3"),
        ([*TINY, "--json", "/dev/null/report.json"], "error: --json: [Errno"),
        ([*TINY, "--top", "8,x"], "error: --top '8,x'; allowed: widths separated by commas"),
    ],
)
def test_mistakes_are_told_before_a_rank_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="1"):
        main(arguments)
    told = capsys.readouterr().err
    assert told.startswith(message)
    assert len(told.splitlines()) == 1


def test_failure_on_the_ranks_is_one_message() -> None:
    done = run(*TINY, "--ranks", "2", "--dense-optimizer", "sgd", "--dense-rate", "999", "--sparse-rate", "999")
    assert done.returncode == 1
    assert "error: rank" in done.stderr
    assert "loss is " in done.stderr
    assert "Traceback" not in done.stderr
