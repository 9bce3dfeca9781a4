# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call"
"""Checkpoints for other slices and other row shards: the model computes what it did, and trains on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.runtime.checkpoint.folder import latest
from sennit.runtime.checkpoint.manifest import Manifest
from sennit.runtime.checkpoint.reading import load
from sennit.runtime.checkpoint.writing import Saver
from sennit.runtime.kernels import Optimizer, OptimizerSpec, Precision
from sennit.runtime.sharded import ShardedEmbeddingBags, Table
from sennit.runtime.training import convert, resumption
from sennit.transport.errors import ConfigError
from tests.runtime.trainer_runs import begin_error, trainer
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(120)

FEW: dict[str, Any] = {"slices": 2, "row_shards": 2, "tensor_train": "24:2"}
NOTE: dict[str, Any] = {"note": {"text": "own", "many": [1, 2]}}
MORE: dict[str, Any] = {"slices": 4, "row_shards": 3, "tensor_train": "24:2"}


def run_of(rank: int, world: int, /, *, seed: int, folder: str, steps: int, **changed: Any) -> dict[str, Any]:
    """Begins or resumes a run. Returns what it predicts and has, then takes steps and saves."""
    run = trainer(seed, checkpoint=Path(folder), resume=True, **changed)
    told = resumption.begin(run)
    if not run.step:
        for _ in range(steps):
            run.train_step()
        resumption.save(run)
    quality = run.evaluate()
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {name: tensor.clone() for name, tensor in run.tables.state_dict().items()})
    state = {name: tensor for one in everyone for name, tensor in one.items()}
    losses = [run.train_step().loss for _ in range(steps)]
    return {"quality": quality, "told": told, "losses": losses, "step": run.step, "state": state}


def whole(state: dict[str, Tensor], table: str, name: str) -> Tensor:
    parts = sorted(key for key in state if key.startswith(f"{table}/") and key.endswith(f".{name}"))
    return torch.cat([state[key] for key in parts])


def test_a_run_goes_on_with_more_ranks_than_it_had_slices(kept_world: WorldFactory, seed: int, tmp_path: Path) -> None:
    before = kept_world(2).run(run_of, seed=seed, folder=str(tmp_path / "few"), steps=3, **FEW)[0]
    assert "allowed: at most 2" in refused(kept_world, seed, tmp_path / "few", 3, **FEW)
    done = CliRunner().invoke(
        app, ["convert", str(tmp_path / "few"), str(tmp_path / "more"), "--slices", "4", "--row-shards", "3"]
    )
    assert done.exit_code == 0, done.output
    assert "which goes on with other bits\n  slices: 2 before, 4 now\n" in done.output
    assert "  row shards of user: 2 before, 3 now\n" in done.output
    assert "hour" not in done.output  # A tensor train.
    for old in ({"slices": 4, "row_shards": 2}, {"slices": 2, "row_shards": 3}):
        told = refused(kept_world, seed, tmp_path / "more", 1, **{**FEW, **old})
        assert "is of another run" in told
        assert "make one with others: sennit convert" in told
    assert "sennit convert" not in refused(kept_world, seed, tmp_path / "more", 1, **MORE, batch_size=26)
    after = kept_world(3).run(run_of, seed=seed, folder=str(tmp_path / "more"), steps=3, **MORE)[0]
    one, other = before["quality"], after["quality"]
    assert (one.auc, one.sample_count) == (pytest.approx(other.auc, abs=1e-6), other.sample_count)
    assert one.log_loss == pytest.approx(other.log_loss, rel=1e-6)
    for table in ("user", "genre"):
        for name in ("weight", "sum"):
            assert torch.equal(whole(before["state"], table, name), whole(after["state"], table, name))
    assert after["state"]["user/2.0.weight"].shape == (7, 4)
    assert any("converted_from" in line for line in after["told"])
    assert after["step"] == 6
    # The same samples in the same order, and other bits.
    assert after["losses"] != before["losses"]
    assert all(map(math.isfinite, after["losses"]))
    found = Manifest.read(latest(tmp_path / "more") or tmp_path)
    assert found.run_id != Manifest.read(latest(tmp_path / "few") or tmp_path).run_id


def refused(kept_world: WorldFactory, seed: int, folder: Path, world: int, **changed: Any) -> str:
    try:
        return kept_world(world).run(begin_error, seed=seed, folder=str(folder), **changed)[0]
    except AssertionError as error:
        return str(error)


def saved(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    """A program's own checkpoint: a base, and an increment. Returns all rows."""
    adam = OptimizerSpec(kind=Optimizer.ADAM)
    module = ShardedEmbeddingBags(
        [
            Table(
                name="day.of", rows=30, dim=6, row_shards=4, column_shards=2, optimizer=adam, precision=Precision.BF16
            ),
            Table(name="item", rows=5, dim=4, row_shards=2),
        ],
        lr=0.1,
        placement="row_wise",
    )
    module.track_changes()
    with Saver(Path(folder), increments=1) as saver:
        for step in (1, 2):
            ids = torch.arange(8) + 8 * step
            sum(found.sum() for found in module({"day.of": ids % 30, "item": ids % 5}).values()).backward()
            about = Manifest(run_id="0123456789abcdef", step=step, fixed={}, free={}, code={})
            saver.save(about, lambda: {**module.state_dict(), **NOTE}, changes=lambda: {**module.changes(), **NOTE})
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {name: tensor.clone() for name, tensor in module.state_dict().items()})
    return {name: tensor for one in everyone for name, tensor in one.items()}


