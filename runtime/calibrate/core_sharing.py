# SPDX-License-Identifier: Apache-2.0
"""What ranks, and threads of a rank, cost each other when they compute at once, beyond their turns.

Ranks compute and meet as in a training step: lookups and updates of a table, and products of matrices. A turn has a
step of one rank alone, of as many ranks as there are cores, and of all ranks. They are compared turn by turn, so that a
change of the machine's speed hits all of them alike.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import ShardSpec
from sennit.runtime.planner.constants import CONTENTION_MAX, Constants, Sharing
from sennit.runtime.planner.one_thread import one_thread
from sennit.transport.communicator import Communicator
from sennit.transport.plans.elements import ReduceOp

TURNS: Final = 15
# The tables do not fit into a cache together, as in a run. Whether one table would fit alone is luck.
TABLES, ROWS, DIM, BAGS, LENGTH = 8, 100_000, 32, 256, 10
# A step is as long as a real one, with as many meetings: in short ones the start of a thread is a large share, and so
# is a slice of the scheduler.
STEP_S: Final = 0.04
MEETINGS: Final = 4
REPEATS_MAX: Final = 1_000
WARM_CALLS: Final = 5
# A further thread has this share of the first one's work: input and ids of a batch against the rest of a step.
BESIDE: Final = 0.25
# A larger slowdown comes from other work of the machine.
MOST: Final = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Seconds of a step, until all ranks have met. `alone` is processor time of one rank."""

    serial: float
    """All ranks compute, each with its further work in the same thread."""
    threaded: float
    """The same, with the further work in another thread."""
    all: float
    """All ranks compute, without further work."""
    some: float
    """Only one rank a core computes."""
    alone: float
    """Only rank 0 computes."""


def measure(group: Communicator, cores: int, contention: float) -> tuple[float, Sharing]:
    """`contention` and sharing, on every rank of a host; all get the same.

    What these ranks cannot show keeps its value. Fewer ranks than cores do not show `contention`, and nobody takes
    turns if every rank has a core.
    """
    with one_thread():
        turns = _turns(group, cores)
    return found_in(turns, ranks=group.world, cores=cores, contention=contention)


def found_in(turns: Sequence[Turn], *, ranks: int, cores: int, contention: float) -> tuple[float, Sharing]:
    """What the turns say: medians of ratios."""
    found = Constants().sharing
    if 1 < cores <= ranks:
        contention = _within(statistics.median(turn.some / turn.alone for turn in turns), 1.0, CONTENTION_MAX)
    rounds = ranks / cores
    if rounds > 1:
        slower = statistics.median(turn.all / turn.alone for turn in turns) / (rounds * contention)
        found = dataclasses.replace(found, crowd=_within((slower - 1) / min(rounds - 1, 1.0), 0.0, MOST))
    if rounds >= 1:
        slower = statistics.median(turn.threaded / turn.serial for turn in turns)
        found = dataclasses.replace(found, switches=_within(slower - 1, 0.0, MOST))
    return contention, found


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _turns(group: Communicator, cores: int) -> list[Turn]:
    work, beside = _work(), _work(BESIDE)
    repeats = _repeats(group, work)

    def part() -> None:
        for _ in range(repeats):
            work()

    def further() -> None:
        for _ in range(repeats * MEETINGS):
            beside()

    def step() -> None:
        for _ in range(MEETINGS - 1):
            part()
            group.barrier()
        part()

    def serial() -> None:
        further()
        step()

    with ThreadPoolExecutor(1) as pool:
        # A thread that stays, as that of batches ahead.
        pool.submit(torch.set_num_threads, 1).result()

        def threaded() -> None:
            running = pool.submit(further)
            step()
            running.result()

        def idle() -> None:
            for _ in range(MEETINGS - 1):
                group.barrier()

        is_some = group.rank < cores
        turns = []
        for _ in range(TURNS + 1):
            turns.append(
                Turn(
                    serial=_together(group, serial),
                    threaded=_together(group, threaded),
                    all=_together(group, step),
                    some=_together(group, step if is_some else idle),
                    alone=_alone(group, part),
                )
            )
    # The first one touches memory.
    return turns[1:]


def _repeats(group: Communicator, work: Callable[[], object]) -> int:
    """How often `work` is a part of a step, the same on all ranks."""
    times = []
    for _ in range(WARM_CALLS):
        begin_s = time.thread_time()
        work()
        times.append(time.thread_time() - begin_s)
    # The first ones touch memory, and may find the processor slow.
    once_s = _agreed(group, min(times))
    return int(_within(round(STEP_S / MEETINGS / max(once_s, 1e-6)), 1, REPEATS_MAX))


def _work(share: float = 1.0) -> Callable[[], object]:
    """A lookup, an update and products, some milliseconds of them."""
    generator = torch.Generator().manual_seed(1)
    specs = [ShardSpec(name=f"t{number}", row_count=ROWS, dim=DIM) for number in range(TABLES)]
    engine = EmbeddingEngine(specs, OptimizerSpec(kind=Optimizer.ROW_WISE_ADAGRAD))
    bags = max(1, round(BAGS * share))
    batch = Batch(
        table_of_block=tuple(range(TABLES)),
        bags_of_block=(bags,) * TABLES,
        lengths=torch.full((TABLES * bags,), LENGTH, dtype=torch.int32),
        values=torch.randint(ROWS, (TABLES * bags * LENGTH,), generator=generator, dtype=torch.int32),
        slice_of_block=(0,) * TABLES,
    )
    gradient = torch.randn(TABLES * bags * DIM, generator=generator) * 1e-3
    left, right = (torch.randn(rows, 128, generator=generator) for rows in (TABLES * bags, 128))

    def call() -> None:
        engine.lookup(batch)
        torch.relu(left @ right) @ right
        engine.update(batch, gradient, rate=1e-6)

    return call


def _alone(group: Communicator, part: Callable[[], object]) -> float:
    """Processor seconds of all parts of a step on rank 0, while the others wait; the same on all ranks."""
    spent_s = 0.0
    group.barrier()
    if group.rank == 0:
        begin_s = time.thread_time()
        for _ in range(MEETINGS):
            part()
        spent_s = time.thread_time() - begin_s
    return _agreed(group, spent_s)


def _together(group: Communicator, step: Callable[[], object]) -> float:
    """Seconds between two meetings of all ranks; the same on all ranks."""
    group.barrier()
    begin_s = time.perf_counter()
    step()
    group.barrier()
    return _agreed(group, time.perf_counter() - begin_s)


def _agreed(group: Communicator, value: float) -> float:
    found: Any = group.allreduce(np.array([value]), ReduceOp.MAX)
    return float(found[0])
