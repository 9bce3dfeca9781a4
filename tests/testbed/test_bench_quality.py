# SPDX-License-Identifier: Apache-2.0
"""`sennit bench quality`: its intervals, its settings, and its peer in plain torch."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

from sennit.commands.cli import app
from sennit.offload.ingest.facts import TableFacts
from sennit.runtime.data.source import Source
from sennit.runtime.kernels.spec import Precision, Rounding
from sennit.runtime.stream.settings import StreamSettings
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.launch import RankFailure
from sennit.testbed.bench import quiet
from sennit.testbed.bench.training import (
    parameter_server,
    plain_torch,
    quality,
    quality_page,
    quality_plots,
    quality_ways,
)
from sennit.testbed.bench.training.padded_hstu import PaddedTorch
from sennit.testbed.bench.training.plain_torch import PlainTorch
from sennit.testbed.bench.training.quality_ways import ASYNCHRONOUS, DLRM, Trained, batch_way, server_way, steps_within
from sennit.transport.errors import SennitError
from tests.runtime.whole_run import train

pytestmark = pytest.mark.timeout(120)
DOCS = Path(__file__).parents[2] / "docs"


def report(*, qualities: dict[str, list[float]]) -> quality.Report:
    runs = {
        way: [{"normalised_entropy": one, "auc": 1 - one, "calibration": 0.5 + one} for one in found]
        for way, found in qualities.items()
    }
    return quality.Report(
        settings=quality.Settings(seeds=3), machine={"processor": "a processor", "cores": 3}, qualities=runs
    )


def test_a_difference_is_paired_by_seed_and_has_an_interval() -> None:
    # Seeds differ by 0.1, the ways by 0.02 with a standard deviation of 0.001.
    found = report(qualities={"fp32": [0.5, 0.6, 0.7], "exchange fp8": [0.52, 0.621, 0.719]})
    apart = found.difference("exchange fp8", "normalised_entropy")
    assert apart.mean == pytest.approx(0.02)
    assert apart.half == pytest.approx(4.303 * 0.001 / math.sqrt(3))
    assert found.difference("exchange fp8", "auc").mean == pytest.approx(-0.02)
    minus = found.as_json()["minus base"]["exchange fp8"]
    assert minus["auc"]["half"] == pytest.approx(apart.half)
    assert minus["calibration"]["mean"] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"only": ("fp7",)}, "way 'fp7'; allowed: fp32, plain torch"),
        ({"base": "batch 8,192"}, "base 'batch 8,192'; allowed: fp32, plain torch"),
        ({"warmup": 1.0, "batch_sizes": (512,)}, "a warm-up of 1 of the steps; allowed: 0 to below 1"),
        ({"rate_rules": ("cubic",)}, "rate rule 'cubic'; allowed: sqrt, linear, fixed"),
        ({"rate_rules": ()}, "no rate rule; allowed: sqrt"),
        ({"equal_time": True}, "the same time without batch sizes and 'parameter server'"),
        ({"equal_time": True, "batch_sizes": (512,), "only": ("fp32",)}, "the same time without batch sizes"),
        (
            {"history": 50},
            "a history of 50 without a way that reads it; allowed: with hstu in time order, hstu in padded",
        ),
        ({"seeds": 1}, "1 seeds; allowed: 2 to"),
        ({"seeds": 99}, "99 seeds; allowed"),
    ],
)
def test_settings_that_have_no_answer_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        quality.Settings(**settings)


@pytest.mark.parametrize(("rule", "factor"), [("sqrt", 2.0), ("linear", 4.0), ("fixed", 1.0)])
def test_rates_follow_the_batch_size_by_the_rule(rule: str, factor: float) -> None:
    default = TrainingConfig()
    job = quality_ways.Job(data="synthetic", seed=1, epochs=1, ranks=2, warmup=0.0)
    config = batch_way(4 * default.batch_size, rule).config(job)
    assert config.sparse_rate == pytest.approx(factor * default.sparse_rate)
    assert config.dense_rate == pytest.approx(factor * default.dense_rate)
    server = server_way(rule).config(job)
    assert server.sparse_rate == pytest.approx(default.sparse_rate / 8 ** quality_ways.RATE_RULES[rule])


def test_what_fits_into_a_time_is_rounded_down() -> None:
    """A run at this pace ends before the time is over, and one step more would not."""
    like = Trained(quality={}, steps=30, seconds=3.0)
    assert steps_within(2.0, like) == 20
    assert steps_within(1.99, like) == 19
    assert steps_within(0.01, like) == 1


def test_the_same_time_is_that_of_the_parameter_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way gets as many steps as fit, more or fewer than all epochs have, and is judged by its last evaluation."""
    asked: list[tuple[str, int | None]] = []
    paces = {ASYNCHRONOUS: (100, 3.1), "batch 512": (20, 1.0), "batch 256": (40, 6.2)}

    def trained(job: quality_ways.Job, way: quality_ways.Way, steps: int | None = None) -> Trained:
        asked.append((way.name, steps))
        took, seconds = paces.get(way.name, (steps, 3.0))
        qualities = {"normalised_entropy": 0.5 + job.seed, "auc": 0.5, "calibration": 1.0}
        return Trained(quality=qualities, steps=took, seconds=seconds)

    monkeypatch.setattr(quality, "train", trained)
    settings = quality.Settings(seeds=2, epochs=2, batch_sizes=(512, 256), only=(), base=ASYNCHRONOUS, equal_time=True)
    found = quality.run(settings)
    expected = [(ASYNCHRONOUS, None), ("batch 512", None), ("batch 256", None)]
    assert asked == 2 * [*expected, ("batch 512, same time", 62), ("batch 256, same time", 20)]
    assert found.seconds["batch 512"] == [1.0, 1.0]
    assert found.steps["batch 256, same time"] == [20, 20]
    assert found.time_ratio("batch 512") == pytest.approx(1.0 / 3.1)
    assert found.time_ratio(ASYNCHRONOUS) == 1.0
    assert quality.Report.from_json(json.loads(json.dumps(found.as_json()))) == found


