# SPDX-License-Identifier: Apache-2.0
"""Trainers that take turns of a few steps: what they are given, how long a turn takes, and what of it is exposed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from sennit.runtime.data.source import Source
from sennit.runtime.timeline import Timeline
from sennit.runtime.timeline.summary import summarise
from sennit.runtime.timeline.trace_file import read
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.trainer import Trainer


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


def turn_of(trainer: Trainer, steps: int) -> tuple[float, float]:
    """Seconds, and processor seconds of this rank. What the last step left under way is part of the turn."""
    dist.barrier()
    began_s, busy_s = time.perf_counter(), time.process_time()
    for _ in range(steps):
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
