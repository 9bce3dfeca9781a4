# SPDX-License-Identifier: Apache-2.0
"""`sennit bench balance`: steps on histories of different lengths, with their samples dealt to slices by cost
(`--balance`) and without.

Where ranks share cores, time cannot show it: the work is the same, and only its place is not. So each rank counts the
processor time of the thread that takes its steps. Between two meetings of all ranks a stretch is as long as on the rank
that takes most, and the stretches add up to the step of ranks that have a core each. Exchanges and waits are not in
it. What other threads take, such as the one that reads ahead, stands beside.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.calibrate import machine
from sennit.runtime.data.batch_source import BatchSource
from sennit.runtime.data.source import Source
from sennit.runtime.sharded.phases import PhaseClock
from sennit.runtime.stream.balance import Ints, costs_of
from sennit.runtime.stream.settings import StreamSettings
from sennit.runtime.training import launch
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.streamed import sources_of
from sennit.runtime.training.trainer import Trainer
from sennit.testbed.bench.training.turns import joined
from sennit.transport.errors import ConfigError

OFF, ON = 0, 1
STRETCHES: Final = (
    ("lookup",),
    ("dense forward", "attention", "dense backward"),
    ("sparse update",),
    ("dense update",),
)
"""Phases of a step that end where all ranks meet: they exchange vectors, their gradients, and those of the dense model.
"""

WARM_STEPS: Final = 2
FIT_ROWS: Final = 1_000
TIMEOUT_S: Final = 3_600.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run."""

    data: str = "synthetic-yambda?rows=200000&users=1000&items=2000&last=1000"
    """Data with histories. Steps begin in the middle of the stream, where users have some."""

    world: int = 4
    batches: tuple[int, ...] = (8, 32, 128)
    """Samples of a rank in a step."""

    dim: int = 64
    steps: int = 10
    """Measured steps of each, with and without balance, in turns."""

    def config(self, batch: int, which: int) -> TrainingConfig:
        """Raises `ConfigError` for numbers that a run cannot have."""
        return TrainingConfig(
            source=Source(data=self.data),
            stream=StreamSettings(order="time", balance=which == ON, fit_rows=FIT_ROWS),
            model="hstu",
            embedding_dim=self.dim,
            batch_size=batch * self.world,
            slices=max(8, self.world),
            overlap="ids",
            timeout_s=TIMEOUT_S,
        )


