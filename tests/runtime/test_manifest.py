# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's description of its run, hostile manifests, and which runs may resume which checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from sennit.runtime.checkpoint.digest import digest
from sennit.runtime.checkpoint.manifest import (
    MAX_BYTES,
    NAME,
    CheckpointError,
    Link,
    Manifest,
    check_same_run,
    differences,
)
from sennit.runtime.data.preprocessing import Encoding, Preprocessing
from sennit.runtime.stream import settings
from sennit.runtime.training import resumption
from sennit.runtime.training.config import TrainingConfig
from sennit.transport.errors import ConfigError
from tests.runtime.trainer_runs import begin_error, save_then_train_on, trainer
from tests.runtime.world import WorldFactory


def go_back_beside_another_run(rank: int, world: int, *, seed: int, folder: str) -> dict[str, Any]:
    """Two runs with the same settings share a folder. The other run is ahead."""
    mine, other = (trainer(seed, checkpoint=Path(folder)) for _ in range(2))
    resumption.begin(mine)
    resumption.begin(other)
    for run, steps in ((mine, 3), (other, 5)):
        for _ in range(steps):
            run.train_step()
        resumption.save(run)
    own = digest(mine.weights())
    mine.train_step()
    resumption.go_back(mine)
    other.run_id, other.step = "f" * 16, 0
    resumption.go_back(other)
    return {"went_back_to": mine.step, "is_own": digest(mine.weights()) == own, "other_alone": other.step}


ABOUT = Manifest(
    run_id="0123456789abcdef",
    step=7,
    fixed={"a": {"b": 1, "c": [1, 2]}},
    free={"d": None},
    code={},
    after=(Link(3, "1" * 64), Link(5, "2" * 64)),
    files={".metadata": "3" * 64},
    tensors={"table.a\u00e9": "4" * 64},
)