class Trainer:
    """Takes the place of training. Dies before the run of this way and seed, if there is one."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.dies_at: tuple[str, int] | None = None

    def train(self, job: quality_ways.Job, way: quality_ways.Way, steps: int | None = None) -> Trained:
        if (way.name, job.seed) == self.dies_at:
            raise SennitError("the machine went down")
        self.done.append((way.name, job.seed))
        value = 0.5 + len(way.name) / 100 + 0.1 / job.seed
        found = {"normalised_entropy": value, "auc": 1 - value, "calibration": 1.0}
        return Trained(quality=found) if way.is_program else Trained(quality=found, steps=7, seconds=1 / job.seed)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    made = Trainer()
    monkeypatch.setattr(quality, "train", made.train)
    monkeypatch.setattr(quiet, "others", lambda: 0.0)
    monkeypatch.setattr(quiet.Use, "others_since", lambda self, before: 0.0)
    return made


def command(path: Path, *options: str, seeds: int = 3) -> Any:
    chosen = ["--only", "fp32", "--only", "plain torch", "--seeds", f"{seeds}", "--json", f"{path}"]
    return CliRunner().invoke(app, ["bench", "quality", *chosen, *options])


def figures(path: Path) -> Any:
    """What a run wrote, without what is of the moment."""
    found = json.loads(path.read_text())
    del found["machine"]
    return found


def test_a_run_that_was_ended_goes_on_where_it_was(trainer: Trainer, tmp_path: Path) -> None:
    assert command(tmp_path / "whole.json").exit_code == 0
    whole = figures(tmp_path / "whole.json")
    assert whole["partial"] is False
    runs, path = trainer.done, tmp_path / "found.json"
    for died in (4, 1):  # in the last seed, and in the first
        trainer.done, trainer.dies_at = [], runs[died]
        assert "error: the machine went down" in command(path).output
        found = figures(path)
        assert (found["partial"], found["busy"]) == (True, False)
        assert sum(map(len, found["qualities"].values())) == died
        # Two seeds give the first interval.
        assert set(found["minus base"]) == ({"plain torch"} if died == 4 else set())
        with pytest.raises(ValueError, match="a run that has not ended"):
            quality_page.read(merged(path))
        told = command(path)
        assert told.exit_code == 2
        assert "has a run that has not ended; give --resume to go on with it" in " ".join(told.output.split())
        trainer.dies_at = None
        assert command(path, "--resume").exit_code == 0
        assert trainer.done == runs
        assert figures(path) == whole
        path.unlink()


def merged(path: Path) -> Path:
    target = path.with_name("merged.json")
    target.write_text(quality_page.merged([path]))
    return target


def test_a_run_takes_more_seeds_to_those_that_it_has(trainer: Trainer, tmp_path: Path) -> None:
    assert command(tmp_path / "four.json", seeds=4).exit_code == 0
    assert command(tmp_path / "found.json", "--resume").exit_code == 0
    trainer.done = []
    assert command(tmp_path / "found.json", "--resume", seeds=4).exit_code == 0
    assert trainer.done == [("fp32", 4), ("plain torch", 4)]
    assert figures(tmp_path / "found.json") == figures(tmp_path / "four.json")
    # All of it is there.
    trainer.dies_at = ("fp32", 1)
    assert command(tmp_path / "found.json", "--resume", seeds=4).exit_code == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"settings": {"epochs": 4}}, "has a run with epochs 4, not 1; allowed: the same, or more seeds"),
        ({"settings": {"seeds": 5}}, "has a run with seeds 5, not 3; allowed: the same, or more seeds"),
        ({"machine": {"cores": 77}}, "was measured with cores 77; allowed: "),
        ({"machine": {"versions": {"torch": "1.0"}}}, "was measured with versions {'torch': '1.0'}; allowed: "),
        ({"settings": {"colour": "red"}}, "has no run of bench quality (TypeError: "),
        ({"busy": True, "others": [0.0, 1.3]}, "measured while others used 1.3 processors"),
    ],
)
def test_only_an_equal_run_is_gone_on_with(change: dict[str, Any], told: str, trainer: Trainer, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert command(path).exit_code == 0
    found = json.loads(path.read_text())
    for name, value in change.items():
        found[name] = found[name] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(found))
    trainer.dies_at = ("fp32", 1)
    done = command(path, "--resume")
    assert done.exit_code == 2
    assert told in " ".join(done.output.split())


def test_what_was_trained_is_kept_when_others_become_busy(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, used = tmp_path / "found.json", iter([0.0, *6 * [0.1], 1.3])
    monkeypatch.setattr(quiet, "others", lambda: next(used))
    done = command(path)
    assert done.exit_code == 1
    assert "The file stays partial. Wait until" in " ".join(done.output.split())
    assert (figures(path)["partial"], figures(path)["others"]) == (True, [0.0, 0.0, 0.1])
    trainer.dies_at = ("fp32", 1)
    monkeypatch.setattr(quiet, "others", lambda: 1.3)
    assert command(path, "--resume", "--force").exit_code == 0
    assert (figures(path)["partial"], figures(path)["busy"]) == (False, True)


def test_a_run_without_a_file_cannot_go_on(trainer: Trainer, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "quality", "--resume"])
    assert (done.exit_code, trainer.done) == (2, [])
    assert "--resume without --json" in done.output


def test_histories_are_as_long_as_they_shall_be() -> None:
    settings = quality.Settings(data="movielens", only=tuple(quality_ways.HISTORY_WAYS), base=DLRM, history=50)
    assert settings.title == "movielens, histories of 50, 1 epoch, seeds 1 to 5"
    job = quality_ways.Job(data="movielens", seed=1, epochs=1, ranks=2, warmup=0.0, history=50)
    assert [way.config(job).history for way in settings.ways] == [50, 50, 50]


def test_a_run_of_so_many_steps_ends_there() -> None:
    """In whole epochs and a part of one. So does the parameter server, with as many samples."""
    job = quality_ways.Job(data="synthetic", seed=1, epochs=1, ranks=1, warmup=0.25)
    way = batch_way(8_192, is_same_time=True)
    # An epoch has 29,491 of the 32,768 samples.
    steps = 29_491 // 8_192 + 3
    config = way.config(job, steps)
    assert (config.max_steps, config.epochs, config.warmup) == (steps, 2, round(steps / 4))
    source = Source(data="synthetic", samples=1_000, row_limit=100)
    small = replace(config, source=source, batch_size=256, max_steps=4, warmup=1, sparse_rate=0.01, dense_rate=0.001)
    trained = quality_ways._ours(small, 1)
    assert trained.steps == 4
    assert trained.seconds is not None
    assert trained.seconds > 0
    assert trained.quality["calibration"] > 0


def test_ways_change_what_they_are_named_after() -> None:
    job = quality_ways.Job(data="synthetic", seed=3, epochs=2, ranks=2, warmup=0.25)
    plain = TrainingConfig(source=Source(data="synthetic"), seed=3, epochs=2)
    made = {name: way.config(job) for name, way in quality_ways.WAYS.items()}
    assert made["fp32"] == made["plain torch"] == plain
    assert made["exchange fp8"] == replace(plain, exchange="fp8")
    assert made["exchange and gradient int8"] == replace(plain, exchange="int8", gradient="int8")
    for name, precision in (("tables fp16", Precision.FP16), ("tables bf16", Precision.BF16)):
        (table,) = made[name].tables_of([TableFacts(name="one", rows=9, mean_length=1.0)])
        assert (table.precision, table.rounding) == (precision, Rounding.STOCHASTIC)


def test_the_warmup_is_a_share_of_the_steps() -> None:
    job = quality_ways.Job(data="synthetic", seed=1, epochs=2, ranks=2, warmup=0.25)
    config = batch_way(512).config(job)
    assert config.warmup == round(2 * (29_491 // 512) / 4)
    assert quality_ways.WAYS["fp32"].config(job).warmup == 0


def test_plain_torch_trains_the_same_model(tmp_path: Path) -> None:
    """The same quality as the trainer's, up to rounding of sums in another order."""
    config = TrainingConfig(
        source=Source(data="synthetic", samples=2_000, row_limit=300), batch_size=64, embedding_dim=8, epochs=2, seed=5
    )
    options = ["--data", "synthetic", "--samples", "2000", "--row-limit", "300", "--batch-size", "64", "--dim", "8"]
    ours = train(tmp_path / "report.json", *options, "--epochs", "2", "--seed", "5", "--ranks", "2")["quality"]
    plain = plain_torch.train(PlainTorch(config))
    assert plain.sample_count == ours["sample_count"]
    assert plain.normalised_entropy == pytest.approx(ours["normalised_entropy"], abs=2e-3)
    assert plain.auc == pytest.approx(ours["auc"], abs=5e-3)