class Step(NamedTuple):
    """One step of one rank."""

    wall_s: float
    stretches_s: tuple[float, ...]
    """Processor time by `STRETCHES`."""

    beside_s: float
    """Processor time of all other threads."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Batches of one size: steps without (`OFF`) and with balance (`ON`)."""

    steps: Sequence[Sequence[Sequence[Step]]]
    """[which][step][rank]"""

    costs: Sequence[Sequence[Sequence[int]]]
    """What a rank's samples cost by the rule: [which][step][rank]."""

    mean_length: float
    """Events of a sample."""

    def hosts_s(self, which: int) -> float:
        """Mean step of ranks that have a core each."""
        return statistics.fmean(
            sum(max(times) for times in zip(*(one.stretches_s for one in ranks), strict=True))
            for ranks in self.steps[which]
        )

    def even_s(self, which: int) -> float:
        """The same, if every stretch took all ranks the mean of them. No way to deal samples is better."""
        return statistics.fmean(statistics.fmean(sum(one.stretches_s) for one in ranks) for ranks in self.steps[which])

    @property
    def ratio(self) -> float:
        """A step with balance / one without, of ranks that have a core each."""
        return self.hosts_s(ON) / self.hosts_s(OFF)

    @property
    def least_ratio(self) -> float:
        """What `ratio` would be if no rank waited for another one."""
        return self.even_s(OFF) / self.hosts_s(OFF)

    def wall_s(self, which: int) -> float:
        """Mean step of the slowest rank, as it was here."""
        return statistics.fmean(max(one.wall_s for one in ranks) for ranks in self.steps[which])

    def beside_s(self, which: int) -> float:
        """Processor time of a rank's other threads, mean of all ranks and steps."""
        return statistics.fmean(one.beside_s for ranks in self.steps[which] for one in ranks)

    def dearest(self, which: int) -> float:
        """What the dearest rank costs by the rule / the mean of all ranks; mean of all steps."""
        return statistics.fmean(max(ranks) * len(ranks) / sum(ranks) for ranks in self.costs[which])

    def as_json(self) -> dict[str, Any]:
        return {
            "mean_length": self.mean_length,
            "dearest": [self.dearest(which) for which in (OFF, ON)],
            "step_ms": [self.hosts_s(which) * 1e3 for which in (OFF, ON)],
            "ratio": self.ratio,
            "least_ratio": self.least_ratio,
            "wall_ms": [self.wall_s(which) * 1e3 for which in (OFF, ON)],
            "wall_ratio": self.wall_s(ON) / self.wall_s(OFF),
            "beside_ms": [self.beside_s(which) * 1e3 for which in (OFF, ON)],
            "steps": self.steps,
            "costs": self.costs,
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured, by samples of a rank."""

    settings: Settings
    machine: dict[str, object]
    batches: dict[int, Measured]

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "batches": {str(batch): measured.as_json() for batch, measured in self.batches.items()},
        }


def run(settings: Settings) -> Report:
    """Raises `launch.RankFailure` if a rank fails."""
    batches = {}
    for batch in settings.batches:
        ranks = launch.run_ranks(_train, (settings, batch), settings.world, timeout_s=TIMEOUT_S)
        steps, costs, lengths = zip(*ranks, strict=True)
        batches[batch] = Measured(
            steps=[list(zip(*(found[which] for found in steps), strict=True)) for which in (OFF, ON)],
            costs=[list(zip(*(found[which] for found in costs), strict=True)) for which in (OFF, ON)],
            mean_length=statistics.fmean(lengths),
        )
    return Report(settings=settings, machine=machine.describe(), batches=batches)


def _train(
    given: tuple[Settings, int], rank: int, world: int, store: Store
) -> tuple[list[list[Step]], list[list[int]], float]:
    """(steps, costs) by whether there is balance, and the mean length of samples."""
    settings, batch = given
    with joined(rank, world, store, timeout_s=TIMEOUT_S), contextlib.ExitStack() as stack:
        makers, trainers = [], []
        for which in (OFF, ON):
            config = settings.config(batch, which)
            makers.append(sources_of(config))
            source = stack.enter_context(contextlib.closing(makers[which]()))
            trainers.append(stack.enter_context(Trainer(config, source, clock=PhaseClock(time.thread_time))))
            trainers[which].step = middle(trainers[which].step_count, settings)
            source.begin(trainers[which].next_batch)
        chance = random.Random(1)
        steps: list[list[Step]] = [[], []]
        for _ in range(WARM_STEPS + settings.steps):
            for which in chance.sample((OFF, ON), 2):
                steps[which].append(_step(trainers[which]))
        costs: list[list[int]] = [[], []]
        lengths: list[float] = []
        for which, trainer in enumerate(trainers):
            with contextlib.closing(makers[which]()) as source:
                for step in range(trainer.step - settings.steps, trainer.step):
                    found = _lengths(source, step)
                    costs[which].append(int(costs_of(found).sum()))
                    lengths.append(float(found.mean()))
        dist.barrier()
    return [found[WARM_STEPS:] for found in steps], costs, statistics.fmean(lengths)


def middle(step_count: int, settings: Settings) -> int:
    """The step to begin with. Raises `ConfigError` if data have too few."""
    wanted = 2 * (WARM_STEPS + settings.steps)
    if step_count < wanted:
        raise ConfigError(f"{settings.data}: {step_count} steps; allowed: {wanted} or more, half of which are taken")
    return step_count // 2


def _lengths(source: BatchSource, step: int) -> Ints:
    """Int64 [n]: the events of this rank's samples in a step."""
    assert source.history is not None
    number = [table.name for table in source.tables].index(source.history.columns[0])
    lengths: Ints = source.take(source.order.training_batch(step)).lengths[number].numpy().astype("int64")
    return lengths


def _step(trainer: Trainer) -> Step:
    dist.barrier()
    before = dict(trainer.clock.seconds)
    began_s, all_s, own_s = time.perf_counter(), time.process_time(), time.thread_time()
    trainer.train_step()
    trainer.tables.finish()
    wall_s, own_s = time.perf_counter() - began_s, time.thread_time() - own_s
    beside_s = time.process_time() - all_s - own_s
    found = trainer.clock.seconds
    stretches_s = (sum(found.get(name, 0.0) - before.get(name, 0.0) for name in names) for names in STRETCHES)
    return Step(wall_s, tuple(stretches_s), beside_s)


def render(report: Report, console: Console) -> None:
    settings = report.settings
    lines = Table(
        title=f"{settings.data}, dim {settings.dim}, {settings.world} ranks, {settings.steps} steps with balance and "
        "without"
    )
    for heading in (
        "samples a rank", "events a sample", "dearest rank / mean", "ms of a core", "ratio", "at least", "wall ratio",
        "ms beside",
    ):  # fmt: skip
        lines.add_column(heading, justify="right")
    for batch, found in report.batches.items():
        lines.add_row(
            str(batch),
            f"{found.mean_length:.0f}",
            f"{found.dearest(OFF):.3f} -> {found.dearest(ON):.3f}",
            f"{found.hosts_s(OFF) * 1e3:.1f} -> {found.hosts_s(ON) * 1e3:.1f}",
            f"{found.ratio:.2f}",
            f"{found.least_ratio:.2f}",
            f"{found.wall_s(ON) / found.wall_s(OFF):.2f}",
            f"{found.beside_s(OFF) * 1e3:.1f} -> {found.beside_s(ON) * 1e3:.1f}",
        )
    console.print(lines)
