# SPDX-License-Identifier: Apache-2.0
"""`sennit tables`: rows of a checkpoint by id, from tables of all kinds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from sennit.runtime.checkpoint.manifest import Manifest
from sennit.runtime.checkpoint.writing import save
from sennit.runtime.data.preprocessing import NAME, Encoding, Preprocessing
from sennit.runtime.sharded import ShardedEmbeddingBags, Table
from sennit.runtime.training.table_rows import CheckpointTables, first_rows, write_parquet
from sennit.transport.errors import ConfigError, DeviceError
from tests.runtime.world import WorldFactory

Made = tuple[CheckpointTables, dict[int, list[float]]]
IDS = [-(2**62), 5, 2**40, 77, 123456789]


def saved(rank: int, world: int, folder: str) -> dict[int, list[float]]:
    tables = [
        Table(name="user", rows=40, dim=6, row_shards=4, column_shards=2, ids="dynamic"),
        Table(name="item", rows=10, dim=4, row_shards=2),
    ]
    module = ShardedEmbeddingBags(tables, lr=0.1, gradients="sum", placement="row_wise")
    for step in range(3):
        # The id number n comes n + 1 times in a step, and the last one in the first step alone.
        ids = [one for place, one in enumerate(IDS) for _ in range(place + 1) if step == 0 or place < 4]
        whole = torch.tensor(ids + [IDS[0]] * (16 - len(ids)))
        own = module.slices.own_samples(16)
        found = module({"user": whole[own], "item": torch.arange(16)[own] % 10}, global_batch=16)
        (found["user"].sum() + found["item"].sum()).backward()
    state = {f"tables.{name}": value for name, value in module.state_dict().items()}
    save(Path(folder), Manifest(run_id="0" * 16, step=3, fixed={}, free={}, code={}), state)
    rows = module["user"].get_rows(torch.tensor(IDS))
    return dict(zip(IDS, rows.tolist(), strict=True))


@pytest.fixture(scope="module")
def made(kept_world: WorldFactory, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("checkpoint")
    rows = kept_world(2).run(saved, str(folder))[0]
    return CheckpointTables(folder), rows


def test_tables_say_how_full_they_are(made: Made) -> None:
    tables, _ = made
    assert tables.names == ["item", "user"]
    user, item = tables.summary("user"), tables.summary("item")
    assert (user.rows, user.used, user.dim, user.is_dynamic) == (40, 5, 6, True)
    assert (item.rows, item.used, item.dim, item.is_dynamic) == (10, 10, 4, False)


def test_rows_come_by_count_age_and_norm(made: Made) -> None:
    tables, known = made
    often = first_rows(tables, "user", by="count", count=3)
    assert often.counts is not None
    assert often.ids.tolist()[0] == IDS[0]
    assert often.counts.tolist() == sorted(often.counts.tolist(), reverse=True)
    old = first_rows(tables, "user", by="age", count=5)
    assert old.last is not None
    assert old.ids[-1] == IDS[4]
    assert old.last.tolist() == [3, 3, 3, 3, 1]
    large = first_rows(tables, "user", by="norm", count=2)
    wanted = sorted(known, key=lambda one: -sum(x * x for x in known[one]))[:2]
    assert large.ids.tolist() == wanted
    assert first_rows(tables, "item", by="norm", count=100).ids.sort().values.tolist() == list(range(10))
    with pytest.raises(ConfigError, match="table item by count, but its ids are row numbers; allowed: norm"):
        first_rows(tables, "item", by="count", count=1)
    with pytest.raises(ConfigError, match="table users; allowed: item, user; did you mean user"):
        first_rows(tables, "users", by="norm", count=1)


def test_parquet_has_all_rows(made: Made, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    tables, known = made
    assert write_parquet(tables, "user", tmp_path / "rows.parquet") == 5
    found = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert {one["id"]: one["row"] for one in found} == known
    assert {one["id"]: one["last_step"] for one in found} == dict(zip(IDS, (3, 3, 3, 3, 1), strict=True))
    assert write_parquet(tables, "item", tmp_path / "items.parquet") == 10
    assert parquet.read_table(tmp_path / "items.parquet").column_names == ["id", "row"]
    with pytest.raises(DeviceError, match="was not written"):
        write_parquet(tables, "user", tmp_path / "nowhere" / "rows.parquet")


def test_ids_of_a_column_without_sign_have_none(made: Made, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    shutil.copytree(made[0].source, tmp_path / "kept")
    user = Encoding(name="user", row_count=40, is_dynamic=True, id_type="uint64")
    (tmp_path / "kept" / NAME).write_text(Preprocessing(scales=(), encodings=(user,)).text())
    tables = CheckpointTables(tmp_path / "kept")
    assert 2**64 - 2**62 in first_rows(tables, "user", by="count", count=5).shown_ids.tolist()
    write_parquet(tables, "user", tmp_path / "rows.parquet")
    assert set(parquet.read_table(tmp_path / "rows.parquet")["id"].to_pylist()) == {one % 2**64 for one in IDS}
