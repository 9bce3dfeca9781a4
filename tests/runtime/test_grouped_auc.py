# SPDX-License-Identifier: Apache-2.0
"""AUC by group (`--gauc`): as counting pairs gives it, exact in any world, by label and window, from every source."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sennit.runtime.data.samples import NOBODY
from sennit.runtime.data.seeds import numpy_stream
from sennit.runtime.training.command import main
from sennit.runtime.training.metrics import Evaluation, GroupedAuc, Quality
from sennit.runtime.training.predictions import Predictions
from tests.runtime.whole_run import train
from tests.runtime.world import WorldFactory

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.timeout(120)

YAMBDA = "synthetic-yambda?rows=1000&users=9&items=20&last=4"

Ints = npt.NDArray[np.int64]


def made(seed: int, count: int = 3_000) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], Ints]:
    """Logits with many ties, labels, and groups of very different sizes, some of one class, some nobody's."""
    stream = numpy_stream(seed, "grouped")
    groups = (stream.pareto(0.4, count) * 3).clip(0, 2**60).astype(np.int64)
    groups[stream.random(count) < 0.1] = NOBODY
    groups[groups % 7 == 3] *= -1
    logits: npt.NDArray[np.float32] = (stream.integers(-4, 5, count) / 2).astype(np.float32)
    return logits, (stream.random(count) < 0.3).astype(np.float32), groups


def counted(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32], groups: Ints) -> GroupedAuc:
    """By its definition: every pair of every group, in fractions."""
    of: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for logit, label, group in zip(logits.tolist(), labels.tolist(), groups.tolist(), strict=True):
        of[group].append((logit, label))
    nobodys = len(of.pop(NOBODY, []))
    total, samples, both = Fraction(0), 0, 0
    for members in of.values():
        positive = [logit for logit, label in members if label]
        negative = [logit for logit, label in members if not label]
        if positive and negative:
            wins_twice = sum(1 + (a > b) - (a < b) for a in positive for b in negative)
            total += Fraction(len(members) * wins_twice, 2 * len(positive) * len(negative))
            samples, both = samples + len(members), both + 1
    auc = float(total / samples) if samples else None
    return GroupedAuc(auc=auc, groups=both, samples=samples, one_class=len(of) - both, nobodys=nobodys)


