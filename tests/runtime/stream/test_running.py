# SPDX-License-Identifier: Apache-2.0
"""Running means and deviations: the formulas of others, the same in any world, after any stop, and when files come."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sennit.runtime.checkpoint.folder import named
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.preprocessing import Preprocessing, Scale
from sennit.runtime.data.schema import DenseField, parse_schema
from sennit.runtime.data.seeds import numpy_stream
from sennit.runtime.stream import StreamLoader
from sennit.runtime.stream.running import RunningScales
from tests.extent import briefly
from tests.runtime.elastic_runs import died_and_rejoined
from tests.runtime.stream.stream_files import RUNNING, SCHEMA, table, write
from tests.runtime.stream.test_following import TINY_OPTIONS, follow, options, prepare
from tests.runtime.stream.test_stream_training import ORDERS, TINY, outcome
from tests.runtime.whole_run import failure, train
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(240)

IN_ORDER = {name: options for name, options in ORDERS.items() if "shuffled" not in options}
PRICE = DenseField(name="price", running=50)


def begun(mean: float, deviation: float, *, field: DenseField = PRICE) -> RunningScales:
    return RunningScales((Scale(field=field, mean=mean, deviation=deviation),))


def test_blocks_of_one_number_are_the_exponential_means_of_river(seed: int) -> None:
    """EWMean and EWVar of River: m += a (x - m) for x and for its square, and the variance is E[x^2] - E[x]^2 (Finch:
    Incremental calculation of weighted mean and variance, 2009). `running` 50 is a = 1 / 51.
    """
    scales, mean, square = begun(3.0, 2.0), 3.0, 2.0**2 + 3.0**2
    for step, value in enumerate(numpy_stream(seed, "running").normal(10, 4, 400).astype(np.float32)):
        scales.follow(step, step + 1, np.array([[value]]))
        mean += (float(value) - mean) / 51
        square += (float(value) ** 2 - square) / 51
        (found,) = scales.after(step + 1)
        assert found.mean == pytest.approx(mean, rel=1e-12)
        assert found.deviation == pytest.approx(math.sqrt(square - mean**2), rel=1e-9)


def test_means_are_those_of_batch_norm(seed: int) -> None:
    """Its momentum is the share of a block: N / (running + N)."""
    norm = nn.BatchNorm1d(1, momentum=25 / 75, dtype=torch.float64)
    scales = begun(0.0, 1.0)
    for step, block in enumerate(numpy_stream(seed, "norm").normal(10, 4, (9, 25, 1)).astype(np.float32)):
        scales.follow(step, step + 1, block)
        norm(torch.from_numpy(block).double())
    assert norm.running_mean is not None
    assert scales.after(9)[0].mean == pytest.approx(float(norm.running_mean), rel=1e-12)


def test_nulls_other_columns_and_blocks_that_were_known_change_nothing() -> None:
    fixed = DenseField(name="age")
    scales = RunningScales(tuple(Scale(field=field, mean=1.0, deviation=2.0) for field in (fixed, PRICE)))
    scales.follow(0, 3, np.array([[np.nan], [np.nan]], np.float32))
    before = scales.after(3)
    assert [(one.mean, one.deviation) for one in before] == [(1.0, 2.0)] * 2
    scales.follow(3, 6, np.array([[np.nan], [7.0]], np.float32))
    after = scales.after(6)
    assert after[0] == before[0]
    assert after[1].mean == pytest.approx(1 + 6 / 51)
    scales.follow(3, 6, np.array([[100.0]], np.float32))
    assert (scales.after(6), scales.after(5)) == (after, before)


def test_a_column_that_is_off_keeps_its_deviation() -> None:
    """Else it came to 0, and the next number that is another one would be infinitely far away."""
    scales = begun(1.0, 2.0)
    for step in range(500):
        scales.follow(step, step + 1, np.full((50, 1), 0.1, np.float32))
    (found,) = scales.after(500)
    assert found.mean == pytest.approx(0.1)
    assert found.deviation == 2.0


def expected(rows: Any, begin: Preprocessing, steps: int) -> list[list[float]]:
    """The means and deviations after so many steps, from all rows at once: blocks of 120."""
    scales = {scale.field.name: [scale.mean, scale.deviation] for scale in begin.scales}
    columns = {
        "price": np.clip(rows["price"].to_numpy(), -2, 2).astype(np.float32).astype(np.float64),
        "age": np.log1p(rows["age"].to_numpy().astype(np.float64)),
    }
    for block in range(steps // 3):
        for (name, values), weight in zip(columns.items(), (2000, 3000), strict=True):
            new = values[block * 120 : (block + 1) * 120]
            new = new[~np.isnan(new)]
            mean, deviation = scales[name]
            share, apart = len(new) / (weight + len(new)), new.mean() - mean
            variance = (1 - share) * deviation**2 + share * new.var() + share * (1 - share) * apart**2
            scales[name] = [mean + share * apart, math.sqrt(variance)]
    return list(scales.values())


@pytest.mark.parametrize("order", briefly(IN_ORDER, ["files"]))
def test_any_world_and_any_stop_give_the_same_bits(order: str, seed: int, tmp_path: Path) -> None:
    rows = table(seed)
    data = [*write(tmp_path / "data", rows, schema=RUNNING), *TINY, *IN_ORDER[order], "--seed", str(seed)]
    alone = train(tmp_path / "1.json", *data, "--ranks", "1", "--checkpoint", str(tmp_path / "first"), "--steps", "20",
        "--checkpoint-every", "1", "--keep", "20",
    )  # fmt: skip
    kept = [Preprocessing.read(path) for path in sorted((tmp_path / "first").glob("step-*"))]
    assert len(kept) == 20
    for step, found in enumerate(kept, 1):
        assert found is not None
        assert kept[0] is not None
        wanted = expected(rows, kept[0], step)
        assert [one.mean for one in found.scales] == pytest.approx([mean for mean, _ in wanted], rel=1e-6)
        assert [one.deviation for one in found.scales] == pytest.approx(
            [deviation for _, deviation in wanted], rel=1e-6
        )
    options = [*data, "--steps", "20"]
    assert outcome(train(tmp_path / "3.json", *options, "--ranks", "3", "--batches-ahead", "3")) == outcome(alone)
    # In the middle of a block.
    kept_here = [*data, "--checkpoint", str(tmp_path / "kept")]
    train(tmp_path / "stopped.json", *kept_here, "--ranks", "2", "--steps", "10")
    on = train(tmp_path / "on.json", *kept_here, "--ranks", "1", "--resume", "--steps", "20")
    assert outcome(on) == outcome(alone)
    fixed = train(tmp_path / "fixed.json", *write(tmp_path / "data", rows), *options[4:], "--ranks", "1")
    assert outcome(fixed) != outcome(alone)


@pytest.mark.slow
def test_a_death_and_a_newcomer_change_no_bit(seed: int, tmp_path: Path) -> None:
    data = [*write(tmp_path / "data", table(seed), schema=RUNNING), *TINY, *ORDERS["rolling"], "--seed", str(seed)]
    alone = train(tmp_path / "alone.json", *data)
    report = died_and_rejoined(tmp_path, data, death_step=7, halt_step=10)
    assert outcome(report) == outcome(alone)
    assert [(change["lost"], change["joined"]) for change in report["changes"]] == [([1], []), ([], [1])]


@pytest.mark.parametrize("order", briefly(["time", "rolling"], ["time"]))
def test_files_may_come_at_any_time(order: str, kept_world: WorldFactory, seed: int, tmp_path: Path) -> None:
    prepare(tmp_path, seed)
    for folder in ("whole", "held"):
        (tmp_path / folder / "schema.toml").write_text(RUNNING)
    data = ["--data", str(tmp_path / "whole"), "--schema", str(tmp_path / "whole" / "schema.toml")]
    alone = train(tmp_path / "1.json", *data, *TINY_OPTIONS, *options(order, tmp_path / "held"), "--seed", str(seed))
    given: dict[str, Any] = {"folder": tmp_path, "order": order, "seed": seed}
    kept_world(2).run(follow, **given, timing=seed, stopped_after=alone["steps"]["last"] // 2)
    for found in kept_world(1).run(follow, **given, timing=seed + 1, resume=True):
        assert found == outcome(alone)


def scaled(rank: int, world: int, /, *, folder: str, state: dict[str, Any] | None = None, steps: int = 99) -> Any:
    """The bits of this rank's dense features by step, those of the evaluation, and the state."""
    with StreamLoader(folder, schema=Path(folder) / "schema.toml", order="files", batch_size=40, seed=3) as found:
        if state is not None:
            found.load_state_dict(state)
        taken = []
        for batch in found:
            taken.append(batch.dense.numpy().tobytes())
            if len(taken) == steps:
                break
        held = [batch.dense.numpy().tobytes() for batch in found.evaluation()]
        return taken, held, found.state_dict()