def test_a_checkpoint_of_a_program_gets_other_row_shards(kept_world: WorldFactory, tmp_path: Path) -> None:
    rows = kept_world(2).run(saved, folder=str(tmp_path / "old"))[0]
    found = convert(tmp_path / "old", tmp_path / "new", row_shards={"day.of": 7})
    assert found.changes == ("row shards of day.of: 4 before, 7 now",)
    note: dict[str, Any] = {"note": {"text": "", "many": []}}
    load(found.output, note, alone=True)
    assert note == NOTE
    for column in (0, 1):
        for name in ("weight", "moment1", "moment2"):
            parts = sorted(key for key in rows if key.startswith("day.of/") and key.endswith(f".{column}.{name}"))
            before = torch.cat([rows[key] for key in parts])
            state: dict[str, Any] = {
                f"day.of/{row}.{column}.{name}": torch.empty_like(before[: (row + 1) * 30 // 7 - row * 30 // 7])
                for row in range(7)
            }
            load(found.output, state, alone=True)
            assert torch.equal(torch.cat(list(state.values())), before)
    kept = {key: torch.empty_like(tensor) for key, tensor in rows.items() if key.startswith("item/")}
    load(found.output, kept, alone=True)
    assert all(torch.equal(kept[key], rows[key]) for key in kept)
    for wrong, match in (
        ({}, "nothing to convert; allowed: other slices, other row shards, or other ids"),
        ({"slices": 4}, "is not of sennit train, and names no slices; allowed: another V for its modules"),
        ({"slices": 6}, "6 slices; allowed: a power of two"),
        ({"row_shards": {"items": 4}}, r"table items; allowed: day\.of, item; did you mean item\?"),
        ({"row_shards": 0}, "row_shards 0; allowed: 1 to 4096"),
    ):
        with pytest.raises(ConfigError, match=match):
            convert(tmp_path / "old", tmp_path / "none", **wrong)
    assert not (tmp_path / "none").exists()
    no_shards: Any = {"item": "x"}
    with pytest.raises(ConfigError, match="nothing to convert"):
        convert(tmp_path / "old", tmp_path / "none", row_shards={})
    with pytest.raises(ConfigError, match="row shards 'x' of table item; allowed: a whole number"):
        convert(tmp_path / "old", tmp_path / "none", row_shards=no_shards)
    source = latest(tmp_path / "old")
    assert source is not None
    with pytest.raises(ConfigError, match="is in the checkpoint that is read; allowed: another folder"):
        convert(source, source / "new", row_shards=2)
    with pytest.raises(ConfigError, match="has checkpoints of a run"):
        convert(tmp_path / "old", tmp_path / "new", row_shards=2)
    with pytest.raises(ConfigError, match="no checkpoint, and no folder of checkpoints"):
        convert(tmp_path / "nowhere", tmp_path / "other", row_shards=2)
    done = CliRunner().invoke(app, ["convert", "a", "b", "--row-shards", "item=x"])
    assert done.exit_code == 2
