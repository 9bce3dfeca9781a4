# SPDX-License-Identifier: Apache-2.0
# Torch types some functions thinly:
# mypy: disable-error-code="no-untyped-call"
"""Tables of a checkpoint from a vocabulary to dynamic ids and back: each id reads the same bits, and trains on."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.offload.arrow_columns import text_ids
from sennit.runtime.checkpoint.folder import latest
from sennit.runtime.checkpoint.manifest import Manifest
from sennit.runtime.checkpoint.reading import OpenedCheckpoint
from sennit.runtime.checkpoint.writing import save
from sennit.runtime.data.arrow_columns import PartOfFile, Piece, raw_samples
from sennit.runtime.data.preprocessing import NAME, Encoding, Preprocessing
from sennit.runtime.data.schema import parse_schema
from sennit.runtime.kernels.id_directory import steps_of
from sennit.runtime.sharded import DynamicIds, ShardedEmbeddingBags, Table
from sennit.runtime.training import convert
from sennit.runtime.training.convert_ids import to_fixed
from sennit.transport.errors import ConfigError
from tests.runtime.whole_run import train
from tests.runtime.world import WorldFactory

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

CITIES = ["Bonn", "Kiel", "Ulm", "", "Ülm"]
NUMBERS = [-(2**63), -7, 0, 5, 2**62]
ENCODINGS = (
    Encoding(name="city", row_count=6, vocabulary=np.array(sorted(CITIES), dtype=object)),
    Encoding(name="number", row_count=6, vocabulary=np.array(NUMBERS)),
    Encoding(name="hour", row_count=24),
)


def ids_of(encoding: Encoding) -> Tensor:
    """The dynamic ids of rows 1 and on, or of all rows."""
    if encoding.vocabulary is None:
        return torch.arange(encoding.row_count)
    if encoding.vocabulary.dtype == object:
        return torch.from_numpy(text_ids(arrow.array(encoding.vocabulary, arrow.large_string())))
    return torch.from_numpy(encoding.vocabulary)


def module_of(dynamic: bool, rules: DynamicIds, rows: int = 40) -> ShardedEmbeddingBags:
    tables = [
        Table(
            name=one.name,
            rows=rows if dynamic else one.row_count,
            dim=6,
            row_shards=2,
            column_shards=2,
            optimizer="adam",
            ids=rules if dynamic else None,
        )
        for one in ENCODINGS
    ]
    return ShardedEmbeddingBags(tables, lr=0.1, gradients="sum", seed=7)


def step(module: ShardedEmbeddingBags, ids: dict[str, Tensor]) -> None:
    found = module({name: one.view(-1, 1) for name, one in ids.items()})
    sum(one.pow(2).sum() for one in found.values()).backward()


ABOUT = Manifest(run_id="0" * 16, step=3, fixed={}, free={}, code={})
KNOWN = {NAME: Preprocessing(scales=(), encodings=ENCODINGS).text()}
ROWS = {one.name: torch.arange(0 if one.vocabulary is None else 1, one.row_count)[:5] for one in ENCODINGS}
IDS = {one.name: ids_of(one)[:5] for one in ENCODINGS}


def state_of(folder: Path) -> dict[str, Any]:
    found = latest(folder)
    assert found is not None
    return OpenedCheckpoint(found, alone=True).everything()


def begun(rank: int, world: int, folder: str) -> None:
    fixed = module_of(False, DynamicIds())
    for _ in range(3):
        step(fixed, ROWS)
    save(Path(folder), ABOUT, fixed.state_dict(), documents=KNOWN)


def same_rows(dynamic: ShardedEmbeddingBags, fixed: ShardedEmbeddingBags) -> None:
    for name, rows in ROWS.items():
        assert dynamic[name].get_rows(IDS[name]).equal(fixed[name].get_rows(rows)), name


def gone_on(rank: int, world: int, folder: str, rules: DynamicIds) -> None:
    fixed, dynamic = module_of(False, rules), module_of(True, rules)
    fixed.load_state_dict(state_of(Path(folder) / "fixed"))
    dynamic.load_state_dict(state_of(Path(folder) / "dynamic"))
    same_rows(dynamic, fixed)
    if rules.unadmitted == "shared":
        unknown = dynamic["city"].get_rows(torch.arange(100, 116))
        assert (unknown == fixed["city"].get_rows(torch.tensor([0]))).all()
    for _ in range(2):
        step(fixed, ROWS)
        step(dynamic, IDS)
    same_rows(dynamic, fixed)
    save(Path(folder) / "later", ABOUT, dynamic.state_dict(), documents=KNOWN)


STEPS = [2, 9, 3]


def begun_at_other_steps(rank: int, world: int, folder: str) -> None:
    about = dataclasses.replace(ABOUT, fixed={"model": {"tables": {one.name: {} for one in ENCODINGS}}})
    state = module_of(False, DynamicIds()).state_dict()
    save(Path(folder), about, state | {"steps": torch.tensor(STEPS)}, documents=KNOWN)


def test_rows_are_of_the_last_step_of_their_own_table(kept_world: WorldFactory, tmp_path: Path) -> None:
    """They would seem old otherwise, and expire."""
    kept_world(1).run(begun_at_other_steps, str(tmp_path / "fixed"))
    convert(tmp_path / "fixed", tmp_path / "dynamic", dynamic={one.name: (40, DynamicIds()) for one in ENCODINGS})
    state = state_of(tmp_path / "dynamic")
    for one, step in zip(ENCODINGS, STEPS, strict=True):
        entries = torch.cat([state[f"{one.name}/{row}.0.ids"] for row in range(2)])
        assert set(steps_of(entries).tolist()) == {0, step}, one.name


@pytest.mark.parametrize("rules", [DynamicIds(), DynamicIds(admit_after=2, unadmitted="shared")], ids=["own", "shared"])
def test_each_id_reads_the_same_bits_and_trains_on_alike(
    kept_world: WorldFactory, tmp_path: Path, rules: DynamicIds
) -> None:
    kept_world(1).run(begun, str(tmp_path / "fixed"))
    done = convert(tmp_path / "fixed", tmp_path / "dynamic", dynamic={one.name: (40, rules) for one in ENCODINGS})
    assert done.changes[0] == "ids of city: dynamic now, 5 with rows, of 40"
    kept_world(1).run(gone_on, str(tmp_path), rules)
    if rules.unadmitted == "shared":
        return
    (tmp_path / "later").rename(tmp_path / "dynamic-later")
    done = convert(tmp_path / "dynamic-later", tmp_path / "back", fixed=[one.name for one in ENCODINGS[:2]])
    assert done.changes == ("ids of city: a vocabulary of 5 now", "ids of number: a vocabulary of 5 now")
    found = latest(tmp_path / "back")
    assert found is not None
    known = Preprocessing.read(found)
    assert known is not None
    for one, kept in zip(known.encodings[:2], ENCODINGS[:2], strict=True):
        assert one.vocabulary is not None
        assert one.vocabulary.tolist() == sorted(ids_of(kept).tolist())


def refused(source: Path, output: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as told:
        convert(source, output, **options)
    assert not output.exists() or latest(output) is None
    return str(told.value)


def test_what_cannot_be_converted_is_told(kept_world: WorldFactory, tmp_path: Path) -> None:
    kept_world(1).run(begun, str(tmp_path / "fixed"))
    source, output, rules = tmp_path / "fixed", tmp_path / "out", DynamicIds()
    assert "ids for row shard" in refused(source, output, dynamic={"hour": (20, rules)})
    assert "table city has no dynamic ids" in refused(source, output, fixed=["city"])
    assert "ids of table town; allowed: city, hour, number" in refused(source, output, fixed=["town"])


def twice(rank: int, world: int, folder: str) -> None:
    fixed = module_of(False, DynamicIds())
    other = Encoding(name="number", row_count=6, vocabulary=np.array([1, 2, 3, 3, 4]))
    known = Preprocessing(scales=(), encodings=(ENCODINGS[0], other, Encoding(name="hour", row_count=24, salt=3)))
    save(Path(folder), ABOUT, fixed.state_dict(), documents={NAME: known.text()})


def test_a_value_that_is_there_twice_and_hashes_are_told(kept_world: WorldFactory, tmp_path: Path) -> None:
    kept_world(1).run(twice, str(tmp_path / "fixed"))
    rules = DynamicIds()
    told = refused(tmp_path / "fixed", tmp_path / "out", dynamic={"number": (40, rules)})
    assert "the values 3 and 3 have one id, 3; allowed: each id once" in told
    told = refused(tmp_path / "fixed", tmp_path / "out", dynamic={"hour": (40, rules)})
    assert "table hour: its ids are hashed, and nobody knows them" in told


def directory(*ids: int) -> dict[str, Any]:
    """The state of a dynamic table with these ids, each with its place as its row."""
    entries = torch.tensor([[one, 1 << 32 | 1] for one in ids])
    return {"user/0.0.ids": entries, "user/0.0.weight": torch.arange(float(len(ids)))[:, None]}


def test_a_vocabulary_of_ids_without_sign_rises_as_they_do() -> None:
    state = directory(-2, 5, 7)
    about = Encoding(name="user", row_count=3, is_dynamic=True, id_type="uint64")
    _, made = to_fixed(state, "user", "user", about)
    assert made.vocabulary is not None
    assert made.vocabulary.tolist() == [5, 7, 2**64 - 2]
    assert state["user/0.0.weight"].flatten().tolist() == [1.0, 1.0, 2.0, 0.0]


def test_hashes_of_texts_are_no_vocabulary() -> None:
    about = Encoding(name="user", row_count=3, is_dynamic=True, id_type="text")
    with pytest.raises(ConfigError, match="table user: its ids are hashes of texts, and nobody knows these"):
        to_fixed(directory(5), "user", "user", about)


@pytest.mark.parametrize(
    ("values", "kind"), [(["a", "b"], "text"), ([2**63], "uint64"), ([5, -1], "int64"), ([b"a\xff"], "text")]
)
def test_preprocessing_keeps_what_the_ids_of_a_dynamic_table_are(values: list[Any], kind: str, tmp_path: Path) -> None:
    types = {"uint64": arrow.uint64()}
    table = arrow.table({"clicked": [1] * len(values), "user": arrow.array(values, types.get(kind))})
    schema = parse_schema({"label": "clicked", "sparse": {"user": {"encode": "dynamic", "rows": 9}}})
    raw = raw_samples("clicks", [Piece(table, PartOfFile("clicks.parquet", "row group 0"))], schema)
    known = Preprocessing.fit(raw, torch.ones(len(values), dtype=torch.bool))
    assert Preprocessing.parse(known.text()).encodings[0].id_type == kind


@pytest.mark.slow
def test_a_run_goes_on_with_dynamic_ids_and_back(tmp_path: Path) -> None:
    chance = random.Random(3)
    content = {
        "clicked": [chance.randrange(2) for _ in range(400)],
        "user": [chance.randrange(-(2**40), 2**40) if chance.random() < 0.1 else 7 * chance.randrange(30)
                 for _ in range(400)],
    }  # fmt: skip
    parquet.write_table(arrow.table(content), tmp_path / "clicks.parquet")
    (tmp_path / "schema.toml").write_text('label = "clicked"\n[sparse.user]\nencode = "dictionary"\n')
    (tmp_path / "tables.toml").write_text("[tables.user]\nids = { expire_after = 500 }\nrows = 300\n")
    run = [
        "--data", str(tmp_path / "clicks.parquet"), "--schema", str(tmp_path / "schema.toml"), "--order", "files",
        "--split", "last", "--ranks", "1", "--batch-size", "40", "--dim", "4", "--bottom", "8", "--top", "8",
        "--decay", "none", "--resume", "--checkpoint",
    ]  # fmt: skip
    train(tmp_path / "1.json", *run, str(tmp_path / "fixed"), "--steps", "5")
    tables = ["--tables", str(tmp_path / "tables.toml")]
    for given in (["dynamic", "--dynamic", "user", *tables], ["fixed-again", "--fixed", "user"]):
        source = "fixed" if given[0] == "dynamic" else "dynamic"
        done = CliRunner().invoke(app, ["convert", str(tmp_path / source), str(tmp_path / given[0]), *given[1:]])
        assert done.exit_code == 0, done.output
    dynamic = train(tmp_path / "2.json", *run, str(tmp_path / "dynamic"), *tables)
    assert dynamic["steps"] == {"first": 5, "last": 9}
    assert dynamic["ids"]["user"]["hits"] > 0
    again = train(tmp_path / "3.json", *run, str(tmp_path / "fixed-again"))
    fixed = train(tmp_path / "4.json", *run, str(tmp_path / "fixed"))
    assert again["steps"] == fixed["steps"] == {"first": 5, "last": 9}
    # Row 0, of values that come later, is another one. All others are the same.
    assert again["quality"]["log_loss"] == pytest.approx(fixed["quality"]["log_loss"], rel=0.1)
