# SPDX-License-Identifier: Apache-2.0
"""What `sennit train` minimises: log loss, a function of the user's, and weights of samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sennit.runtime.checkpoint.digest import digest
from sennit.runtime.data.errors import DataError
from sennit.runtime.model.loss import Loss
from sennit.runtime.training.trainer import Trainer
from sennit.transport.errors import ConfigError
from tests.runtime.short_sources import opened, short_source
from tests.runtime.stream.test_stream_order import rows_of
from tests.runtime.trainer_runs import config_of, samples
from tests.runtime.world import WorldFactory


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Focal loss (Lin et al. 2017, equation 4), gamma 2, of each sample."""
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return (1 - torch.exp(-losses)) ** 2 * losses


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels)


def constant(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.zeros(len(logits))


def one_argument(logits: Tensor) -> Tensor:
    return logits


def first_label(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits[:, 0], labels[:, 0], reduction="none")


def few(logits: Tensor, labels: Tensor) -> Tensor:
    return focal(logits, labels)[:2]


number = 3
HERE = "tests.runtime.test_loss"


def trained(rank: int, world: int, /, *, seed: int, weighted: str = "", steps: int = 6, **changed: Any) -> Any:
    """`weighted`: "" for samples without weights, "ones" for equal ones, "twice" for weights of 0 to 2."""
    config, made = config_of(seed, **changed), samples(seed)
    if weighted:
        weights = torch.ones(len(made)) if weighted == "ones" else torch.arange(len(made)) % 3
        made = replace(made, sample_weights=weights.float())
    source = short_source(made, config)
    run = Trainer(config, source)
    reports = [run.train_step() for _ in range(steps)]
    rows = [rows_of(source.order, source.order.training_batch(step)) for step in range(steps)]
    worth = [0.0 if made.sample_weights is None else float(made.sample_weights[one].sum()) for one in rows]
    return digest(run.weights()), float(reports[0].loss_sum), worth


@pytest.mark.parametrize("changed", [{"loss": f"{HERE}:focal"}, {"weighted": "twice"}], ids=["own", "weighted"])
def test_a_loss_has_one_result_in_any_world(kept_world: WorldFactory, seed: int, changed: dict[str, Any]) -> None:
    found = {digest for world in (1, 2, 3) for digest, *_ in kept_world(world).run(trained, seed=seed, **changed)}
    ((plain, *_),) = kept_world(1).run(trained, seed=seed)
    assert len(found) == 1
    assert found != {plain}


def test_weights_of_one_change_nothing_and_others_multiply(kept_world: WorldFactory, seed: int) -> None:
    world = kept_world(1)
    ((plain, *_),) = world.run(trained, seed=seed)
    assert world.run(trained, seed=seed, weighted="ones")[0][0] == plain
    # Before the first step all logits are the same model's: the loss of a sample counts as often as its weight says.
    made, config = samples(seed), config_of(seed)
    order = opened(made, config).order
    rows = torch.from_numpy(rows_of(order, order.training_batch(0)))
    _, loss_sum, worth = world.run(trained, seed=seed, weighted="twice", steps=1)[0]
    assert worth == [float((rows % 3).sum())]
    _, all_ones, _ = world.run(trained, seed=seed, weighted="ones", steps=1)[0]
    assert 0 < loss_sum < 2 * all_ones
    assert loss_sum != all_ones


def test_a_weighted_sum_is_torchs(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, weights = torch.randn(9, generator=generator), torch.rand(9, generator=generator)
    labels = (torch.rand(9, generator=generator) < 0.5).float()
    expected = F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
    torch.testing.assert_close(Loss()(logits, labels, weights), expected)
    torch.testing.assert_close(Loss(f"{HERE}:focal")(logits, labels), focal(logits, labels).sum())


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("bec", r"loss 'bec'; allowed: bce, or package.module:function; did you mean bce\?"),
        (f"{HERE}:focl", r"has no focl; did you mean focal\?"),
        (f"{HERE}:number", "is a int; allowed: a function"),
        (f"{HERE}:one_argument", r"has the arguments \(logits: .*, but gets two, logits, labels: too many"),
        (
            f"{HERE}:mean_loss",
            r"returned a tensor of shape \(\) for 2 samples; allowed: a float tensor of shape \(2,\)",
        ),
        (f"{HERE}:constant", "has no gradient; allowed: a function that torch differentiates"),
    ],
)
def test_what_is_wrong_with_a_loss_is_said(name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Loss(name)


def test_a_loss_that_fails_says_what_it_was_given() -> None:
    with pytest.raises(IndexError) as failed:
        Loss(f"{HERE}:first_label")
    assert "was tried on logits and labels of zeros, (2,), before the first step" in failed.value.__notes__[0]
    assert Loss(f"{HERE}:first_label", label_count=2)(torch.zeros(3, 2), torch.ones(3, 2)) > 0
    with pytest.raises(ConfigError, match=r"a loss of shape \(2,\) for logits of shape \(5,\); allowed: one of each"):
        Loss(f"{HERE}:few")(torch.zeros(5), torch.ones(5))


def test_weights_that_cannot_be_are_named(seed: int) -> None:
    made = samples(seed)
    with pytest.raises(DataError, match=r"weight -1.0 of sample 0; allowed: 0 or more"):
        replace(made, sample_weights=torch.full((len(made),), -1.0))
    with pytest.raises(DataError, match=r"weights are \(2,\), expected \(331,\)"):
        replace(made, sample_weights=torch.ones(2))


def test_weights_of_a_file(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from sennit.runtime.data import sources
    from sennit.runtime.data.raw_samples import fingerprint as of_data
    from sennit.runtime.data.source import Source

    schema, path = tmp_path / "schema.toml", tmp_path / "data.parquet"
    schema.write_text('label = "clicked"\nsample_weight = "worth"\n[sparse.user]\nrows = 9\n')

    def load(worth: list[Any]) -> Any:
        parquet.write_table(arrow.table({"clicked": [0, 1, 1], "worth": worth, "user": [0, 1, 2]}), path)
        return sources.load(Source(data=str(path), schema=schema), seed=1)

    found, other = load([0, 2, 1]), load([0.5, 2, 1])
    assert found.sample_weights.tolist() == [0, 2, 1]
    assert found.samples().batch(torch.tensor([1, 0])).sample_weights.tolist() == [2, 0]
    assert of_data(found) != of_data(other)
    with pytest.raises(DataError, match=r"column worth, row group 0, row 1: sample weight -1.0; allowed: 0 or more"):
        load([0, -1, 1])
    with pytest.raises(DataError, match="row 1: null; allowed: no nulls in sample_weight"):
        load([0, None, 1])
