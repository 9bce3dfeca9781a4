# SPDX-License-Identifier: Apache-2.0
"""`--warm-start`: a run on tomorrow's data begins with what yesterday's has learnt, value by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sennit.runtime.checkpoint.digest import digest
from sennit.runtime.checkpoint.folder import named
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.raw_samples import Feature, RawSamples, dense_fields
from sennit.runtime.data.seeds import numpy_stream
from sennit.runtime.training import resumption
from sennit.runtime.training.trainer import Trainer
from sennit.transport.errors import SennitError
from tests.extent import briefly
from tests.runtime.short_sources import short_source
from tests.runtime.trainer_runs import config_of
from tests.runtime.whole_run import train
from tests.runtime.world import WorldFactory

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.timeout(120)

ADAM = '[defaults.optimizer]\nkind = "adam"\n'
MIXED = f'{ADAM}[tables.user.optimizer]\nkind = "sgd"\nmomentum = 0.5\n'


def day(number: int, seed: int, count: int = 230) -> RawSamples:
    """The samples of a day: some cities come, others go."""
    stream = numpy_stream(seed, "day", number)
    city = stream.integers(10 * number, 10 * number + 25, count)
    lengths = stream.integers(0, 3, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return RawSamples(
        name=f"day {number}",
        dense=torch.from_numpy(stream.standard_normal((count, 2)) * (1 + number)),
        dense_fields=dense_fields(["price", "age"]),
        labels=torch.from_numpy((stream.random(count) < 0.5).astype(np.float32)),
        features=(
            Feature.categories("city", arrow.array([f"city {one:03}" for one in city])),
            Feature.categories("tags", arrow.array(stream.integers(0, 9 + 5 * number, int(lengths.sum()))), offsets),
            Feature(name="user", row_count=20 + 4 * number, values=stream.integers(0, 20, count)),
        ),
    )


def trainer_of(number: int, seed: int, **changed: Any) -> Trainer:
    config = config_of(seed, **changed)
    known = None if config.warm_start is None else Preprocessing.read(named(config.warm_start))
    return Trainer(config, short_source(day(number, seed), config, known))


def first_day(rank: int, world: int, /, *, seed: int, folder: str, **changed: Any) -> None:
    run = trainer_of(0, seed, checkpoint=Path(folder), **changed)
    resumption.begin(run)
    for _ in range(5):
        run.train_step()
    resumption.save(run)


def rows_by_value(run: Trainer, table: str) -> dict[Any, list[list[float]]]:
    """The rows of all shards of a table on one rank, with their states, by the values that they stand for."""
    assert run.source.preprocessing is not None
    encoding = next(one for one in run.source.preprocessing.encodings if one.name == table)
    names: list[Any] = list(range(encoding.row_count))
    if encoding.vocabulary is not None:
        names = [None, *encoding.vocabulary.tolist()]
    state = run.tables.state_dict()
    kinds = sorted({key.split(".", 2)[2] for key in state if key.startswith(f"{table}/")})
    shards = next(one.row_shards for one in run.tables.tables if one.name == table)
    columns = [torch.cat([state[f"{table}/{shard}.0.{kind}"] for shard in range(shards)]) for kind in kinds]
    return {name: [column[row].tolist() for column in columns] for row, name in enumerate(names)}


def second_day(rank: int, world: int, /, *, seed: int, folder: str, before: dict[str, Any], **changed: Any) -> Any:
    """Begins warm, and trains on. Alone it compares all rows with those of the checkpoint, and of a new run."""
    run = trainer_of(1, seed, warm_start=Path(folder), **changed)
    told = resumption.begin(run)
    if world == 1:
        old = trainer_of(0, seed, checkpoint=Path(folder), resume=True, **before)
        resumption.begin(old)
        new = trainer_of(1, seed, warm_start=Path(folder), **changed)
        for table in ("city", "tags", "user"):
            kept, found, initial = (rows_by_value(one, table) for one in (old, run, new))
            assert kept.keys() <= found.keys()
            assert len(found) > len(kept)
            assert all(found[name] == kept[name] for name in kept)
            assert all(found[name] == initial[name] for name in found.keys() - kept.keys())
        for name, parameter in old.model.named_parameters():
            assert torch.equal(parameter, run.model.get_parameter(name))
        states = [list(one.optimizer.state.values()) for one in (old, run)]
        assert all(torch.equal(a["sum"], b["sum"]) for a, b in zip(*states, strict=True))
        assert run.step == 0
        assert run.tables.steps.tolist() == old.tables.steps.tolist()
    begun = digest(run.weights())
    for _ in range(3):
        run.train_step()
    return told[1:], begun, digest(run.weights())


@pytest.mark.parametrize(
    ("before", "changed"),
    briefly(
        [({}, {"row_shards": 3}), ({"row_shards": 2, "tables": MIXED}, {"tables": MIXED})],
        [({"row_shards": 2, "tables": MIXED}, {"tables": MIXED})],
    ),
    ids=["more shards", "fewer shards, adam and momentum"],
)
def test_rows_go_where_their_values_are_now_in_any_world(
    kept_world: WorldFactory, seed: int, tmp_path: Path, before: dict[str, Any], changed: dict[str, Any]
) -> None:
    kept_world(2).run(first_day, seed=seed, folder=str(tmp_path), **before)
    found = [
        outcome
        for world in (1, 2, 3)
        for outcome in kept_world(world).run(second_day, seed=seed, folder=str(tmp_path), before=before, **changed)
    ]
    assert len({outcome[1:] for outcome in map(tuple, found)}) == 1
    assert not any(told for told, *_ in found)


def test_states_of_other_optimizers_begin_anew(kept_world: WorldFactory, seed: int, tmp_path: Path) -> None:
    kept_world(2).run(first_day, seed=seed, folder=str(tmp_path))
    changed: dict[str, Any] = {"tables": ADAM, "dense_optimizer": "adam"}
    found = [
        (told, begun)
        for world in (2, 3)
        for told, begun, _ in kept_world(world).run(second_day, seed=seed, folder=str(tmp_path), before={}, **changed)
    ]
    assert {begun for _, begun in found} == {found[0][1]}
    assert all(
        told
        == [f"optimizer states of table {name} begin anew: the checkpoint has those of another optimizer"
            for name in ("city", "tags", "user")]
        + ["states of the dense optimizer begin anew: the checkpoint has those of another one"]
        for told, _ in found
    )  # fmt: skip


def refused(rank: int, world: int, /, *, seed: int, folder: str, **changed: Any) -> str:
    run = trainer_of(1, seed, warm_start=Path(folder), **changed)
    with pytest.raises(SennitError) as caught:
        resumption.begin(run)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"embedding_dim": 8}, "tables.city.dim: 4 in the checkpoint, 8 here"),
        ({"model": "dcnv2"}, 'model: "dlrm" in the checkpoint, "dcnv2" here'),
        ({"tensor_train": "20:2"}, "tables.user.train_rank: null in the checkpoint, 2 here"),
    ],
)
def test_another_model_is_refused_on_all_ranks(
    kept_world: WorldFactory, seed: int, tmp_path: Path, changed: dict[str, Any], what: str
) -> None:
    kept_world(2).run(first_day, seed=seed, folder=str(tmp_path))
    for message in kept_world(2).run(refused, seed=seed, folder=str(tmp_path), **changed):
        assert message.startswith(f"ConfigError: --warm-start {tmp_path / 'step-000000005'} is of another model:")
        assert what in message


SCHEMA = """
label = "clicked"
dense = ["price"]
[sparse.city]
encode = "dictionary"
"""


def test_the_command_trains_on_and_resumes_what_it_began(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two days in files. A run that began warm resumes with the same option, and is refused without it."""
    (tmp_path / "schema.toml").write_text(SCHEMA)
    for number in (0, 1):
        samples = day(number, 5)
        content = {
            "clicked": samples.labels.numpy(),
            "price": samples.dense[:, 0].numpy(),
            "city": samples.features[0].dictionary[samples.features[0].values],  # type: ignore[index]
        }
        parquet.write_table(arrow.table(content), tmp_path / f"day-{number}.parquet")
    common = ["--schema", str(tmp_path / "schema.toml"), "--batch-size", "32", "--dim", "4", "--bottom", "8", "--top"]
    common += ["8", "--epochs", "1", "--sparse-rate", "0.5"]
    days = [[*common, "--data", str(tmp_path / f"day-{number}.parquet")] for number in (0, 1)]
    yesterday = tmp_path / "yesterday"
    train(tmp_path / "0.json", *days[0], "--checkpoint", str(yesterday), "--ranks", "2")
    warm = [*days[1], "--warm-start", str(yesterday), "--checkpoint", str(tmp_path / "today")]
    whole = train(tmp_path / "1.json", *warm, "--ranks", "1", "--checkpoint-every", "3")
    plain = train(tmp_path / "2.json", *days[1], "--ranks", "1")
    assert whole["weights_sha256"] != plain["weights_sha256"]
    again = [*days[1], "--warm-start", str(yesterday), "--checkpoint", str(tmp_path / "again")]
    train(tmp_path / "3.json", *again, "--steps", "3", "--decay", "none", "--ranks", "3")
    capfd.readouterr()
    with pytest.raises(AssertionError):
        train(tmp_path / "4.json", *days[1], "--checkpoint", str(tmp_path / "again"), "--resume")
    assert "model.warm_start: " in capfd.readouterr().err
    # The run has checkpoints of its own by now.
    yesterday.rename(tmp_path / "archive")
    resumed = train(tmp_path / "5.json", *again, "--decay", "none", "--ranks", "2", "--resume")
    (tmp_path / "archive").rename(yesterday)
    undisturbed = train(tmp_path / "6.json", *warm[:-2], "--decay", "none", "--ranks", "1")
    assert resumed["weights_sha256"] == undisturbed["weights_sha256"]
    with pytest.raises(AssertionError):
        train(tmp_path / "7.json", *days[1], "--warm-start", str(tmp_path / "nothing"))
    assert "nothing: no checkpoint, and no folder of checkpoints" in capfd.readouterr().err
