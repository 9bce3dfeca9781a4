# SPDX-License-Identifier: Apache-2.0
"""`sennit train` with tables whose ids nobody lists: one digest at any world, after a stop, a death, a join."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")

from sennit.runtime.training.command import main
from tests.runtime.elastic_runs import elastic_run
from tests.runtime.whole_run import train

pytestmark = pytest.mark.timeout(150)

DATA = "synthetic-stream?days=3&rows-per-day=1200&living=150,40&life-days=0.4&dense=2"
MODEL = ["--batch-size", "100", "--dim", "4", "--bottom", "8", "--top", "8", "--decay", "none", "--timeout", "60"]
SETTINGS = """
[defaults]
row_shards = 4
ids = "dynamic"
rows = 160
[tables.table_01]
ids = { admit_after = 2, eviction = "lfu", evicted_share = 0.25 }
rows = 60
"""


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    (tmp_path / "tables.toml").write_text(SETTINGS)
    return ["--data", DATA, "--order", "time", "--window", "1d", "--tables", str(tmp_path / "tables.toml"), *MODEL]


@pytest.mark.slow
def test_three_times_more_ids_than_rows_give_one_digest(tmp_path: Path, options: list[str]) -> None:
    alone = train(tmp_path / "1.json", *options, "--ranks", "1")
    ids = alone["ids"]["table_00"]
    assert ids["rows"] == 160
    assert ids["admitted"] == ids["used"] + ids["evicted"] > 3 * ids["rows"]
    assert alone["ids"]["table_01"]["without_row"] > 0
    kept = tmp_path / "kept"
    three = train(tmp_path / "3.json", *options, "--ranks", "3", "--checkpoint", str(kept), "--checkpoint-every", "10")
    shutil.rmtree(max(kept.glob("step-*")))
    resumed = train(
        tmp_path / "2.json", *options, "--ranks", "2", "--checkpoint", str(kept), "--checkpoint-every", "10", "--resume"
    )
    for other in (three, resumed):
        assert other["weights_sha256"] == alone["weights_sha256"]
        assert other["windows"] == alone["windows"]
    assert three["ids"] == alone["ids"]


@pytest.mark.slow
def test_a_death_and_a_newcomer_change_no_bit(tmp_path: Path, options: list[str]) -> None:
    alone = train(tmp_path / "alone.json", *options, "--ranks", "1")
    kept = [*options, "--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "4"]
    with elastic_run(
        tmp_path, "run", *kept, "--ranks", "2",
        DEATHS=[[1, 7, str(tmp_path / "died")]], HALTS=[[1, 10, str(tmp_path / "waits")]],
    ) as run:  # fmt: skip
        address = run.address()
        run.wait_for(tmp_path / "waits")
        with pytest.raises(SystemExit) as ended:
            main([*kept, "--elastic", "--join", address])
        assert not ended.value.code
        report = run.report()
    assert report["weights_sha256"] == alone["weights_sha256"]
    assert report["windows"] == alone["windows"]


def failure(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code
    return " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize(("settings", "told"), [
    ('[tables.table_00]\nrows = 7', "table table_00: rows 7; allowed with ids = \"dynamic\" alone"),
    ('[tables.table_00]\nids = "static"', "ids 'static'; allowed: \"dynamic\", or a section with its rules"),
    ('[tables.table_00]\nids = { admit = 2 }', "unknown key 'admit'; allowed: admit_after, eviction, evicted_share"),
    ('[tables.table_00]\nids = { evicted_share = 2.0 }', "evicted_share 2.0; allowed: above 0, up to 1"),
    ('[tables.table_00]\nids = "dynamic"\nrows = 20', "new ids in a batch, but shard table_00/0.0 has 20 of its"),
    ('[tables.table_00]\nids = "dynamic"\ntrain_rank = 2', "dynamic ids with a train_rank; allowed: one of them"),
])  # fmt: skip
def test_settings_that_cannot_be_are_told(
    tmp_path: Path, options: list[str], capfd: pytest.CaptureFixture[str], settings: str, told: str
) -> None:
    (tmp_path / "tables.toml").write_text(settings)
    assert told in failure(capfd, *options, "--ranks", "1")
