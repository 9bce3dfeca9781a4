# SPDX-License-Identifier: Apache-2.0
"""torch alone feeds raw samples to an exported model, and predicts what the trainer predicts.

The way to do so is in docs/reference/checkpoints.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import torch
import torch.distributed as dist
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.runtime.data import sources
from sennit.runtime.data.seeds import numpy_stream
from sennit.runtime.data.source import Source
from sennit.runtime.kernels.int8 import float_rows, int8_rows
from sennit.runtime.training import resumption, streamed
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.trainer import Trainer
from tests.extent import briefly
from tests.runtime.world import WorldFactory

arrow = importlib.import_module("pyarrow")
parquet = importlib.import_module("pyarrow.parquet")
SCHEMA = """
label = "clicked"
[dense.price]
clamp = [0, 100]
log1p = true
[dense.age]
[sparse.city]
encode = "dictionary"
[sparse.tags]
encode = "dictionary"
first = 3
[sparse.user]
rows = 50
[sparse.seen]
encode = "hash"
rows = 30
salt = 7
first = 2
"""


def clicks(seed: int, count: int) -> dict[str, list[Any]]:
    """Returns columns with nulls, lists and rare values."""
    stream = numpy_stream(seed, "clicks")

    def or_null(values: list[Any]) -> list[Any]:
        return [None if is_null else value for value, is_null in zip(values, stream.random(count) < 0.1, strict=True)]

    user = stream.integers(0, 50, count)
    return {
        "clicked": (stream.random(count) < 0.2 + 0.6 * (user % 2)).astype(int).tolist(),
        "price": or_null(stream.integers(0, 200, count).tolist()),
        "age": or_null(stream.integers(1, 99, count).tolist()),
        "city": or_null([f"city {number}" for number in stream.geometric(0.2, count)]),
        "tags": or_null([stream.integers(0, 9, length).tolist() for length in stream.integers(0, 6, count)]),
        "user": or_null(user.tolist()),
        "seen": or_null([stream.integers(-(2**62), 2**62, length).tolist() for length in stream.integers(0, 4, count)]),
    }


def write(folder: Path, columns: dict[str, list[Any]], name: str) -> Source:
    """Writes a file for this rank alone, because a rank could read another rank's file while it is written."""
    folder.mkdir(exist_ok=True)
    parquet.write_table(arrow.table(columns), folder / name)
    (folder / "schema.toml").write_text(SCHEMA)
    return Source(data=str(folder / name), schema=folder / "schema.toml")


def train_and_predict(rank: int, world: int, *, seed: int, folder: str) -> list[float]:
    """Trains, saves, and predicts fresh samples, some with values that no training row has.

    The predictions use the tables in 8 bits, as in the exported file.
    """
    path = Path(folder)
    source = write(path / str(rank), clicks(seed, 500), "clicks.parquet")
    config = TrainingConfig(
        source=source, seed=seed, epochs=1, batch_size=50, embedding_dim=8, bottom=(16,), top=(32, 16),
        checkpoint=path / "saved",
    )  # fmt: skip
    found = streamed.opened(config)
    preprocessing = streamed.preprocessing_of(config, found)
    batches = streamed.stream_source(config, found, preprocessing, rank=rank, world_size=world)
    run = Trainer(config, batches)
    resumption.begin(run)
    batches.begin(0)
    for _ in range(run.step_count):
        run.train_step()
    resumption.save(run)
    for held in run.tables.held():
        held.weight.copy_(float_rows(int8_rows(held.weight, name=held.name)))
    fresh = clicks(seed + 1, 40)
    fresh["city"][0] = "nowhere"
    raw = sources.load(write(path / str(rank), fresh, "fresh.parquet"), seed=seed)
    samples = preprocessing.apply(raw).samples()
    batch = samples.batch(torch.arange(40))
    with torch.no_grad():
        # Every rank predicts all of them: there are no slices.
        vectors = run.tables(batch)
        logits = run.model(batch.dense, vectors)
    dist.barrier()
    return [float(logit) for logit in logits]


@pytest.mark.parametrize("size", briefly([1, 2], [2]))
def test_plain_torch_predicts_what_the_trainer_does(
    kept_world: WorldFactory, seed: int, tmp_path: Path, size: int
) -> None:
    """Runs in a process that cannot import sennit."""
    predicted = kept_world(size).run(train_and_predict, seed=seed, folder=str(tmp_path))
    model = tmp_path / "model.pt"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "saved"), str(model)])
    assert done.exit_code == 0, done.output
    fresh = clicks(seed + 1, 40)
    fresh["city"][0] = "nowhere"
    del fresh["clicked"]
    # A null list counts as an empty list.
    fresh["tags"] = [ids or [] for ids in fresh["tags"]]
    answer = subprocess.run(
        [sys.executable, "-S", "-c", _PRELUDE + Path(__file__).with_name("plain_serving.py").read_text(), str(model)],
        input=json.dumps({"samples": fresh, "path": sys.path}),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert len(found) == 40
    for logits in predicted:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(logits), rtol=1e-4, atol=1e-5)
    assert len({round(logit, 6) for logit in found}) > 30


# Only torch and its dependencies. Without the site module sennit's import hook is not installed.
_PRELUDE = """
import json, sys
asked = json.load(sys.stdin)
sys.path += [path for path in asked["path"] if "-packages" in path]
"""
