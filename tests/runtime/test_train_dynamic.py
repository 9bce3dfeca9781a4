# SPDX-License-Identifier: Apache-2.0
"""`sennit train` with tables whose ids nobody lists: one digest at any world, after a stop, a death, a join."""

from __future__ import annotations

import dataclasses
import itertools
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")

import torch

from sennit.offload.arrow_columns import text_ids
from sennit.offload.ingest.facts import TableFacts
from sennit.offload.ingest.target import IngestTarget
from sennit.runtime.kernels.int8 import float_rows
from sennit.runtime.model.settings import SettingsFile
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.export import export_int8
from sennit.runtime.training.table_rows import CheckpointTables
from sennit.transport.errors import ConfigError
from tests.extent import briefly
from tests.runtime.elastic_runs import died_and_rejoined
from tests.runtime.whole_run import failure, train

pytestmark = pytest.mark.timeout(150)

DATA = "synthetic-stream?days=3&rows-per-day=1200&living=150,40&life-days=0.4&dense=2"
MODEL = ["--batch-size", "100", "--dim", "4", "--bottom", "8", "--top", "8", "--decay", "none", "--timeout", "60",
    "--sharding", "table_wise",
]  # fmt: skip
SETTINGS = """
[defaults]
row_shards = 4
ids = "dynamic"
rows = 160
[tables.table_01]
ids = { admit_after = 2, eviction = "lfu", evicted_share = 0.25 }
rows = 60
"""


def test_rules_for_ids_that_a_feeder_does_not_send_are_refused(tmp_path: Path) -> None:
    """It sends numbers of rows unless its own schema says otherwise: they would be taken for ids."""
    (tmp_path / "tables.toml").write_text(SETTINGS)
    config = TrainingConfig(
        ingest=IngestTarget.parse("cpu://127.0.0.1:4791"), tables=SettingsFile.read(tmp_path / "tables.toml")
    )
    sent = [TableFacts(name=name, rows=160, mean_length=1.0, is_dynamic=True) for name in ("table_00", "table_01")]
    assert [table.rows for table in config.tables_of(sent)] == [160, 60]
    sent[1] = dataclasses.replace(sent[1], is_dynamic=False)
    with pytest.raises(ConfigError, match="table table_01 with dynamic ids, but the feeder sends numbers of rows"):
        config.tables_of(sent)


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    (tmp_path / "tables.toml").write_text(SETTINGS)
    return ["--data", DATA, "--order", "time", "--window", "1d", "--tables", str(tmp_path / "tables.toml"), *MODEL]


def in_files(folder: Path) -> list[str]:
    """Rows in files."""
    return ["--table-store", str(folder), "--table-memory", "24KiB"]


@pytest.mark.slow
def test_three_times_more_ids_than_rows_give_one_digest(tmp_path: Path, options: list[str]) -> None:
    alone = train(tmp_path / "1.json", *options, "--ranks", "1")
    ids = alone["ids"]["table_00"]
    assert ids["rows"] == 160
    assert ids["admitted"] == ids["used"] + ids["evicted"] > 3 * ids["rows"]
    assert alone["ids"]["table_01"]["without_row"] > 0
    kept = tmp_path / "kept"
    saves = ["--checkpoint", str(kept), "--checkpoint-every", "10"]
    three = train(tmp_path / "3.json", *options, "--ranks", "3", *saves, *in_files(tmp_path))
    assert three["rows"]["lookups"] > 0
    shutil.rmtree(max(kept.glob("step-*")))
    resumed = train(tmp_path / "2.json", *options, "--ranks", "2", *saves, "--resume")
    for other in (three, resumed):
        assert other["weights_sha256"] == alone["weights_sha256"]
        assert other["windows"] == alone["windows"]
    assert three["ids"] == alone["ids"]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "transport"), briefly(itertools.product([2, 4, 8], ["shm", "udp"]), [(2, "udp")]))
