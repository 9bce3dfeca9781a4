# SPDX-License-Identifier: Apache-2.0
"""When `sennit train` evaluates, on which rows, and that no evaluation is lost when a run ends in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sennit.runtime.checkpoint.digest import digest
from sennit.runtime.data import sources
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.order import OrderSettings
from sennit.runtime.data.source import Source
from sennit.runtime.stream.settings import StreamSettings, open_source
from sennit.runtime.training import resumption
from sennit.runtime.training.metrics import Evaluation
from sennit.runtime.training.trainer import Trainer
from tests.runtime.test_train_best import OVERFITTING, best_of
from tests.runtime.trainer_runs import trainer
from tests.runtime.whole_run import train
from tests.runtime.world import WorldFactory

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.timeout(120)


class Ended(Exception):
    """The run ended in an evaluation."""


def evaluated(run: Trainer, folder: str, end_in: int | None) -> list[Evaluation]:
    """Runs to the end, or until the evaluation after `end_in` steps has begun, which is when a rank may die."""
    found: list[Evaluation] = []
    original = run.evaluation

    def evaluation() -> Evaluation:
        if run.step == end_in:
            raise Ended
        return original()

    def on_evaluation(one: Evaluation) -> bool:
        found.append(one)
        return False

    run.evaluation = evaluation  # type: ignore[method-assign]
    with resumption.saver_of(run.config) as saver:
        resumption.begin(run)
        run.source.begin(run.next_batch)
        try:
            run.run(lambda report: None, on_evaluation, lambda step: resumption.save(run, saver))
        except Ended:
            assert end_in is not None
    return found


def lives(rank: int, world: int, /, *, seed: int, folder: str, ends: list[int], **changed: Any) -> Any:
    """A run that ends in these evaluations and resumes. The evaluations of all its lives, and its weights."""
    found: list[Evaluation] = []
    for number, end_in in enumerate([*ends, None]):
        run = trainer(seed, checkpoint=Path(folder), resume=number > 0, **changed)
        found += evaluated(run, folder, end_in)
    return found, digest(run.weights())


def test_a_run_that_ends_in_an_evaluation_makes_it_when_it_resumes(
    kept_world: WorldFactory, seed: int, tmp_path: Path
) -> None:
    """11 steps an epoch: evaluations after 5, 10, 11, 15, 20, 22 and 25 steps, on the same rows in any world."""
    changed: dict[str, Any] = {"eval_every": 5, "checkpoint_every": 1, "max_steps": 25, "validation_fraction": 0.05}
    undisturbed = kept_world(1).run(lives, seed=seed, folder=str(tmp_path / "1"), ends=[], **changed)[0]
    assert [one.step for one in undisturbed[0]] == [5, 10, 11, 15, 20, 22, 25]
    assert [one.epoch for one in undisturbed[0]] == [1, 1, 1, 2, 2, 2, 3]
    assert {one.quality.sample_count for one in undisturbed[0]} == {33}
    assert {one.validation.sample_count for one in undisturbed[0] if one.validation} == {15}
    for found in kept_world(2).run(lives, seed=seed, folder=str(tmp_path / "2"), ends=[5, 22, 25], **changed):
        assert found == undisturbed


def test_validation_samples_say_which_evaluation_is_best(tmp_path: Path) -> None:
    """Those reported have no part in it. Evaluations inside an epoch count, too."""
    folder = tmp_path / "checkpoints"
    stopping = [*OVERFITTING, "--validation-fraction", "0.2", "--eval-every", "3", "--stop-early", "1"]
    report = train(tmp_path / "1.json", *stopping, "--checkpoint", str(folder), "--ranks", "2")
    best = best_of(folder)
    assert report["best"] == best
    assert best["validation"]["sample_count"] == 108
    assert best["quality"]["sample_count"] == report["quality"]["sample_count"] == 60
    assert best["validation"]["normalised_entropy"] < report["validation"]["normalised_entropy"]
    # 6 steps an epoch.
    assert best["step"] % 3 == 0
    assert report["steps"]["last"] == best["step"] + 3
    plain = train(
        tmp_path / "2.json", *OVERFITTING, "--validation-fraction", "0.2", "--steps", str(report["steps"]["last"])
    )
    assert plain["weights_sha256"] == report["weights_sha256"]


SCHEMA = """
label = "clicked"
[dense.price]
[sparse.city]
encode = "dictionary"
"""


def written(path: Path, first: int, count: int) -> Path:
    """Rows whose labels have both classes; the cities of a file are its own, but for one."""
    numbers = range(first, first + count)
    content = {
        "clicked": [number % 3 == 0 for number in numbers],
        "price": [float(number % 7) for number in numbers],
        "city": ["home" if number % 2 else f"city {number // 50}" for number in numbers],
    }
    parquet.write_table(arrow.table(content), path)
    return path


def test_rows_of_other_files_are_for_evaluation_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    training, held_back = written(tmp_path / "train.parquet", 0, 200), written(tmp_path / "eval.parquet", 200, 50)
    source = Source(data=str(training), evaluation=(str(held_back),), schema=tmp_path / "schema.toml")
    assert sources.load(source, seed=1).eval_rows == 50
    command = ["--schema", str(tmp_path / "schema.toml"), "--batch-size", "32", "--epochs", "2", "--dim", "4"]
    both = [*command, "--data", str(training), "--eval-data", str(held_back)]
    reports = [
        train(
            tmp_path / f"{ranks}.json", *both, "--ranks", str(ranks), "--checkpoint", str(tmp_path / f"saved {ranks}")
        )
        for ranks in (1, 2)
    ]
    assert [report["quality"]["sample_count"] for report in reports] == [50, 50]
    assert reports[0]["weights_sha256"] == reports[1]["weights_sha256"]
    # Cities of the evaluation's file alone are not known: home, and those of rows 0 to 199.
    assert reports[0]["embedding"]["table_numbers"] == 4 * (1 + 1 + 4)
    assert [report["steps"]["last"] for report in reports] == [12, 12]
    resumed = ["--checkpoint", str(tmp_path / "saved 1"), "--resume"]
    with pytest.raises(AssertionError):
        train(tmp_path / "3.json", *command, "--data", str(training), "--data", str(held_back), *resumed)
    assert "order.eval_rows: 50 in the checkpoint, absent here" in capfd.readouterr().err
    with pytest.raises(DataError, match="--eval-data belongs to files, but the data set is 'flights'"):
        sources.check(Source(data="flights", evaluation=("x.parquet",)))


def test_files_without_rows_are_named_by_what_they_are_for(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    full, empty = str(written(tmp_path / "full.parquet", 0, 20)), str(written(tmp_path / "empty.parquet", 0, 0))
    order = OrderSettings(seed=1, split="last", eval_fraction=0.1, batch_size=4, epochs=1, max_steps=None)
    for data, evaluation, message in ((full, empty, "no row to evaluate"), (empty, full, "no row to train on")):
        source = Source(data=data, evaluation=(evaluation,), schema=tmp_path / "schema.toml")
        with pytest.raises(DataError, match=f"^{empty}: {message}; allowed: files with rows"):
            open_source(source, StreamSettings(), order, seed=1)
