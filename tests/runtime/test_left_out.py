# SPDX-License-Identifier: Apache-2.0
"""`--skip-samples`: a sample whose loss is not finite is left out, named and counted, with one result in any world."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from sennit.runtime.data.source import Source
from sennit.runtime.stream.settings import StreamSettings
from sennit.runtime.training.command import main
from sennit.runtime.training.display import ConsoleDisplay
from sennit.runtime.training.left_out import NAMED_MAX, LeftOut
from sennit.runtime.training.streamed import sources_of
from sennit.runtime.training.trainer import StepReport, Trainer, TrainingError
from sennit.transport.errors import ConfigError
from tests.runtime.short_sources import short_source
from tests.runtime.trainer_runs import config_of, samples
from tests.runtime.whole_run import train
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(120)

BAD = 5
"""The row of a table that is made NaN."""

HISTORIES: dict[str, Any] = {
    "model": "hstu", "epochs": 1, "eval_fraction": 0.1, "max_steps": 6, "dense_optimizer": "adam", "dense_rate": 0.01,
    "source": Source(data="synthetic-yambda?rows=600&users=20&items=40&last=6"),
    "stream": StreamSettings(order="time"),
}  # fmt: skip


def spoil(run: Trainer, table: str) -> None:
    """Makes a row NaN on the rank that has it."""
    for name, tensor in run.tables.state_dict().items():
        if name.startswith(f"{table}/") and name.endswith(".weight"):
            tensor[BAD] = math.nan


def whole(run: Trainer, left_out: Any = None) -> Any:
    """The weights of all ranks but for the bad rows, as bytes by name."""
    own = {name: tensor.detach().clone() for name, tensor in run.weights().items()}
    for name, tensor in own.items():
        if name.startswith(("tables.user/", "tables.item_id/")):
            tensor[BAD] = 0
        assert tensor.isfinite().all(), name
    return {name: tensor.numpy().tobytes() for name, tensor in own.items()}, left_out


def of_rows(rank: int, world: int, /, *, seed: int, spoilt: bool, **changed: Any) -> Any:
    """Trains with a bad row of users, or with weight 0 of the samples of that user."""
    config, made = config_of(seed, skip_samples=100, **changed), samples(seed)
    weights = torch.ones(len(made))
    if not spoilt:
        weights[made.columns[0].values == BAD] = 0
    source = short_source(replace(made, sample_weights=weights), config)
    with Trainer(config, source) as run:
        source.begin(0)
        if spoilt:
            spoil(run, "user")
        steps = [run.train_step() for _ in range(6)]
        assert sum(len(step.left_out) for step in steps) == run.left_out.count
        return whole(run, run.left_out)


def of_histories(rank: int, world: int, /, *, seed: int, **changed: Any) -> Any:
    config = config_of(seed, **HISTORIES | {"skip_samples": 200} | changed)
    with Trainer(config, sources_of(config)()) as run:
        spoil(run, "item_id")
        for _ in range(6):
            run.train_step()
        return whole(run, run.left_out)


def merged(found: list[Any]) -> dict[str, bytes]:
    """The weights of all ranks. What two have is equal."""
    weights: dict[str, bytes] = {}
    for own, _ in found:
        for name, content in own.items():
            assert weights.setdefault(name, content) == content, name
    return weights


@pytest.mark.parametrize("changed", [{}, {"overlap": "tables"}], ids=["plain", "overlap"])
def test_it_is_as_with_weight_0_in_any_world(kept_world: WorldFactory, seed: int, changed: dict[str, Any]) -> None:
    ((wanted, none),) = kept_world(1).run(of_rows, seed=seed, spoilt=False, **changed)
    assert none.count == 0
    runs = [kept_world(world).run(of_rows, seed=seed, spoilt=True, **changed) for world in (1, 2, 3)]
    for found in runs:
        assert merged(found) == wanted
        assert all(left_out == runs[0][0][1] for _, left_out in found)
    left_out = runs[0][0][1]
    assert left_out.count > 0
    made = samples(seed)
    for one in left_out.named:
        assert one.tables == {"user": [BAD]}
        assert int(made.columns[0].values[one.row]) == BAD
        assert set(one.ids) == {"genre", "hour"}
        assert f"row {one.row:,} of the stream: loss not finite; not finite: table user, row {BAD}" in one.text()


def test_one_item_of_a_history(kept_world: WorldFactory, seed: int) -> None:
    """All samples that read it are left out, now and later, and the rest is learnt from."""
    runs = [kept_world(world).run(of_histories, seed=seed) for world in (1, 2)]
    assert merged(runs[0]) == merged(runs[1])
    left_out = runs[0][0][1]
    assert all(other == left_out for found in runs for _, other in found)
    assert 0 < left_out.count < 6 * 24
    assert all(one.tables == {"item_id": [BAD]} and len(one.ids["uid"]) == 1 for one in left_out.named)


def limited(rank: int, world: int, /, *, seed: int) -> list[str]:
    """The error of each rank, and the step that was not taken."""
    config = config_of(seed, **HISTORIES | {"skip_samples": 1, "gauc": "uid"})
    with Trainer(config, sources_of(config)()) as run:
        spoil(run, "item_id")
        try:
            for _ in range(6):
                run.train_step()
        except TrainingError as error:
            return [str(error), str(run.step)]
        return []


def test_one_more_ends_the_run_on_all_ranks(kept_world: WorldFactory, seed: int) -> None:
    found = [errors for world in (1, 2) for errors in kept_world(world).run(limited, seed=seed)]
    assert all(errors == found[0] for errors in found)
    text, _ = found[0]
    assert "samples have a loss that is not finite; allowed: 1 (--skip-samples). step" in text
    assert f"table item_id, row {BAD}" in text
    assert ", of group " in text


FRAGILE = """
from sennit.runtime.model import DCNv2


