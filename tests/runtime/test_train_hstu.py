# SPDX-License-Identifier: Apache-2.0
"""`sennit train --model hstu`: one digest in any world, with any placement and transport, after a stop."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")

from sennit.runtime.training.command import main
from tests.extent import briefly
from tests.pages import ROOT, blocks
from tests.runtime.elastic_runs import died_and_rejoined
from tests.runtime.whole_run import train

MODELS_PAGE = ROOT / "docs" / "reference" / "models.md"

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

DATA = ["--data", "synthetic-yambda?rows=3000&users=30&items=200&last=12", "--order", "time"]
MODEL = [
    *DATA, "--model", "hstu", "--dim", "8", "--bottom", "8", "--top", "8", "--batch-size", "120", "--eval-fraction",
    "0.1", "--steps", "12", "--timeout", "60", "--sharding", "table_wise",
]  # fmt: skip


def test_worlds_and_a_stop_give_one_digest(tmp_path: Path) -> None:
    alone = train(tmp_path / "1.json", *MODEL, "--ranks", "1")
    kept = tmp_path / "kept"
    saves = ["--checkpoint", str(kept), "--checkpoint-every", "6"]
    three = train(tmp_path / "3.json", *MODEL, "--ranks", "3", *saves)
    shutil.rmtree(max(kept.glob("step-*")))
    resumed = train(tmp_path / "2.json", *MODEL, "--ranks", "2", *saves, "--resume")
    for other in (three, resumed):
        assert other["weights_sha256"] == alone["weights_sha256"]
        assert other["quality"] == alone["quality"]
    assert alone["quality"]["sample_count"] == 300
    assert 0 < alone["phases_s"]["attention"] < alone["train_s"]


@pytest.mark.parametrize(
    ("ranks", "options"),
    briefly(
        [
            (4, ["--row-shards", "4", "--sharding", "row_wise"]),
            (4, ["--row-shards", "4", "--sharding", "auto", "--batches-ahead", "3", "--overlap", "tables"]),
            (2, ["--row-shards", "4", "--sharding", "table_wise", "--batches-ahead", "0", "--overlap", "ids"]),
            (2, ["--row-shards", "4", "--sharding", "row_wise", "--overlap", "tables"]),
        ],
        [(2, ["--row-shards", "4", "--sharding", "row_wise", "--overlap", "tables"])],
    ),
)
def test_placements_and_overlap_of_balanced_slices_change_no_bit(
    ranks: int, options: list[str], tmp_path: Path
) -> None:
    """With attention of bfloat16, too."""
    model = [*MODEL, "--balance", "--attention", "bf16"]
    alone = train(tmp_path / "1.json", *model, "--ranks", "1", "--row-shards", "4")
    found = train(tmp_path / "2.json", *model, "--ranks", str(ranks), *options)
    assert found["weights_sha256"] == alone["weights_sha256"]
    assert found["windows"] == alone["windows"]


@pytest.mark.gpu
def test_a_gpu_gives_one_digest(tmp_path: Path) -> None:
    """Of its own: torch's products differ between processors. The quality is that of the CPU."""
    here = train(tmp_path / "cpu.json", *MODEL, "--ranks", "1")
    found = [train(tmp_path / f"{ranks}.json", *MODEL, "--ranks", ranks, "--device", "cuda") for ranks in ("1", "2")]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    assert found[0]["quality"]["log_loss"] == pytest.approx(here["quality"]["log_loss"], abs=0.01)


@pytest.mark.long
def test_a_death_and_a_newcomer_change_no_bit(tmp_path: Path) -> None:
    alone = train(tmp_path / "alone.json", *MODEL, "--ranks", "1")
    report = died_and_rejoined(tmp_path, MODEL, death_step=5, halt_step=8)
    assert report["weights_sha256"] == alone["weights_sha256"]


def test_a_model_of_histories_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of docs/reference/models.md. Its file is in the folder where the command is started."""
    (program,) = (block.text for block in blocks(MODELS_PAGE) if "class Din" in block.text)
    (tmp_path / "din.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    model = [*MODEL, "--model", "din:Din"]
    alone = train(tmp_path / "1.json", *model, "--ranks", "1")
    two = train(tmp_path / "2.json", *model, "--ranks", "2", "--row-shards", "1", "--overlap", "tables")
    assert two["weights_sha256"] == alone["weights_sha256"]
    assert two["quality"] == alone["quality"]
    # It reads the history, which is no feature of a model of rows: without it the weights are others.
    shorter = train(tmp_path / "shorter.json", *model, "--ranks", "1", "--history", "1")
    assert shorter["weights_sha256"] != alone["weights_sha256"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--data", "adult", "--model", "hstu"], "hstu reads histories, and these data have none"),
        (["--data", "adult", "--balance"], "--balance for adult without histories; allowed: with a model that reads"),
        ([*DATA, "--model", "hstu", "--heads", "3"], "columns of table item_id for 3 heads; allowed: a multiple"),
    ],
)
def test_what_does_not_fit_is_said(options: list[str], what: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*options, "--ranks", "1", "--steps", "1", "--sharding", "table_wise"])
    assert ended.value.code
    assert what in " ".join(capfd.readouterr().err.split())