def test_a_loader_goes_on_in_another_world(kept_world: WorldFactory, seed: int, tmp_path: Path) -> None:
    rows = table(seed)
    write(tmp_path / "data", rows, schema=RUNNING)
    folder = str(tmp_path / "data")
    ((alone, held, state),) = kept_world(1).run(scaled, folder=folder)
    assert len(alone) == 27
    for steps in (3, 7):
        found = kept_world(3).run(scaled, folder=folder, steps=steps)
        for step in range(steps):
            assert b"".join(one[0][step] for one in found) == alone[step]
        told = json.loads(json.dumps(found[0][2]))
        ((on, held_on, state_on),) = kept_world(1).run(scaled, folder=folder, state=told)
        assert (on, held_on, state_on) == (alone[steps:], held, state)
    first = np.frombuffer(alone[3], np.float32).reshape(40, 2)
    with StreamLoader(folder, schema=tmp_path / "data" / "schema.toml", order="files", batch_size=40, seed=3) as loader:
        (_, (mean, deviation)) = expected(rows, loader.preprocessing, 3)
        ages = np.log1p(rows["age"].to_numpy()[120:160].astype(np.float64))
        np.testing.assert_allclose(first[:, 1], (ages - mean) / deviation, rtol=1e-4, atol=1e-5)
        broken = {**state, "scales": state["scales"][:1]}
        with pytest.raises(DataError, match="not the means and deviations of these 2 columns"):
            loader.load_state_dict(broken)


