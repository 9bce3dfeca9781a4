# SPDX-License-Identifier: Apache-2.0
"""`sennit bench quality`: its intervals, its settings, and its peer in plain torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from sennit.runtime.data.sources import Source
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.launch import RankFailure
from sennit.testbed.bench import parameter_server, plain_torch, quality
from sennit.transport.errors import SennitError
from tests.runtime.whole_run import train

pytestmark = pytest.mark.timeout(120)


def report(*, qualities: dict[str, list[float]]) -> quality.Report:
    runs = {way: [{"normalised_entropy": one, "auc": 1 - one} for one in found] for way, found in qualities.items()}
    return quality.Report(settings=quality.Settings(seeds=3), machine={}, qualities=runs)


def test_a_difference_is_paired_by_seed_and_has_an_interval() -> None:
    # Seeds differ by 0.1, the ways by 0.02 with a standard deviation of 0.001.
    found = report(qualities={"fp32": [0.5, 0.6, 0.7], "exchange fp8": [0.52, 0.621, 0.719]})
    apart = found.difference("exchange fp8", "normalised_entropy")
    assert apart.mean == pytest.approx(0.02)
    assert apart.half == pytest.approx(4.303 * 0.001 / math.sqrt(3))
    assert found.difference("exchange fp8", "auc").mean == pytest.approx(-0.02)
    assert found.as_json()["minus base"]["exchange fp8"]["auc"]["half"] == pytest.approx(apart.half)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"only": ("fp7",)}, "way 'fp7'; allowed: fp32, plain torch"),
        ({"base": "batch 8,192"}, "base 'batch 8,192'; allowed: fp32, plain torch"),
        ({"warmup": 1.0, "batch_sizes": (512,)}, "a warm-up of 1 of the steps; allowed: 0 to below 1"),
        ({"equal_time": True}, "the same time without batch sizes and 'parameter server'"),
        ({"equal_time": True, "batch_sizes": (512,), "only": ("fp32",)}, "the same time without batch sizes"),
        ({"seeds": 1}, "1 seeds; allowed: 2 to"),
        ({"seeds": 99}, "99 seeds; allowed"),
    ],
)
def test_settings_that_have_no_answer_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        quality.Settings(**settings)


def test_rates_grow_with_the_square_root_of_the_batch() -> None:
    options = quality.batch_options(4 * TrainingConfig().batch_size)
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert float(given["--sparse-rate"]) == 2 * TrainingConfig().sparse_rate
    assert float(given["--dense-rate"]) == 2 * TrainingConfig().dense_rate


def test_the_same_time_is_that_of_the_parameter_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that takes a third of its time gets three times the epochs, whatever the speed of the machine."""
    asked: list[tuple[str, int]] = []

    def trained(settings: quality.Settings, way: str, seed: int) -> quality.Trained:
        asked.append((way, settings.epochs))
        seconds = {quality.ASYNCHRONOUS: 3.1, "batch 512": 1.0}.get(way, 0.0)
        return quality.Trained(quality={"normalised_entropy": 0.5 + seed, "auc": 0.5}, seconds=seconds)

    monkeypatch.setattr(quality, "_train", trained)
    settings = quality.Settings(
        seeds=2, epochs=2, batch_sizes=(512,), only=(), base=quality.ASYNCHRONOUS, equal_time=True
    )
    found = quality.run(settings)
    assert asked == 2 * [(quality.ASYNCHRONOUS, 2), ("batch 512", 2), ("batch 512, same time", 6)]
    assert found.seconds["batch 512"] == [1.0, 1.0]


def test_the_warmup_is_a_share_of_the_steps() -> None:
    settings = quality.Settings(data="synthetic", batch_sizes=(512,), warmup=0.25, epochs=2)
    steps = quality._warmup(settings, 512, 1)
    order = plain_torch.PlainTorch(
        TrainingConfig(source=Source(data="synthetic"), batch_size=512, epochs=2, seed=1)
    ).order
    assert steps == ["--warmup", str(round(order.step_count / 4))]


def test_plain_torch_trains_the_same_model(tmp_path: Path) -> None:
    """The same quality as the trainer's, up to rounding of sums in another order."""
    config = TrainingConfig(
        source=Source(data="synthetic", samples=2_000, row_limit=300), batch_size=64, embedding_dim=8, epochs=2, seed=5
    )
    options = ["--data", "synthetic", "--samples", "2000", "--row-limit", "300", "--batch-size", "64", "--dim", "8"]
    ours = train(tmp_path / "report.json", *options, "--epochs", "2", "--seed", "5", "--ranks", "2")["quality"]
    plain = plain_torch.train(config)
    assert plain.sample_count == ours["sample_count"]
    assert plain.normalised_entropy == pytest.approx(ours["normalised_entropy"], abs=2e-3)
    assert plain.auc == pytest.approx(ours["auc"], abs=5e-3)


def test_one_worker_of_a_parameter_server_is_plain_torch_and_several_are_stale() -> None:
    source = Source(data="synthetic", samples=1_000, row_limit=100)
    config = TrainingConfig(source=source, batch_size=32, embedding_dim=4, epochs=1, timeout_s=60)
    plain = plain_torch.train(config)
    alone = parameter_server.train(config, 1)
    assert (alone.quality, alone.staleness) == (plain, 0.0)
    several = parameter_server.train(config, 2)
    # Each update is counted once, whoever came between.
    assert 0 <= several.staleness <= config.source.samples / 32
    assert several.quality.sample_count == plain.sample_count
    assert math.isfinite(several.quality.log_loss)


MORTAL_MODEL = """
import torch.distributed as dist
from torch import nn

class Mortal(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.last = nn.Linear(inputs.tables[0].dim, 1)
        self.calls = 0

    def forward(self, dense, vectors):
        self.calls += 1
        if dist.get_rank() == 2 and self.calls == 3:
            raise ArithmeticError("this worker gives up")
        return self.last(sum(vectors.values())).squeeze(1)
"""


def test_a_worker_that_fails_ends_the_training_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mortal_model_of_a_test.py").write_text(MORTAL_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    source = Source(data="synthetic", samples=1_000, row_limit=100)
    config = TrainingConfig(source=source, model="mortal_model_of_a_test:Mortal", batch_size=32, timeout_s=60)
    with pytest.raises(RankFailure, match=r"(?s)rank 2: .*this worker gives up"):
        parameter_server.train(config, 2)


def test_a_run_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quality.WAYS, "exchange fp8", ("--exchange", "fp9"))
    with pytest.raises(SennitError, match=r"sennit train \(exchange fp8, seed 1\) failed: .*fp9"):
        quality._ours(quality.Settings(), "exchange fp8", 1)


def test_the_picture_shows_every_way(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = report(qualities={"fp32": [0.5, 0.6, 0.7], "exchange fp8": [0.52, 0.62, 0.72]})
    quality.plot(found, tmp_path / "quality.svg")
    assert "exchange fp8" in (tmp_path / "quality.svg").read_text()
