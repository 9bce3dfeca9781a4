# SPDX-License-Identifier: Apache-2.0
"""The trainer's step with tables larger than memory, beside the same trainer with tables in memory.

A DLRM of Criteo's shape with the MLPs of Naumov et al. 2019. Both trainers run in this process and take turns, step by
step, with equal batches. The loss of each step and all final weights must be equal bit for bit. One thread computes;
the cache's thread fetches rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from sennit.runtime.backend.process_group import BACKEND_NAME, register
from sennit.runtime.backend.torch_versions import HashStore
from sennit.runtime.checkpoint.digest import digest
from sennit.runtime.data.samples import Column, Samples
from sennit.runtime.data.seeds import numpy_stream, torch_stream
from sennit.runtime.sharded.files import TableStore
from sennit.runtime.stream.settings import short_stream
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.streamed import stream_source
from sennit.runtime.training.trainer import Trainer
from sennit.testbed.bench.tables.embedding_tiers import Load

DENSE_COUNT: Final = 13
BOTTOM: Final = (512, 256)
TOP: Final = (512, 256)
TURN_STEPS: Final = 5
"""Steps of a trainer before the other one's turn."""

WARM_STEPS: Final = 60
"""Steps of both before the timing starts: until the cache knows the frequent rows."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Seconds of each step, and mean counters of the cache and the file per step."""

    memory_s: list[float]
    """One value per turn."""

    stored_s: list[float]
    phases_s: dict[str, dict[str, float]]
    """Mean seconds per step, by trainer and then by phase."""

    counts: dict[str, float]

    @property
    def ratio(self) -> float:
        """Samples/s with tiers, divided by those in memory: the median over turns."""
        return statistics.median(m / s for m, s in zip(self.memory_s, self.stored_s, strict=True))


def run(folder: Path, load: Load, *, steps: int, seed: int, warm_steps: int = WARM_STEPS) -> Result:
    """Creates the file in `folder` and removes it. Raises AssertionError if results differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _group():
            return _run(folder, load, steps, warm_steps, seed)
    finally:
        torch.set_num_threads(threads)


def _run(folder: Path, load: Load, steps: int, warm_steps: int, seed: int) -> Result:
    turns, warm_turns = -(-steps // TURN_STEPS), -(-warm_steps // TURN_STEPS)
    steps = turns * TURN_STEPS
    samples = _samples(load, (steps + warm_turns * TURN_STEPS + 1) * load.bags, seed)
    home = TableStore(folder=folder, memory_bytes=load.memory_bytes)
    with (
        closing(_trainer(samples, load, None, seed)) as memory,
        closing(_trainer(samples, load, home, seed)) as stored,
    ):
        times: dict[Trainer, list[float]] = {memory: [], stored: []}
        before: dict[str, int] = {}
        for turn in range(-warm_turns, turns):
            if turn == 0:
                before = stored.tables.cache_counters()
                for trainer in times:
                    trainer.clock.seconds.clear()
            losses = []
            for trainer, seconds in times.items():
                start = time.perf_counter()
                losses.append([trainer.train_step().loss for _ in range(TURN_STEPS)])
                # No rows may be fetched while the other trainer has its turn.
                trainer.tables.wait_for_rows()
                if turn >= 0:
                    seconds.append((time.perf_counter() - start) / TURN_STEPS)
            if losses[0] != losses[1]:
                raise AssertionError(f"turn {turn}: losses {losses[1]} over a file, {losses[0]} in memory")
        after = stored.tables.cache_counters()
        if digest(memory.weights()) != digest(stored.weights()):
            raise AssertionError("the weights over a file differ from those in memory")
        phases = {
            name: {phase: seconds / steps for phase, seconds in trainer.clock.seconds.items()}
            for name, trainer in (("memory", memory), ("stored", stored))
        }
    return Result(
        memory_s=times[memory],
        stored_s=times[stored],
        phases_s=phases,
        counts={name: (after[name] - before[name]) / steps for name in after},
    )


def _trainer(samples: Samples, load: Load, home: TableStore | None, seed: int) -> Trainer:
    config = TrainingConfig(
        seed=seed,
        epochs=1,
        batch_size=load.bags,
        embedding_dim=load.dim,
        bottom=BOTTOM,
        top=TOP,
        eval_fraction=0.5 * load.bags / len(samples),
        table_store=home,
    )
    found = short_stream(samples, config.stream, config.order_settings)
    source = stream_source(config, found, found.fit(), rank=0, world_size=1)
    trainer = Trainer(config, source)
    source.begin(0)
    return trainer


def _samples(load: Load, count: int, seed: int) -> Samples:
    generator = torch_stream(seed, "bench tiers")
    columns = []
    for table in load.specs:
        order = torch.randperm(load.row_count, generator=generator)
        columns.append(Column.single(table.name, load.row_count, load.draw(order, count, generator).numpy()))
    stream = numpy_stream(seed, "bench tiers", "dense")
    return Samples(
        name="Criteo's shape",
        dense=torch.from_numpy(stream.standard_normal((count, DENSE_COUNT), dtype="float32")),
        labels=torch.from_numpy((stream.random(count) < 0.25).astype("float32")),
        columns=tuple(columns),
    )


@contextmanager
def _group() -> Iterator[None]:
    """A process group of this process alone."""
    register()
    dist.init_process_group(BACKEND_NAME, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
