# SPDX-License-Identifier: Apache-2.0
"""Moves shards of a running model when the use of its rows has changed (`--rebalance`). No bit changes.

All ranks look at the same steps, when no batch is on its way. The sketches of all ranks are added up. Each rank finds
the use of some tables, and rank 0 plans.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from rich.filesize import decimal

from sennit.command_line import stdout_console
from sennit.offload.sketch import Sketch, SketchShape
from sennit.runtime.backend.first_rank import on_first
from sennit.runtime.data.batch_source import BatchSource
from sennit.runtime.planner.move_or_stay import Proposal, propose
from sennit.runtime.planner.problem import Problem
from sennit.runtime.planner.step_time import Rating
from sennit.runtime.planner.usage import Use, sketched
from sennit.runtime.sharded.module import ShardedTables
from sennit.runtime.sharded.placement import EVERYWHERE, placed
from sennit.transport.errors import ConfigError

SAMPLED_ROWS: Final = 1 << 15
"""Samples whose ids are counted between two looks, at least, if there are as many."""
SHARDS_SHOWN: Final = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Shards that moved, for the report."""

    step: int
    """Steps done."""
    shards: dict[str, tuple[int, int]]
    """By shard, its rank before and after; -1 is every rank."""
    size_bytes: int
    """Bytes that all ranks received."""
    seconds: float
    """Seconds of the move and of the look before it."""
    predicted_before_s: float
    """Predicted seconds of a step, with the use of rows as it was in the steps before the move."""
    predicted_after_s: float
    because: str

    def __str__(self) -> str:
        shown = [f"{name} from {_who(old)} to {_who(new)}" for name, (old, new) in self.shards.items()]
        more = f" and {len(shown) - SHARDS_SHOWN} more" if len(shown) > SHARDS_SHOWN else ""
        return (
            f"after step {self.step}, {len(shown)} {'shard' if len(shown) == 1 else 'shards'} "
            f"({decimal(self.size_bytes)}) in {self.seconds:.2f} s: {', '.join(shown[:SHARDS_SHOWN])}{more}. "
            f"{self.predicted_before_s * 1e3:.1f} ms a step predicted, {self.predicted_after_s * 1e3:.1f} afterwards: "
            f"{self.because}"
        )


@dataclass(kw_only=True, slots=True)
class Moved:
    """How often a run looked whether shards should move, and which moved."""

    looks: int = 0
    moves: list[Move] = field(default_factory=list)


def _who(rank: int) -> str:
    return "every rank" if rank == EVERYWHERE else f"rank {rank}"


def shape_of(every: int, batch_size: int) -> SketchShape:
    """What data in memory are counted with: enough samples between two looks, and no more work than that."""
    one_in = 1
    while one_in < 64 and 2 * one_in * SAMPLED_ROWS <= every * batch_size:
        one_in *= 2
    return SketchShape(one_row_in=one_in)


class Rebalancer:
    """Looks every `every` steps. Every method is collective."""

    def __init__(self, every: int, problem: Problem | None, source: BatchSource, step_count: int) -> None:
        """`problem`: what was planned, on rank 0. Raises `ConfigError` if the run ends before the first look."""
        if every >= step_count:
            raise ConfigError(f"--rebalance {every} in a run of {step_count} steps; allowed: fewer steps than the run")
        self.every = every
        self.moved = Moved()
        self._problem, self._source, self._step_count = problem, source, step_count
        self._earlier: Sketch | None = None

    def next_look(self, step: int) -> int:
        """The first look after so many steps. No batch may be on its way then."""
        return (step // self.every + 1) * self.every

    def look(self, tables: ShardedTables, step: int) -> Move | None:
        """Moves shards if that pays. The answer is the same on all ranks."""
        begin_s = time.perf_counter()
        uses = self._uses(tables)
        self.moved.looks += 1
        found = on_first(lambda: self._proposed(uses, tables, step))
        if found is None:
            return None
        shards, proposal = found
        tables.move(placed(tables.tables, dist.get_world_size(), shards))
        move = Move(
            step=step,
            shards=proposal["shards"],
            size_bytes=proposal["size_bytes"],
            seconds=time.perf_counter() - begin_s,
            predicted_before_s=proposal["before_s"],
            predicted_after_s=proposal["after_s"],
            because=proposal["because"],
        )
        self.moved.moves.append(move)
        if dist.get_rank() == 0:
            stdout_console().print(f"moved {move}", soft_wrap=True)
        return move

    def _proposed(
        self, uses: list[Use], tables: ShardedTables, step: int
    ) -> tuple[dict[str, int], dict[str, Any]] | None:
        """The new rank of each shard, and what there is to say; None: all stays. On rank 0."""
        if self._problem is None:
            return None
        earlier, problem = self._problem.uses, dataclasses.replace(self._problem, uses=tuple(uses))
        rating = Rating(problem)
        steps = min(self.every, self._step_count - step)
        proposal: Proposal | None = propose(rating, tables.placement, earlier, steps=steps)
        if proposal is None:
            return None
        self._problem = problem
        plain = {name: getattr(proposal, name) for name in ("shards", "size_bytes", "before_s", "after_s", "because")}
        return proposal.found.shards(rating), plain

    def _uses(self, tables: ShardedTables) -> list[Use]:
        """The use of all tables since the last look, on all ranks."""
        found = self._source.sketch()
        world, rank = dist.get_world_size(), dist.get_rank()
        counts = torch.tensor([int(found is not None)])
        dist.all_reduce(counts, dist.ReduceOp.MIN)
        if found is None or not counts.item():
            raise ConfigError("--rebalance, but a rank's receiver counts no ids; allowed: with the sketch of its plan")
        window = found.since(self._earlier)
        self._earlier = found.since(None)
        summed = torch.from_numpy(np.append(window.counts.reshape(-1), np.uint64(window.rows)).view(np.int64))
        dist.all_reduce(summed)
        total = summed.numpy().view(np.uint64)
        window.counts, window.rows = total[:-1].reshape(window.counts.shape), int(total[-1])
        own = {number: sketched(table, window) for number, table in enumerate(tables.tables) if number % world == rank}
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, own)
        by_number: dict[int, Use] = {}
        for part in gathered:
            by_number |= part
        return [by_number[number] for number in range(len(tables.tables))]
