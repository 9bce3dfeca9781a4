# SPDX-License-Identifier: Apache-2.0
"""`sennit train --stop-early`: when runs end, and that the best checkpoint is that of the best epoch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.metrics import Evaluation, Quality
from sennit.runtime.training.predictions import quality
from sennit.transport.errors import ConfigError
from tests.extent import briefly
from tests.runtime.whole_run import train

pytestmark = pytest.mark.timeout(120)

# The rates are such that few samples are soon learnt by heart.
OVERFITTING = [
    "--data", "synthetic", "--samples", "600", "--row-limit", "400", "--batch-size", "64", "--dim", "8",
    "--sparse-rate", "1.0", "--dense-rate", "0.1", "--decay", "none", "--epochs", "12",
]  # fmt: skip


INCREMENTS = ["--checkpoint-every", "3", "--checkpoint-increments", "3"]


def best_of(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "best").iterdir()
    found: dict[str, Any] = json.loads((path / "quality.json").read_text())
    assert int(path.name.removeprefix("step-")) == found["step"]
    return found


@pytest.mark.parametrize("increments", briefly([[], INCREMENTS], [INCREMENTS]), ids=["whole checkpoints", "increments"])
def test_a_run_ends_when_it_gets_no_better_and_the_best_epoch_is_kept(tmp_path: Path, increments: list[str]) -> None:
    folder = tmp_path / "checkpoints"
    stopping = [*OVERFITTING, "--stop-early", "2", "--checkpoint", str(folder), *increments]
    stopped = train(tmp_path / "stopped.json", *stopping, "--ranks", "2")
    best = best_of(folder)
    assert stopped["best"] == best
    per_epoch = best["step"] // best["epoch"]
    assert stopped["steps"]["last"] == (best["epoch"] + 2) * per_epoch < 12 * per_epoch
    assert best["quality"]["normalised_entropy"] < stopped["quality"]["normalised_entropy"]
    # The weights are those of that moment, with any number of ranks.
    again = [*OVERFITTING, "--steps", str(best["step"]), "--checkpoint", str(folder / "best"), "--resume"]
    assert train(tmp_path / "again.json", *again, "--ranks", "1")["quality"] == best["quality"]
    # It changes nothing of what is trained, and what is over stays over.
    resumed = train(tmp_path / "resumed.json", *stopping, "--resume", "--ranks", "1")
    plain = train(tmp_path / "plain.json", *OVERFITTING, "--steps", str(stopped["steps"]["last"]), "--ranks", "1")
    assert [run["weights_sha256"] for run in (resumed, plain)] == [stopped["weights_sha256"]] * 2
    assert resumed["steps"]["first"] == resumed["steps"]["last"]
    assert best_of(folder) == best


def test_what_is_best_depends_on_the_metric() -> None:
    def evaluation(auc: float, entropy: float) -> Evaluation:
        quality = Quality(auc=auc, log_loss=0.5, normalised_entropy=entropy, base_rate=0.5, sample_count=9)
        return Evaluation(step=1, epoch=1, quality=quality)

    ranked, calibrated, undefined = evaluation(0.8, 0.9), evaluation(0.7, 0.8), evaluation(math.nan, math.nan)
    assert ranked.loss("auc") < calibrated.loss("auc") < undefined.loss("auc")
    assert calibrated.loss("ne") < ranked.loss("ne") < undefined.loss("ne")


ONE_CLASS = """
label = "clicked"
[dense.price]
[sparse.user]
rows = 50
"""


def test_held_back_samples_of_one_class_are_named_and_no_reason_to_stop(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    count = 400
    content = {"clicked": [0] * count, "price": [1.0] * count, "user": [number % 50 for number in range(count)]}
    parquet.write_table(arrow.table(content), tmp_path / "clicks.parquet")
    (tmp_path / "schema.toml").write_text(ONE_CLASS)
    data = ["--data", str(tmp_path / "clicks.parquet"), "--schema", str(tmp_path / "schema.toml"), "--batch-size", "32"]
    report = train(tmp_path / "plain.json", *data, "--steps", "2")
    assert "NaN" not in (tmp_path / "plain.json").read_text()
    assert report["quality"]["auc"] is report["quality"]["normalised_entropy"] is None
    held_back = report["quality"]["sample_count"]
    why = f"all {held_back} held-back samples have the label 0"
    assert quality(np.zeros(held_back), np.zeros(held_back)).undefined == why
    assert quality(np.zeros(2), np.arange(2.0)).undefined == ""
    saving = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "1"]
    with pytest.raises(AssertionError):
        train(tmp_path / "early.json", *data, "--stop-early", "1", *saving)
    assert f"--stop-early needs normalised entropy, which is not defined: {why}" in " ".join(
        capfd.readouterr().err.split()
    )
    # It was refused before the first step.
    assert not list((tmp_path / "saved").glob("*"))


def test_a_note_of_the_best_without_calibration_is_read(tmp_path: Path) -> None:
    """Earlier versions wrote none."""
    folder = tmp_path / "checkpoints"
    stopping = [*OVERFITTING, "--stop-early", "1", "--steps", "9", "--checkpoint", str(folder)]
    train(tmp_path / "first.json", *stopping)
    (path,) = (folder / "best").iterdir()
    note = json.loads((path / "quality.json").read_text())
    assert note["quality"].pop("calibration") > 0
    (path / "quality.json").write_text(json.dumps(note))
    resumed = train(tmp_path / "second.json", *stopping, "--resume")
    assert resumed["best"]["quality"].pop("calibration") is None
    assert resumed["best"] == note


def test_a_damaged_note_of_the_best_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints"
    stopping = [*OVERFITTING, "--stop-early", "1", "--steps", "9", "--checkpoint", str(folder)]
    train(tmp_path / "first.json", *stopping)
    (path,) = (folder / "best").iterdir()
    (path / "quality.json").write_text("{}")
    with pytest.raises(AssertionError):
        train(tmp_path / "second.json", *stopping, "--resume")
    assert "quality.json" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"stop_early": 1}, "--stop-early needs a checkpoint folder"),
        ({"stop_early": 0, "checkpoint": Path("here")}, "stop_early 0"),
        ({"best_by": "loss"}, "best_by 'loss'; allowed: auc, ne"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        TrainingConfig(**settings)