def found_in(logits: Any, labels: Any, groups: Any) -> Predictions:
    """In two uneven parts, as batches are."""
    found = Predictions(has_groups=True)
    for part in (slice(0, len(logits) // 3), slice(len(logits) // 3, None)):
        found.add(logits[part], labels[part], groups[part])
    return found


def test_it_equals_counting_pairs(seed: int) -> None:
    logits, labels, groups = made(seed)
    found, wanted = found_in(logits, labels, groups).quality().gauc, counted(logits, labels, groups)
    assert found is not None
    assert wanted.auc is not None
    assert found.auc == pytest.approx(wanted.auc, abs=1e-14)
    assert (found.groups, found.samples, found.one_class, found.nobodys) == (
        wanted.groups, wanted.samples, wanted.one_class, wanted.nobodys,
    )  # fmt: skip
    assert min(found.groups, found.one_class, found.nobodys) > 0
    # One group alone has the AUC of all.
    alone = found_in(logits, labels, groups * 0 + 5).quality()
    assert alone.gauc is not None
    assert alone.gauc.auc == pytest.approx(alone.auc, abs=1e-15)


@pytest.mark.parametrize("groups", [[1, 1, 2], [NOBODY] * 3, []], ids=["one class", "nobody's", "none"])
def test_groups_that_have_no_auc(groups: list[int]) -> None:
    """The groups 1 and 2 have one class each."""
    labels = np.array([1, 1, 0], np.float32)[: len(groups)]
    found = found_in(labels * 2, labels, np.array(groups, np.int64)).quality().gauc
    nobodys = groups.count(NOBODY)
    one_class = len(set(groups) - {NOBODY})
    assert found == GroupedAuc(auc=None, groups=0, samples=0, one_class=one_class, nobodys=nobodys)
    assert found.text().startswith("GAUC not defined")


def of_ranks(rank: int, world: int, /, *, seed: int) -> GroupedAuc | None:
    """Rank r has every `world`th sample of the first 3/4, and rank 0 all others."""
    parts = made(seed)
    number = np.arange(len(parts[0]))
    own = np.where(number < len(number) * 3 // 4, number % world == rank, rank == 0)
    return found_in(*(part[own] for part in parts)).quality_of_ranks().gauc


def test_any_world_has_the_same_bits(kept_world: WorldFactory, seed: int) -> None:
    alone = found_in(*made(seed)).quality().gauc
    for world in (1, 2, 3):
        assert kept_world(world).run(of_ranks, seed=seed) == [alone] * world


def test_evaluations_are_read_as_they_were_written() -> None:
    quality = Quality(
        auc=0.5, log_loss=0.7, normalised_entropy=1.0, base_rate=0.5, sample_count=4, calibration=1.0,
        gauc=GroupedAuc(auc=0.25, groups=1, samples=2, one_class=1, nobodys=1),
    )  # fmt: skip
    one = Evaluation(step=3, epoch=1, quality=quality, labels={"a": quality}, window="1970-01-01")
    assert Evaluation.from_json(json.loads(json.dumps(asdict(one)))) == one


def written(folder: Path) -> list[str]:
    """Rows with two labels, a time, and a user who is no feature. Returns the options of a run."""
    stream = numpy_stream(4, "two tasks")
    count = 1_200
    item = stream.integers(0, 30, count)
    users = [None if number % 11 == 0 else f"user {number % 17}" for number in stream.integers(0, 400, count).tolist()]
    content = {
        "clicked": (stream.random(count) < (item % 3 + 1) / 5).astype(np.float32),
        "bought": (stream.random(count) < (item % 2 + 1) / 6).astype(np.float32),
        "at": np.arange(count) * 60,
        "item": item,
        "user": users,
    }
    folder.mkdir(exist_ok=True)
    parquet.write_table(arrow.table(content), folder / "rows.parquet")
    schema = folder / "schema.toml"
    schema.write_text('label = ["clicked", "bought"]\ntime = "at"\n[sparse.item]\nrows = 30\n')
    options = ["--data", str(folder / "rows.parquet"), "--schema", str(schema), "--order", "time", "--window", "6h"]
    return [*options, "--batch-size", "32", "--dim", "4", "--bottom", "4", "--top", "4", "--model", "dcnv2"]


def test_every_label_of_every_window(tmp_path: Path) -> None:
    options = written(tmp_path)
    plain = train(tmp_path / "plain.json", *options, "--ranks", "1")
    alone = train(tmp_path / "1.json", *options, "--ranks", "1", "--gauc", "user")
    two = train(tmp_path / "2.json", *options, "--ranks", "2", "--gauc", "user")
    assert two["windows"] == alone["windows"]
    assert len(alone["windows"]) >= 3
    for window in alone["windows"]:
        assert window["quality"] == window["labels"]["clicked"]
        for one in window["labels"].values():
            grouped = one["gauc"]
            assert 0 < grouped["auc"] < 1
            assert grouped["groups"] + grouped["one_class"] <= 17
            assert 0 < grouped["nobodys"] < one["sample_count"]
            assert grouped["samples"] + grouped["nobodys"] <= one["sample_count"]
    # Who judges changes nothing else.
    assert two["weights_sha256"] == plain["weights_sha256"]
    assert plain["quality"]["gauc"] is None
    assert plain["quality"]["auc"] == alone["quality"]["auc"]


def test_a_run_goes_on_with_other_groups(tmp_path: Path) -> None:
    """A column that no model learns from tells no stream from another."""
    kept = [*written(tmp_path), "--ranks", "1", "--checkpoint", str(tmp_path / "kept"), "--decay", "none"]
    train(tmp_path / "1.json", *kept, "--steps", "4")
    report = train(tmp_path / "2.json", *kept, "--steps", "6", "--resume", "--gauc", "user")
    assert report["steps"] == {"first": 4, "last": 6}
    assert report["quality"]["gauc"] is not None


@pytest.mark.parametrize(
    ("data", "column", "model"),
    [(YAMBDA, "uid", "dcnv2"), (YAMBDA, "uid", "hstu"), ("movielens", "user", "dcnv2")],
)
def test_named_data_sets(data: str, column: str, model: str, tmp_path: Path) -> None:
    if data == "movielens":
        pytest.importorskip("recbole")
    options = ["--data", data, "--model", model, "--gauc", column, "--ranks", "1", "--steps", "2", "--dim", "4"]
    grouped = train(tmp_path / "report.json", *options, "--batch-size", "64", "--heads", "1")["quality"]["gauc"]
    assert grouped["groups"] >= 5
    assert not grouped["nobodys"]


@pytest.mark.parametrize(
    ("column", "what"),
    [
        ("users", "no column users; there are: at, bought, clicked, item, user"),
        ("item", ""),
        (
            "clicked",
            "column clicked is float; allowed for groups of predictions: integer, string or binary; where pandas",
        ),
    ],
)
def test_a_column_that_cannot_group_is_named(
    column: str, what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*written(tmp_path), "--ranks", "1", "--steps", "1", "--sharding", "table_wise", "--gauc", column])
    assert bool(ended.value.code) == bool(what)
    assert what in " ".join(capfd.readouterr().err.split())