def test_padded_torch_trains_the_same_hstu(tmp_path: Path) -> None:
    pytest.importorskip("recbole")
    options = ["--data", "movielens", "--model", "hstu", "--order", "time", "--history", "9", "--batch-size", "64"]
    options += ["--steps", "30", "--eval-fraction", "0.005"]
    ours = train(tmp_path / "report.json", *options, "--ranks", "2")["quality"]
    config = TrainingConfig(
        source=Source(data="movielens"),
        stream=StreamSettings(order="time"),
        model="hstu",
        history=9,
        batch_size=64,
        max_steps=30,
        eval_fraction=0.005,
    )
    padded = plain_torch.train(PaddedTorch(config))
    assert padded.sample_count == ours["sample_count"] == 500
    assert padded.normalised_entropy == pytest.approx(ours["normalised_entropy"], abs=1e-3)
    assert padded.auc == pytest.approx(ours["auc"], abs=5e-3)


def test_one_worker_of_a_parameter_server_is_plain_torch_and_several_are_stale() -> None:
    source = Source(data="synthetic", samples=1_000, row_limit=100)
    config = TrainingConfig(source=source, batch_size=32, embedding_dim=4, epochs=1, timeout_s=60)
    plain = plain_torch.train(PlainTorch(config))
    alone = parameter_server.train(config, 1)
    assert (alone.quality, alone.staleness) == (plain, 0.0)
    several = parameter_server.train(config, 2)
    assert several.steps == alone.steps == config.epochs * (1_000 - 100) // 32
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