def damaged(**changed: Any) -> str:
    content = json.loads(ABOUT.text())
    for place, value in changed.items():
        *parts, last = place.split("__")
        inner = content
        for part in parts:
            inner = inner[part]
        inner[last] = value
    return json.dumps(content)


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert Manifest.parse(ABOUT.text()) == ABOUT


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "not an object"),
        ("{", "Expecting property name"),
        (damaged(format=1), "format 1; allowed: 2"),
        (damaged(run=3), "run 3; allowed: an object"),
        (damaged(run__id="../../etc"), 'run.id "../../etc"; allowed: 16 hexadecimal digits'),
        (damaged(run__id="\x1b[2J" + "0" * 12), r"run.id \"\\u001b"),
        (damaged(run__step=-1), "run.step -1; allowed: an integer from 0"),
        (damaged(run__step=True), "run.step true"),
        (damaged(run__step=10**40), "run.step 1000"),
        (damaged(fixed=None), "fixed null; allowed: an object"),
        (damaged(free=float("nan")), "number NaN; allowed: finite numbers"),
        (damaged(saved=[]), "saved []; allowed: an object"),
        (damaged(saved__files=7), "files 7; allowed: an object"),
        (damaged(saved__files={"../x": "0" * 64}), 'file "../x"; allowed: letters'),
        (damaged(saved__files={"..": "0" * 64}), 'file ".."; allowed: letters'),
        (damaged(saved__files={"a": "0" * 63}), 'SHA-256 of "a": "000'),
        (damaged(saved__tensors={"a": 3}), 'SHA-256 of "a": 3; allowed: 64 hexadecimal digits'),
        (damaged(saved__after=3), "saved.after 3; allowed: a list"),
        (damaged(saved__after=[3]), "saved.after has 3; allowed: objects"),
        (damaged(saved__after=[{"step": -1}]), "saved.after.step -1; allowed: an integer from 0"),
        (damaged(saved__after=[{"step": 1, "sha256": None}]), 'SHA-256 of "saved.after": null'),
        (damaged(sha256="x"), 'SHA-256 of "the manifest": "x"'),
        (damaged(run__step=8), "its content does not have the SHA-256 that it names: it is damaged"),
        ("[" * 100_000, "nested too deeply"),
        (damaged(fixed=json.loads('{"a":' * 500 + "1" + "}" * 500)), "nested too deeply"),
    ],
)
def test_a_hostile_manifest_is_an_error_in_words(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(CheckpointError) as told:
        Manifest.read(tmp_path)
    assert str(told.value).startswith(f"{tmp_path / NAME} cannot be read: ")
    assert message.replace("\\\\", "\\").replace('\\"', '"') in str(told.value)
    assert len(str(told.value)) < 500


def test_a_manifest_that_is_no_text_or_no_file_or_too_large_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="can't decode byte"):
        Manifest.read(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        Manifest.read(tmp_path)
    path.rmdir()
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(CheckpointError, match=f"more than {MAX_BYTES} bytes"):
        Manifest.read(tmp_path)


def test_differing_lines_name_the_field_and_both_values() -> None:
    theirs = {"order": {"seed": 1, "split": "random"}, "tables": {"user": 10, "film": 3}, "old": 1}
    ours = {"order": {"seed": 1, "split": "last"}, "tables": {"user": 11, "genre": 2}}
    assert differences(theirs, ours) == [
        'order.split: "random" in the checkpoint, "last" here',
        "tables.user: 10 in the checkpoint, 11 here",
        "tables.genre: absent in the checkpoint, 2 here",
        "tables.film: 3 in the checkpoint, absent here",
        "old: 1 in the checkpoint, absent here",
    ]


def test_a_manifest_with_thousands_of_differences_is_a_short_message(tmp_path: Path) -> None:
    theirs = dataclasses.replace(ABOUT, fixed={f"t{number}": "x" * 10_000 for number in range(5000)})
    with pytest.raises(ConfigError, match="and 4989 more") as told:
        check_same_run(tmp_path, theirs, {"a": 1})
    assert len(str(told.value)) < 3000


def test_every_option_is_fixed_or_free_or_no_part_of_the_run() -> None:
    """A new option must be added to one of these. Otherwise a checkpoint would not record it."""
    apart = {
        "source", "ingest", "table_store", "rank_memory_bytes",
        "sharding", "timeout_s", "checkpoint", "checkpoint_every", "checkpoint_increments", "checkpoint_async",
        "keep", "resume", "elastic", "stop_early", "best_by", "batches_ahead", "overlap",
        "rebalance", "use", "min_ranks", "tensorboard", "json_path", "sketch_path", "timeline",
        "gauc",
    }  # fmt: skip
    fixed = {name for names in resumption.FIXED.values() for name in names}
    free = set(resumption.FREE)
    names = [field.name for field in dataclasses.fields(TrainingConfig)]
    # What these say is recorded table by table.
    of_tables = ["embedding_dim", "row_shards", "tables", "tensor_train", "optimizer", "momentum"]
    # Earlier checkpoints do not have these: they are fixed where they are given.
    if_given = ["validation_fraction", "warm_start", "layers", "heads", "attention", "history"]
    assert sorted(names) == sorted(["stream", *fixed, *free, *apart, *of_tables, *if_given])
    assert not fixed & free


SAVED_SEED = 5


@pytest.fixture(scope="module")
def saved(kept_world: WorldFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's checkpoint of its first step, for those that only read it."""
    folder = tmp_path_factory.mktemp("saved")
    kept_world(2).run(save_then_train_on, seed=SAVED_SEED, folder=str(folder), before=1, after=0)
    return folder


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"split": "last"}, 'order.split: "random" in the checkpoint, "last" here'),
        ({"eval_fraction": 0.2}, "order.eval_fraction: 0.1 in the checkpoint, 0.2 here"),
        ({"validation_fraction": 0.2}, "order.validation_fraction: absent in the checkpoint, 0.2 here"),
        ({"batch_size": 12}, "order.batch_size: 24 in the checkpoint, 12 here"),
        ({"dense_optimizer": "adam"}, 'optimizer.dense_optimizer: "adagrad" in the checkpoint, "adam" here'),
        (
            {"optimizer": "sgd", "momentum": 0.9},
            'model.tables.genre.optimizer: "row_wise_adagrad" in the checkpoint, "sgd with momentum" here',
        ),
        ({"embedding_dim": 8}, "model.tables.genre.dim: 4 in the checkpoint, 8 here"),
        ({"row_shards": 2}, "model.tables.genre.row_shards: 1 in the checkpoint, 2 here"),
        ({"model": "dcnv2"}, 'model.model: "dlrm" in the checkpoint, "dcnv2" here'),
        ({"slices": 16}, "order.slices: 8 in the checkpoint, 16 here"),
        ({"top": [8, 8]}, "model.top: [8] in the checkpoint, [8, 8] here"),
        ({"tensor_train": "1:2"}, "model.tables.user.train_rank: null in the checkpoint, 2 here"),
        ({"data_seed": 99}, 'data.fingerprint: "'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_run_does_not_go_on_from_another_ones_checkpoint(
    kept_world: WorldFactory, saved: Path, changed: dict[str, Any], line: str
) -> None:
    """Otherwise the run would be evaluated on rows that it has trained on, or would train other weights."""
    for message in kept_world(2).run(begin_error, seed=SAVED_SEED, folder=str(saved), **changed):
        assert message.startswith(f"ConfigError: {saved / 'step-000000001'} is of another run; ")
        assert line in message


def test_a_run_of_another_seed_does_not_go_on_from_a_checkpoint(kept_world: WorldFactory, saved: Path) -> None:
    other = SAVED_SEED + 1
    for message in kept_world(2).run(begin_error, seed=other, folder=str(saved), data_seed=SAVED_SEED):
        assert f"order.seed: {SAVED_SEED} in the checkpoint, {other} here" in message
        assert message.count("\n") == 1


def save_before(rank: int, world: int, /, *, seed: int, folder: str) -> None:
    """A checkpoint in the middle of an order that is no more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "STREAM_ORDER_VERSION", 1)
        save_then_train_on(rank, world, seed=seed, folder=folder, before=1, after=0)


def test_a_checkpoint_of_an_earlier_order_is_refused_in_a_sentence(
    kept_world: WorldFactory, seed: int, tmp_path: Path
) -> None:
    world = kept_world(2)
    world.run(save_before, seed=seed, folder=str(tmp_path))
    path = tmp_path / "step-000000001"
    for message in world.run(begin_error, seed=seed, folder=str(tmp_path)):
        assert message.startswith(f"ConfigError: {path} is in the middle of an order of samples that is no more (")
        assert message.endswith(f"allowed: a new run that begins with its weights, --warm-start {path}")


def test_what_may_differ_does_and_is_told(kept_world: WorldFactory, seed: int, tmp_path: Path) -> None:
    kept_world(2).run(save_then_train_on, seed=seed, folder=str(tmp_path), before=1, after=0)
    (message,) = kept_world(1).run(begin_error, seed=seed, folder=str(tmp_path), epochs=5, dense_rate=0.5, max_steps=30)
    run_id = Manifest.read(tmp_path / "step-000000001").run_id
    assert message.splitlines() == [
        "no error",
        f"resumes run {run_id} after step 1",
        "  ranks: 2 in the checkpoint, 1 here",
        "  epochs: 3 in the checkpoint, 5 here",
        "  max_steps: null in the checkpoint, 30 here",
        "  dense_rate: 0.02 in the checkpoint, 0.5 here",
    ]


def test_a_checkpoint_without_a_manifest_is_refused_with_what_to_do(
    kept_world: WorldFactory, seed: int, tmp_path: Path
) -> None:
    world = kept_world(2)
    world.run(save_then_train_on, seed=seed, folder=str(tmp_path), before=1, after=0)
    (tmp_path / "step-000000001" / NAME).unlink()
    for message in world.run(begin_error, seed=seed, folder=str(tmp_path)):
        assert message.startswith(f"CheckpointError: {tmp_path / 'step-000000001'} has no {NAME}")
        assert "begin a new run in another folder" in message


def test_a_manifest_of_another_step_is_refused(kept_world: WorldFactory, seed: int, tmp_path: Path) -> None:
    world = kept_world(1)
    world.run(save_then_train_on, seed=seed, folder=str(tmp_path), before=2, after=0)
    path = tmp_path / "step-000000002" / NAME
    path.write_text(dataclasses.replace(Manifest.read(path.parent), step=5).text())
    (message,) = world.run(begin_error, seed=seed, folder=str(tmp_path))
    assert "its manifest is of step 5, its weights are of step 2" in message


def test_a_new_run_does_not_begin_in_the_folder_of_another(kept_world: WorldFactory, seed: int, tmp_path: Path) -> None:
    world = kept_world(2)
    world.run(save_then_train_on, seed=seed, folder=str(tmp_path), before=1, after=0)
    for message in world.run(begin_error, seed=seed, folder=str(tmp_path), resume=False):
        assert message.startswith(f"ConfigError: --checkpoint {tmp_path} has checkpoints of a run")
        assert "give --resume" in message


def test_a_newcomer_with_other_data_is_told_before_it_joins() -> None:
    store = HashStore()
    known = Preprocessing(scales=(), encodings=(Encoding(name="user", row_count=9),))
    resumption.publish_data(store, "aa", known)
    assert resumption.published_preprocessing(store).text() == known.text()
    resumption.check_data(store, "aa")
    with pytest.raises(ConfigError, match="the data of the run have the fingerprint aa, but those loaded here bb"):
        resumption.check_data(store, "bb")


def test_a_run_that_lost_ranks_goes_back_to_its_own_checkpoint(
    kept_world: WorldFactory, seed: int, tmp_path: Path
) -> None:
    """Meanwhile the folder has a newer step of another run."""
    for answer in kept_world(2).run(go_back_beside_another_run, seed=seed, folder=str(tmp_path)):
        assert answer == {"went_back_to": 3, "is_own": True, "other_alone": 0}
