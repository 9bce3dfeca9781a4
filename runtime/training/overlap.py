# SPDX-License-Identifier: Apache-2.0
"""Which parts of a trainer's step overlap: the choice, and the time that it hid. It changes no bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from sennit.runtime.backend.process_group import communicator_or_names
from sennit.runtime.planner.cluster import Cluster
from sennit.runtime.planner.constants import cores_here
from sennit.runtime.training.config import TrainingConfig

# Phases of the threads beside the step, and of the step's waits for them.
BESIDE: Final = ("input", "input exchange", "lookup", "sparse update", "AllReduce")
WAITS: Final = ("wait for input", "wait for lookup", "wait for sparse update", "wait for AllReduce")


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """What runs beside the model."""

    batches: int
    """Batches that are taken, and whose ids travel, while one is computed."""

    has_tables: bool
    """Whether vectors and gradients travel, and rows are looked up and updated, under the model."""

    def __str__(self) -> str:
        if not self.batches:
            return "overlap: none, the step does everything in turn (--batches-ahead 0)"
        count = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        text = f"overlap: input and ids of {count} ahead"
        return f"{text}; vectors and all gradients under the model" if self.has_tables else text


def overlap_of(config: TrainingConfig) -> Overlap:
    """What overlaps in a run of the default group: the same on all its ranks. Collective."""
    return _overlap(config, config.overlap == "auto" and _is_worth_it())


def overlap_on(config: TrainingConfig, cluster: Cluster) -> Overlap:
    """What overlaps in a run of ranks that are not there, as far as one can know."""
    is_far = cluster.hosts > 1 or cluster.has_no_shared_memory
    return _overlap(config, cluster.ranks > 1 and (is_far or not _is_crowded(cluster.cores, cluster.local_ranks)))


def _overlap(config: TrainingConfig, is_worth_it: bool) -> Overlap:
    has_tables = is_worth_it if config.overlap == "auto" else config.overlap == "tables"
    return Overlap(
        batches=config.batches_ahead,
        has_tables=has_tables and config.batches_ahead > 0 and config.device == "cpu",
    )


def _is_worth_it() -> bool:
    """Whether tables are to have a thread of their own: if a rank can only reach another one over a network, or if all
    ranks have a core to spare. Else there is little to hide, and the thread takes time from the model.
    """
    world_size = dist.get_world_size()
    if world_size == 1:
        return False
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    is_far = local_ranks < world_size
    group = communicator_or_names(None)
    if not isinstance(group, list):
        is_far, local_ranks = not set(group.routes) <= {"self", "shm"}, group.ranks_here
    told = torch.tensor([is_far, _is_crowded(cores_here(), local_ranks)], dtype=torch.int32)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    far, crowded = told.tolist()
    return bool(far) or not crowded


def _is_crowded(cores: int, local_ranks: int) -> bool:
    return cores < 2 * local_ranks


def outcome(beside_s: Mapping[str, float], phases_s: Mapping[str, float], steps: int) -> str | None:
    """The time of the threads beside the step, and how much of it the step waited, for people.

    None if nothing ran beside it.
    """
    total = sum(beside_s.get(name, 0.0) for name in BESIDE)
    if not total or not steps:
        return None
    waited = min(total, sum(phases_s.get(name, 0.0) for name in WAITS))
    return (
        f"{total / steps * 1e3:.1f} ms a step of input, exchanges and tables beside the model, "
        f"{waited / steps * 1e3:.1f} ms of it waited for: {1 - waited / total:.0%} hidden"
    )