def test_a_run_that_fails_is_named() -> None:
    job = quality_ways.Job(data="synthetic", seed=1, epochs=1, ranks=1, warmup=0.0)
    with pytest.raises(SennitError, match=r"exchange fp9, seed 1: exchange 'fp9'; allowed: "):
        quality_ways.train(job, quality_ways.Way(name="exchange fp9", changes={"exchange": "fp9"}))
    changes = {"dense_rate": 999.0, "sparse_rate": 999.0, "dense_optimizer": "sgd"}
    with pytest.raises(SennitError, match=r"(?s)hasty, seed 1: rank 0: .*loss is "):
        quality_ways.train(job, quality_ways.Way(name="hasty", changes=changes))


def whole() -> quality.Report:
    """A report of all ways, of three seeds."""
    settings = quality.Settings(seeds=3, batch_sizes=(256, 8_192), equal_time=True)
    found = report(qualities={way.name: [0.5, 0.61, 0.7] for way in settings.ways})
    timed = [name for name in found.qualities if name != quality_ways.PLAIN]
    return replace(
        found,
        settings=settings,
        seconds={name: [2.0, 3.0, 1.0] for name in timed},
        steps={name: [1_000, 1_001, 1_000] for name in timed},
    )


def test_the_pictures_show_every_way(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = report(qualities={"fp32": [0.5, 0.6, 0.7], "exchange fp8": [0.52, 0.62, 0.72]})
    quality_plots.differences(found, tmp_path / "quality.svg")
    assert "exchange fp8" in (tmp_path / "quality.svg").read_text()
    for name in ("first.svg", "second.svg"):
        quality_plots.batches([whole()], tmp_path / name)
    drawn = (tmp_path / "first.svg").read_text()
    assert "8,192" in drawn
    assert "equal time" in drawn
    assert (tmp_path / "second.svg").read_text() == drawn


@pytest.mark.skipif(
    not (DOCS / quality_page.FIGURES).exists(), reason="needs the quality.json that make quality writes"
)
def test_the_page_has_the_tables_of_its_figures() -> None:
    for text in quality_page.tables(quality_page.read(DOCS / quality_page.FIGURES)).values():
        assert text in (DOCS / quality_page.PAGE).read_text(), "make quality"


def test_each_way_has_its_line_in_one_table(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(whole().as_json()))
    (tmp_path / "all.json").write_text(quality_page.merged([tmp_path / "one.json"]))
    made = quality_page.tables(quality_page.read(tmp_path / "all.json"))
    assert (
        "\n\nflights, 1 epoch, seeds 1 to 3 (a processor, 3 cores, load not recorded):\n\n| way | NE | NE - fp32 |"
        in made["ways"]
    )
    assert made["ways"].count("\n| ") == 2 + 8
    assert made["parameter server"].count("\n| ") == 2 + 1 + 4
    assert "(quality-flights.svg)" in made["ways"]
    assert "| batch 8,192 | 1,000 to 1,001 | 0.60333 | +0.00000 ± 0.00000 | 0.39667 |" in made["batch sizes"]
    assert "| batch 8,192, same time | 1,000 to 1,001 | 1.00 | 0.60333 |" in made["parameter server"]
    marks = "\n".join(f"<!-- {part}: begin -->\nold\n<!-- {part}: end -->" for part in made)
    page = quality_page.spliced(marks, made)
    assert "old" not in page
    assert quality_page.spliced(page, made) == page
    with pytest.raises(ValueError, match="a page without"):
        quality_page.spliced("nothing", made)
