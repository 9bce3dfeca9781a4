# SPDX-License-Identifier: Apache-2.0
"""Samples with several labels: a logit and a quality for each, and one result in any world."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sennit.runtime.checkpoint.digest import digest
from sennit.runtime.data import sources
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.samples import Samples
from sennit.runtime.data.source import Source
from sennit.runtime.model.factory import MODELS, build, reads_histories
from sennit.runtime.model.inputs import HistoryInputs, ModelInputs
from sennit.runtime.model.loss import Loss
from sennit.runtime.model.trial import Trial
from sennit.runtime.sharded.tables import Table
from sennit.runtime.training.trainer import Trainer
from sennit.transport.errors import ConfigError
from tests.extent import briefly
from tests.runtime.short_sources import short_source
from tests.runtime.trainer_runs import config_of, samples
from tests.runtime.whole_run import train
from tests.runtime.world import WorldFactory

HERE = "tests.runtime.test_labels"


def with_two(seed: int, count: int = 331) -> Samples:
    made = samples(seed, count)
    other = samples(seed + 1, count).labels
    return replace(made, labels=torch.stack([made.labels, other], 1), label_names=("clicked", "bought"))


def first_alone(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns [B] of [B, 2]."""
    return F.binary_cross_entropy_with_logits(logits[:, 0], labels[:, 0], reduction="none")


def trained(rank: int, world: int, /, *, seed: int, **changed: Any) -> Any:
    """Weights, the evaluation, and whether the parameters of each label's logit have moved."""
    config, made = config_of(seed, **changed), with_two(seed)
    run = Trainer(config, short_source(replace(made, sample_weights=torch.arange(len(made)) % 2 + 0.5), config))
    head = list(run.model.parameters())[-1]
    before = head.detach().clone()
    for _ in range(6):
        run.train_step()
    return digest(run.weights()), run.evaluation(), (head != before).tolist()


@pytest.mark.parametrize(
    "changed", briefly([{}, {"model": "dcnv2"}, {"model": "deepfm"}], [{"model": "deepfm"}]), ids=str
)
def test_every_label_is_learnt_in_any_world(kept_world: WorldFactory, seed: int, changed: dict[str, Any]) -> None:
    found = [outcome for world in (1, 2, 3) for outcome in kept_world(world).run(trained, seed=seed, **changed)]
    assert len({digest for digest, *_ in found}) == 1
    _, evaluation, moved = found[0]
    assert moved == [True, True]
    assert list(evaluation.labels) == ["clicked", "bought"]
    assert evaluation.quality == evaluation.labels["clicked"] != evaluation.labels["bought"]
    assert all(one == evaluation for _, one, _ in found)


def test_a_loss_may_leave_a_label_out(kept_world: WorldFactory, seed: int) -> None:
    ((_, _, moved),) = kept_world(1).run(trained, seed=seed, loss=f"{HERE}:first_alone")
    assert moved == [True, False]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_a_logit_for_each_label(name: str, seed: int) -> None:
    tables = tuple(Table(name=one, rows=9, dim=4) for one in ("user", "film"))
    history = HistoryInputs(own=("film",), past=(), times=None, last=4)
    inputs = ModelInputs(dense_count=2, tables=tables, top=(3,), seed=seed, label_count=3, history=history)
    given = Trial(inputs, 5, reads_histories=reads_histories(name), lengths={"film": [3, 1, 4]}, make=torch.rand)
    assert build(name, inputs)(torch.rand(5, 2), *given.arguments()).shape == (5, 3)


def one_logit(inputs: ModelInputs) -> torch.nn.Module:
    return build("dcnv2", replace(inputs, label_count=1))


def one_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.sum(1, keepdim=True)


def test_what_has_another_shape_is_named(seed: int) -> None:
    tables = (Table(name="user", rows=9, dim=4),)
    inputs = ModelInputs(dense_count=2, tables=tables, seed=seed, label_count=2)
    with pytest.raises(ConfigError, match=r"shape \(2,\) for 2 samples; allowed: .* \(2, 2\), one logit"):
        build(f"{HERE}:one_logit", inputs)
    with pytest.raises(ConfigError, match=r"returned a tensor of shape \(2, 1\) for 2 samples"):
        Loss(f"{HERE}:one_loss", 2)
    with pytest.raises(DataError, match=r"labels are \(331, 2\), but 1 have a name"):
        replace(with_two(seed), label_names=("label",))


def test_labels_of_files_and_in_the_report(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    made = with_two(3, 300)
    content = {
        "clicked": made.labels[:, 0].numpy(),
        "bought": made.labels[:, 1].numpy(),
        "price": made.dense[:, 0].numpy(),
        "user": made.columns[0].values.numpy(),
    }
    parquet.write_table(arrow.table(content), tmp_path / "data.parquet")
    schema = 'label = ["clicked", "bought"]\ndense = ["price"]\n[sparse.user]\nrows = 20\n'
    (tmp_path / "schema.toml").write_text(schema)
    source = Source(data=str(tmp_path / "data.parquet"), schema=tmp_path / "schema.toml")
    raw = sources.load(source, seed=1)
    assert raw.label_names == ("clicked", "bought")
    assert torch.equal(raw.labels, made.labels)
    options = ["--data", source.data, "--schema", str(source.schema), "--batch-size", "32", "--dim", "4"]
    report = train(tmp_path / "report.json", *options, "--steps", "3", "--ranks", "2")
    assert list(report["labels"]) == ["clicked", "bought"]
    assert report["quality"] == report["labels"]["clicked"]
    assert report["labels"]["bought"]["base_rate"] != report["quality"]["base_rate"]
