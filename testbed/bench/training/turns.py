# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of training share: ranks in a group, trainers that take turns of a few steps, figures of turns."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from sennit.runtime.backend.process_group import register
from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.data.source import Source
from sennit.runtime.timeline import Timeline
from sennit.runtime.timeline.summary import summarise
from sennit.runtime.timeline.trace_file import read
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.trainer import Trainer
from sennit.testbed.bench.results import quantile
from sennit.testbed.topology.namespace import enter

# The bootstrap draws this many samples for the interval of a median.
RESAMPLES: Final = 2_000

Hosts = Sequence[tuple[str, Mapping[str, str]]]
"""The namespace of each host, and the environment of its ranks (`confinement.hosts_of`); empty: this machine."""


@contextlib.contextmanager
def joined(
    rank: int, world: int, store: Store, *, timeout_s: float, hosts: Hosts = (), backend: str = "sennit"
) -> Iterator[None]:
    """Inside, this process is rank `rank` of the default group, computes on one thread, and is on its host."""
    torch.set_num_threads(1)
    if hosts:
        namespace, environment = hosts[rank * len(hosts) // world]
        enter(namespace)
        os.environ.update(environment)
    register()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    yield
    # After a failure the group is left until the process ends: destroying it may wait for peers that are gone.
    dist.destroy_process_group()


def slowest(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """The seconds of each turn on its slowest rank, by name; from the seconds of each rank."""
    return {name: [max(turns) for turns in zip(*(rank[name] for rank in by_rank), strict=True)] for name in by_rank[0]}


def median_and_interval(ratios: Sequence[float]) -> list[float]:
    """The median, and the 2.5 and 97.5 percentiles of medians of samples of these (bootstrap)."""
    chance = random.Random(1)
    medians = [statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)]
    return [statistics.median(ratios), quantile(medians, 0.025), quantile(medians, 0.975)]


@dataclass(frozen=True, kw_only=True)
class TurnSettings:
    """What the trainers of a benchmark have in common."""

    data: str = "flights"
    samples: int = 20_000
    """Samples of synthetic data."""

    dim: int = 16
    steps: int = 4
    """Steps of a turn."""

    rounds: int = 20
    """How often everything is measured in turn."""

    def endless(self, **more: Any) -> TrainingConfig:
        """A run with so many steps and epochs that no evaluation comes between turns. `more`: its other settings."""
        return TrainingConfig(
            source=Source(data=self.data, samples=self.samples),
            embedding_dim=self.dim,
            max_steps=100_000,
            epochs=100_000,
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """Milliseconds of a step, mean of the ranks, by a timeline of its own."""

    step_ms: float
    alltoall_ms: float
    """What a step waited for AlltoAll, itself or through another thread."""

    others_ms: float
    """The same of other collectives."""


def turn_of(trainer: Trainer, steps: int, timeline: Timeline | None = None) -> tuple[float, float]:
    """Seconds, and processor seconds of this rank. Work that the last step left under way is part of the turn.

    `timeline`: records the steps.
    """
    dist.barrier()
    began_s, busy_s = time.perf_counter(), time.process_time()
    for _ in range(steps):
        with contextlib.nullcontext() if timeline is None else timeline.step(trainer.step):
            trainer.train_step()
    trainer.tables.finish()
    return time.perf_counter() - began_s, time.process_time() - busy_s


def exposed_of(trainer: Trainer, timeline: Timeline, *, steps: int, world: int) -> Exposed | None:
    """Takes so many steps more, with a timeline; None on the ranks that do not write it."""
    with timeline:
        for _ in range(steps):
            with timeline.step(trainer.step):
                trainer.train_step()
    if not timeline.is_written:
        return None
    summary = summarise(read(timeline.path))
    shares = {what: 0.0 for what in ("alltoall", "others")}
    for (_, what), share in summary.shares.items():
        if what.startswith("collective "):
            kind = "alltoall" if "alltoall" in what else "others"
            shares[kind] += share.exposed_ns / 1e6 / len(summary.steps) / world
    return Exposed(step_ms=summary.step_ns / 1e6, alltoall_ms=shares["alltoall"], others_ms=shares["others"])
