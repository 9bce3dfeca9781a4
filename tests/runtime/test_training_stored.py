# SPDX-License-Identifier: Apache-2.0
"""Training with tables in a file: the bits of training in memory, checkpoints between the two, and errors.

Of the 6,000 rows some hundreds are in memory.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sennit.runtime.checkpoint import folder as checkpoint
from sennit.runtime.checkpoint import reading, writing
from sennit.runtime.checkpoint.digest import digest
from sennit.runtime.data.samples import Column, Samples
from sennit.runtime.data.seeds import numpy_stream
from sennit.runtime.sharded.files import TableStore
from sennit.runtime.training import resumption
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.trainer import Trainer
from tests.extent import briefly
from tests.runtime.short_sources import short_source
from tests.runtime.world import WorldFactory

SMALL: dict[str, Any] = {"batch_size": 24, "embedding_dim": 4, "bottom": (8,), "top": (8,), "epochs": 3}
ROWS = (5_000, 6, 994)


def samples(seed: int, count: int = 400) -> Samples:
    """Returns samples for three tables, one with bags of 0 to 3 ids. Low ids are frequent."""
    stream = numpy_stream(seed, "stored_cases")
    lengths = stream.integers(0, 4, count)
    counts = (count, int(lengths.sum()), count)
    ids = [(rows * stream.random(number) ** 2).astype(np.int64) for rows, number in zip(ROWS, counts, strict=True)]
    dense = stream.standard_normal((count, 3))
    return Samples(
        name="small",
        dense=torch.from_numpy(dense.astype(np.float32)),
        labels=torch.from_numpy((dense[:, 0] + stream.standard_normal(count) > 0).astype(np.float32)),
        columns=(
            Column.single("user", ROWS[0], ids[0]),
            Column.bags("genre", ROWS[1], ids[1], lengths),
            Column.single("item", ROWS[2], ids[2]),
        ),
    )


def trainer(seed: int, folder: str | None, memory_bytes: int) -> Trainer:
    home = None if folder is None else TableStore(folder=Path(folder), memory_bytes=memory_bytes)
    config = TrainingConfig(seed=seed, table_store=home, **SMALL)
    source = short_source(samples(seed), config)
    made = Trainer(config, source)
    source.begin(0)
    return made


def train(rank: int, world: int, *, seed: int, steps: int, folder: str | None = None, memory_bytes: int = 0) -> Any:
    """Trains with an evaluation after each epoch. Returns losses, AUC, weights, optimizer states, cache counters."""
    run = trainer(seed, folder, memory_bytes)
    losses, qualities = [], []
    for _ in range(steps):
        losses.append(run.train_step().loss)
        if run.step % run.steps_per_epoch == 0:
            qualities.append(run.evaluate().auc)
    tensors = {name: value for name, value in run.state().items() if isinstance(value, torch.Tensor)}
    found = {
        "losses": losses,
        "auc": qualities,
        "sha256": digest(run.weights()),
        "state": digest(tensors),
        "rows": run.tables.cache_counters(),
    }
    run.close()
    return found


def save_and_go_on(rank: int, world: int, *, seed: int, checkpoints: str, folder: str | None, memory_bytes: int) -> Any:
    """Returns digests at a checkpoint in the middle of an epoch, and some steps later."""
    run = trainer(seed, folder, memory_bytes)
    for _ in range(7):
        run.train_step()
    writing.save(Path(checkpoints), resumption.manifest_of(run), run.state())
    return _go_on(run)


def resume_and_go_on(
    rank: int, world: int, *, seed: int, checkpoints: str, folder: str | None, memory_bytes: int
) -> Any:
    """Returns the same fingerprints, resumed from the checkpoint. A step before loading must leave nothing behind."""
    run = trainer(seed, folder, memory_bytes)
    run.train_step()
    found = checkpoint.latest(Path(checkpoints))
    assert found is not None
    state = run.state()
    reading.load(found, state)
    run.restore(state)
    return _go_on(run)


def _go_on(run: Trainer) -> list[str]:
    at_checkpoint = digest(run.weights())
    for _ in range(9):
        run.train_step()
    later = digest(run.weights())
    run.close()
    return [at_checkpoint, later]


MEMORY_BYTES = 40 << 10


@pytest.mark.parametrize("size", briefly([1, 2], [2]))
def test_weights_are_those_of_tables_in_memory(kept_world: WorldFactory, seed: int, tmp_path: Path, size: int) -> None:
    """Runs three epochs with an evaluation after each. Of two ranks, one has the largest table, the other the rest."""
    memory_bytes = MEMORY_BYTES if size == 1 else 25 << 10
    world = kept_world(size)
    memory = world.run(train, seed=seed, steps=40)
    stored = world.run(train, seed=seed, steps=40, folder=str(tmp_path), memory_bytes=memory_bytes)
    for name in ("losses", "auc", "sha256", "state"):
        assert [answer[name] for answer in stored] == [answer[name] for answer in memory]
    assert sum(answer["rows"]["evictions"] for answer in stored) > 100
    assert all(answer["rows"]["hits"] and answer["rows"]["misses"] for answer in stored)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("writer_is_stored", "reader_is_stored"),
    briefly(product((True, False), repeat=2), [(True, False), (False, True)]),
)
def test_checkpoints_are_the_same_from_a_file_and_from_memory(
    kept_world: WorldFactory, seed: int, tmp_path: Path, writer_is_stored: bool, reader_is_stored: bool
) -> None:
    world = kept_world(1)
    arguments: dict[str, Any] = {"seed": seed, "checkpoints": str(tmp_path / "saved"), "memory_bytes": MEMORY_BYTES}
    folder = tmp_path / "rows"
    folder.mkdir()
    place = {True: str(folder), False: None}
    written = world.run(save_and_go_on, folder=place[writer_is_stored], **arguments)
    read = world.run(resume_and_go_on, folder=place[reader_is_stored], **arguments)
    assert read == written
    assert not list(folder.iterdir())