def test_a_death_and_a_newcomer_change_no_bit(
    world: int, transport: str, tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over networks that lose packets, with stops: scenario `same-bits-dynamic`."""
    monkeypatch.setenv("SENNIT_TRANSPORT", transport)
    alone = train(tmp_path / "alone.json", *options, "--ranks", "1")
    report = died_and_rejoined(tmp_path, [*options, *in_files(tmp_path)], ranks=world, death_step=7, halt_step=10)
    assert report["weights_sha256"] == alone["weights_sha256"]
    assert report["windows"] == alone["windows"]


@pytest.mark.gpu
def test_on_a_gpu_rows_in_its_memory_and_in_files_behind_it_have_the_bits_of_the_cpu(
    tmp_path: Path, options: list[str]
) -> None:
    alone = train(tmp_path / "cpu.json", *options, "--ranks", "1")
    for name, more in (("hbm", []), ("file", in_files(tmp_path))):
        there = train(tmp_path / f"{name}.json", *options, "--ranks", "2", "--device", "cuda", *more)
        assert there["weights_sha256"] == alone["weights_sha256"]
        assert there["ids"] == alone["ids"]


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.long
def test_a_disk_that_is_too_small_for_rows_leaves_the_checkpoint(tmp_path: Path, options: list[str]) -> None:
    """`test_sharded_store.py` has the error of the library."""
    whole = train(tmp_path / "whole.json", *options, "--ranks", "1", "--steps", "14")
    kept = tmp_path / "kept"
    saves = [*options, "--ranks", "1", "--checkpoint", str(kept)]
    train(tmp_path / "first.json", *saves, "--steps", "8")
    before = {file: file.read_bytes() for file in kept.rglob("*") if file.is_file()}
    small = tmp_path / "small"
    small.mkdir()
    on_small = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
    resumes = [sys.executable, "-m", "sennit", "train", *saves, "--steps", "14", "--resume", *in_files(small)]
    command = ["unshare", "--mount", "sh", "-c", on_small, str(small), *resumes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"{small}/rows-0-0.unfinished: setting" in done.stderr
    assert "bytes aside: No space left on device" in done.stderr
    assert {file: file.read_bytes() for file in kept.rglob("*") if file.is_file()} == before
    resumed = train(tmp_path / "resumed.json", *saves, "--steps", "14", "--resume", *in_files(tmp_path))
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def ids_of(checkpoint: Path, table: str) -> set[int]:
    return {one for rows in CheckpointTables(checkpoint).rows(table) for one in rows.ids.tolist()}


@pytest.mark.slow
def test_ids_of_files_are_those_of_the_table_whatever_64_bits_they_are(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    chance = random.Random(7)
    users = [-(2**63), -1, 0, 2**63 - 1, *(chance.randrange(-(2**63), 2**63) for _ in range(16))] * 10
    items = arrow.array([f"item {chance.randrange(30)}" for _ in users])
    content = {"clicked": [chance.randrange(2) for _ in users], "user": users, "item": items, "shop": items}
    parquet.write_table(arrow.table(content), tmp_path / "clicks.parquet")
    (tmp_path / "schema.toml").write_text(
        'label = "clicked"\n[sparse.user]\nencode = "dynamic"\nrows = 50\n'
        '[sparse.item]\nencode = "dictionary"\n[sparse.shop]\nencode = "hash"\nrows = 7\n'
    )
    (tmp_path / "tables.toml").write_text(
        '[tables.item]\nids = "dynamic"\nrows = 60\n[tables.shop]\nids = "dynamic"\nrows = 90\n'
    )
    report = train(
        tmp_path / "1.json", "--data", str(tmp_path / "clicks.parquet"), "--schema", str(tmp_path / "schema.toml"),
        "--tables", str(tmp_path / "tables.toml"), "--order", "files", "--split", "last", "--ranks", "1",
        "--checkpoint", str(tmp_path / "kept"), "--batch-size", "20", *MODEL[2:],
    )  # fmt: skip
    assert [report["ids"][name]["rows"] for name in ("user", "item", "shop")] == [50, 60, 90]
    trained = 20 * report["steps"]["last"]
    assert ids_of(tmp_path / "kept", "user") == set(users[:trained])
    texts = set(text_ids(items.slice(0, trained).cast(arrow.large_string())).tolist())
    assert ids_of(tmp_path / "kept", "item") == ids_of(tmp_path / "kept", "shop") == texts


@pytest.mark.slow
def test_an_export_has_the_rows_of_all_ids(tmp_path: Path, options: list[str]) -> None:
    """One table has a row in each row shard for ids that have none, and two column shards."""
    settings = SETTINGS.replace("evicted_share", 'unadmitted = "shared", evicted_share') + "column_shards = 2\n"
    (tmp_path / "tables.toml").write_text(settings)
    train(tmp_path / "1.json", *options, "--ranks", "1", "--steps", "14", "--checkpoint", str(tmp_path / "kept"))
    export_int8(tmp_path / "kept", tmp_path / "rows.pt")
    found = torch.load(tmp_path / "rows.pt", weights_only=True, mmap=True)
    held = CheckpointTables(tmp_path / "kept")
    for name, bound in (("table_00", 160**-0.5), ("table_01", 60**-0.5)):
        shards = list(held.rows(name))
        wanted = {one: row for part in shards for one, row in zip(part.ids.tolist(), part.weight, strict=True)}
        ids, rows = found["ids"][name], float_rows(found["tables"][name])
        assert ids.tolist() == sorted(wanted)
        torch.testing.assert_close(rows, torch.stack([wanted[one] for one in sorted(wanted)]), atol=0.01, rtol=0)
        assert float(rows.abs().max()) > bound / 2
    assert list(found["shared"]) == ["table_01"]
    assert found["shared"]["table_01"].shape == (4, 4 + 8)
    assert float(float_rows(found["shared"]["table_01"]).abs().min(1).values.max()) > 0


@pytest.mark.parametrize(("settings", "told"), [
    ('[tables.table_00]\nrows = 7', "table table_00: rows 7; allowed with ids = \"dynamic\" alone"),
    ('[tables.table_00]\nids = "static"', "ids 'static'; allowed: \"dynamic\", or a section with its rules"),
    ('[tables.table_00]\nids = { admit = 2 }', "unknown key 'admit'; allowed: admit_after, admit_count, eviction,"),
    ('[tables.table_00]\nids = { evicted_share = 2.0 }', "evicted_share 2.0; allowed: above 0, up to 1"),
    ('[tables.table_00]\nids = "dynamic"\nrows = 20', "new ids in a batch, but shard table_00/0.0 has 20 of its"),
    ('[tables.table_00]\nids = "dynamic"\ntrain_rank = 2', "dynamic ids with a train_rank; allowed: one of them"),
    ('[tables.table_00]\nrows = 7\n[tables.table_00]\nids = "dynamic"', "Cannot declare ('tables', 'table_00') twice"),
])  # fmt: skip
def test_settings_that_cannot_be_are_told(
    tmp_path: Path, options: list[str], capfd: pytest.CaptureFixture[str], settings: str, told: str
) -> None:
    (tmp_path / "tables.toml").write_text(settings)
    assert told in failure(capfd, *options, "--ranks", "1")