@pytest.mark.slow
def test_a_warm_start_may_begin_to_follow_and_end_it(seed: int, tmp_path: Path) -> None:
    rows = table(seed)
    options = [*TINY, "--order", "files", "--ranks", "1", "--steps", "4", "--seed", str(seed)]

    def trained(name: str, schema: str, *more: str) -> Preprocessing:
        data = write(tmp_path / f"data-{name}", rows, schema=schema)
        train(tmp_path / f"{name}.json", *data, *options, *more, "--checkpoint", str(tmp_path / name))
        found = Preprocessing.read(named(tmp_path / name))
        assert found is not None
        return found

    def numbers(known: Preprocessing) -> list[list[float]]:
        return [[one.mean, one.deviation] for one in known.scales]

    fixed = trained("fixed", SCHEMA)
    followed = trained("followed", RUNNING, "--warm-start", str(tmp_path / "fixed"))
    assert np.array(numbers(followed)) == pytest.approx(np.array(expected(rows, fixed, 4)), rel=1e-6)
    assert numbers(followed) != numbers(fixed)
    stays = trained("stays", SCHEMA, "--warm-start", str(tmp_path / "followed"))
    assert numbers(stays) == numbers(followed)
    assert not any(one.field.running for one in stays.scales)


def test_what_cannot_be_followed_is_refused(seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = [*write(tmp_path / "data", table(seed), schema=RUNNING), *TINY]
    assert "column price has running = 2000, with --order shuffled; allowed: --order time or files" in failure(
        capfd, *data
    )
    kept = ["--order", "files", "--checkpoint", str(tmp_path / "kept"), "--ranks", "1", "--steps"]
    train(tmp_path / "run.json", *data, *kept, "4")
    (tmp_path / "data" / "schema.toml").write_text(RUNNING.replace("2_000", "2_001"))
    assert "order.running.price: 2000 in the checkpoint, 2001 here" in failure(capfd, *data, *kept, "8", "--resume")
    for running, words in ((0, "dense.price.running is 0; allowed: an integer from 1"), (1.5, "running is 1.5")):
        with pytest.raises(DataError, match=words):
            parse_schema({"label": "y", "dense": {"price": {"running": running}}, "sparse": {"user": {"rows": 3}}})
