# SPDX-License-Identifier: Apache-2.0
"""The parts of the trainer that need no process group, each against a plain reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from sennit.runtime.data.seeds import numpy_stream
from sennit.runtime.model.embedding import embedding_engine
from sennit.runtime.model.model import DenseModel
from sennit.runtime.model.optimizer import dense_optimizer
from sennit.runtime.model.phases import PhaseClock
from sennit.runtime.model.sharding import Table, place
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.fingerprint import line
from sennit.runtime.training.metrics import auc, quality
from sennit.transport.errors import ConfigError


def table(name: str, rows: int, mean_length: float = 1.0) -> Table:
    return Table(name=name, row_count=rows, mean_length=mean_length)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_placement_gives_every_table_one_owner_and_balances(world_size: int) -> None:
    tables = [table(f"t{number}", 10, float(number % 7 + 1)) for number in range(20)]
    placement = place(tables, world_size=world_size, dim=16)
    assert sorted(placement.wire_order) == list(range(20))
    for rank, tables_of_rank in enumerate(placement.tables_of):
        assert all(placement.owner_of[number] == rank for number in tables_of_rank)
    assert [placement.wire_order[spot] for spot in placement.wire_place] == list(range(20))
    load = [sum(tables[number].cost(16) for number in part) for part in placement.tables_of]
    # Graham's bound, against the mean as a lower bound of the best.
    assert max(load) <= 4 / 3 * max(sum(load) / world_size, max(part.cost(16) for part in tables))


def test_more_ranks_than_tables_leaves_some_without() -> None:
    placement = place([table("a", 5), table("b", 5)], world_size=4, dim=4)
    assert placement.tables_of == ((0,), (1,), (), ())


def test_initial_rows_depend_on_seed_and_name_only(seed: int) -> None:
    both = embedding_engine([table("x", 50), table("a", 9)], dim=4, seed=seed)
    alone = embedding_engine([table("a", 9)], dim=4, seed=seed)
    assert torch.equal(both.weight("a"), alone.weight("a"))
    assert bool((alone.weight("a").abs() <= 1 / 3).all())
    assert not torch.equal(both.weight("x")[:9], alone.weight("a"))


def test_interaction_equals_its_definition(seed: int) -> None:
    model = DenseModel(dense_count=3, table_count=4, dim=5, bottom=(6,), top=(7,), seed=seed)
    dense, pooled = torch.randn(8, 3), torch.randn(4, 8, 5)
    first = model.bottom(dense)
    vectors = [first, *pooled]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(5) for j in range(i)]
    expected = model.top(torch.cat((first, torch.stack(pairs, 1)), 1)).squeeze(1)
    torch.testing.assert_close(model(dense, pooled), expected)


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    shape = {"dense_count": 3, "table_count": 2, "dim": 4, "bottom": (6,), "top": (7,)}
    torch.manual_seed(1)
    one = DenseModel(**shape, seed=5)  # type: ignore[arg-type]
    torch.manual_seed(2)
    two = DenseModel(**shape, seed=5)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("levels", [3, 50, 100_000])
def test_auc_equals_counting_pairs(levels: int, seed: int) -> None:
    stream = numpy_stream(seed, "auc", levels)
    scores = stream.integers(0, levels, 300) / levels
    labels = (stream.random(300) < 0.3).astype(float)
    pairs = itertools.product(scores[labels == 1], scores[labels == 0])
    wins = [1.0 if high > low else 0.5 if high == low else 0.0 for high, low in pairs]
    assert auc(scores, labels) == pytest.approx(np.mean(wins), abs=1e-12)


def test_normalised_entropy_of_the_base_rate_is_one() -> None:
    labels = np.array([1.0] * 30 + [0.0] * 70)
    found = quality(np.full(100, np.log(0.3 / 0.7)), labels)
    assert found.normalised_entropy == pytest.approx(1)
    assert found.auc == pytest.approx(0.5)
    assert found.log_loss == pytest.approx(-(0.3 * np.log(0.3) + 0.7 * np.log(0.7)))
    sure = quality(np.where(labels > 0, 1000.0, -1000.0), labels)
    assert (sure.auc, sure.log_loss) == (1.0, 0.0)
    assert np.isnan(quality(np.zeros(3), np.ones(3)).auc)


def test_phases_count_each_moment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    clock = PhaseClock()
    with clock.phase("outer"):
        now += 1
        with clock.phase("inner"):
            now += 10
        now += 100
    now += 1000
    with clock.phase("outer"):
        now += 5
    assert clock.seconds == {"outer": 106.0, "inner": 10.0}


def test_optimizers_and_configurations_are_checked() -> None:
    with pytest.raises(ConfigError, match="dense optimizer 'lion'; allowed: adagrad, adam, sgd"):
        dense_optimizer("lion", nn.Linear(1, 1).parameters(), rate=1)
    with pytest.raises(ConfigError, match="batch size 10 cannot be cut into 3 equal parts; allowed: multiples of 3"):
        TrainingConfig(batch_size=10).check_world(3)
    with pytest.raises(ConfigError, match="dense rate -1; allowed: above 0"):
        TrainingConfig(dense_rate=-1)
    with pytest.raises(ConfigError, match="clip norm 0; allowed: above 0"):
        TrainingConfig(clip_norm=0)
    with pytest.raises(ConfigError, match="weight decay -1; allowed: 0 or more"):
        TrainingConfig(weight_decay=-1)
    with pytest.raises(ConfigError, match="decay end 5; allowed: above 7"):
        TrainingConfig(warmup=7, max_steps=5)
    with pytest.raises(ConfigError, match="need a checkpoint folder"):
        TrainingConfig(resume=True)


def test_fingerprint_line_names_type_shape_and_bytes() -> None:
    # SHA-256 of four zero bytes.
    digest = "df3f619804a92fdb4057192dc43dd748ea778adc52bc498ce80524c014b81119"
    assert line("w", torch.zeros(1, 1)) == f"w float32 1x1 {digest}"
    assert line("w", torch.ones(2, 3).t()) == line("w", torch.ones(3, 2))