class Fragile(DCNv2):
    '''Divides by zero for a few samples.'''

    def forward(self, dense, vectors):
        return super().forward(dense, vectors) / (dense[:, 0] < 2.5)
"""


def test_a_run_tells_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fragile.py").write_text(FRAGILE)
    monkeypatch.chdir(tmp_path)
    options = ["--data", "synthetic-stream?days=1&rows-per-day=2000&dense=3", "--model", "fragile:Fragile"]
    options += ["--steps", "4", "--batch-size", "256", "--dim", "4", "--order", "time"]
    alone, two = (
        train(tmp_path / f"{ranks}.json", *options, "--ranks", str(ranks), "--skip-samples", "50") for ranks in (1, 2)
    )
    told = alone["left_out"]
    assert 0 < told["samples"] <= 50
    assert told == two["left_out"]
    assert alone["quality"] == two["quality"]
    assert alone["weights_sha256"] == two["weights_sha256"]
    assert all(not one["tables"] and one["row"] >= 0 for one in told["named"])
    with pytest.raises(SystemExit) as ended:
        main([*options, "--ranks", "1", "--sharding", "table_wise"])
    assert ended.value.code
    assert "loss is " in capfd.readouterr().err


def test_the_first_are_printed() -> None:
    shown = io.StringIO()
    display = ConsoleDisplay(Console(file=shown, width=200), batch_size=8)
    for step in (1, 2):
        left_out = tuple(
            LeftOut(step=step, sample=number, row=7, group=3, tables={"item": [1, 5]}, ids={"user": [2], "genre": []})
            for number in range(NAMED_MAX - 1)
        )
        common: dict[str, Any] = {"step_count": 9, "epoch": 0, "samples": 8, "loss_sum": torch.tensor(1.0)}
        display.on_step(StepReport(step=step, left_out=left_out, **common))
    lines = shown.getvalue().splitlines()
    assert len(lines) == NAMED_MAX
    assert lines[0] == (
        "step 1 left out row 7 of the stream, of group 3: loss not finite; not finite: table item, rows 1, 5 "
        "(user: row 2; genre: no row)"
    )
    assert lines[-1].startswith("step 2")


def test_it_needs_losses_that_a_step_waits_for() -> None:
    with pytest.raises(ConfigError, match="--skip-samples with --device cuda"):
        config_of(1, skip_samples=1, device="cuda")
