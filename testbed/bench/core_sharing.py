# SPDX-License-Identifier: Apache-2.0
"""What ranks, and threads of a rank, cost each other when they share cores, beyond their turns.

All ranks of a host compute and meet in turns, as in the phases of a training step: lookups and updates of a table, and
products of matrices. That is compared with the processor time of one rank which computes while the others wait.
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import ShardSpec
from sennit.runtime.planner.constants import Constants, Sharing
from sennit.transport.communicator import Communicator
from sennit.transport.elements import ReduceOp

TURNS: Final = 12
ROWS, DIM, BAGS, LENGTH = 200_000, 32, 2_048, 10
# Of what a further thread has to do, against the first one: input and ids of a batch against the rest of a step.
BESIDE: Final = 0.25
# What is slower than twice is so by other work of the machine.
MOST: Final = 1.0


def measure(group: Communicator, cores: int, contention: float) -> Sharing:
    """On every rank of a host; all get the same. `contention`: of ranks that have a core each.

    What these ranks cannot show keeps its default: nobody takes turns if every rank has a core.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work, beside = _work(), _work(BESIDE)
        alone_s = _alone(group, work)
        together_s = _together(group, lambda: _call(work))
        serial_s = _together(group, lambda: _call(work, beside))
        threaded_s = _together(group, lambda: _threaded(work, beside))
    finally:
        torch.set_num_threads(threads)
    turns, found = group.world / cores, Constants().sharing
    if turns > 1:
        slower = together_s / (alone_s * turns * contention)
        found = dataclasses.replace(found, crowd=min(max(slower - 1, 0.0) / min(turns - 1, 1.0), MOST))
    if turns >= 1:
        found = dataclasses.replace(found, switches=min(max(threaded_s / serial_s - 1, 0.0), MOST))
    return found


def _work(share: float = 1.0) -> Callable[[], object]:
    """A lookup, an update and products, some milliseconds of them."""
    generator = torch.Generator().manual_seed(1)
    engine = EmbeddingEngine(
        [ShardSpec(name="t", row_count=ROWS, dim=DIM)], OptimizerSpec(kind=Optimizer.ROW_WISE_ADAGRAD)
    )
    bags = max(1, round(BAGS * share))
    batch = Batch(
        table_of_block=(0,),
        bags_of_block=(bags,),
        lengths=torch.full((bags,), LENGTH, dtype=torch.int32),
        values=torch.randint(ROWS, (bags * LENGTH,), generator=generator, dtype=torch.int32),
        slice_of_block=(0,),
    )
    gradient = torch.randn(bags * DIM, generator=generator) * 1e-3
    left, right = torch.randn(bags, 128, generator=generator), torch.randn(128, 128, generator=generator)

    def call() -> None:
        engine.lookup(batch)
        torch.relu(left @ right) @ right
        engine.update(batch, gradient, rate=1e-6)

    return call


def _call(*works: Callable[[], object]) -> None:
    for work in works:
        work()


def _threaded(work: Callable[[], object], beside: Callable[[], object]) -> None:
    thread = threading.Thread(target=beside)
    thread.start()
    work()
    thread.join()


def _alone(group: Communicator, work: Callable[[], object]) -> float:
    """Processor seconds of rank 0, for all ranks."""
    work()
    times = []
    group.barrier()
    if group.rank == 0:
        for _ in range(TURNS):
            begin_s = time.thread_time()
            work()
            times.append(time.thread_time() - begin_s)
    return _agreed(group, statistics.median(times) if times else 0.0)


def _together(group: Communicator, work: Callable[[], object]) -> float:
    """Seconds between two meetings of all ranks: the first quartile, because other work only adds."""
    work()
    group.barrier()
    times = []
    for _ in range(TURNS):
        begin_s = time.perf_counter()
        work()
        group.barrier()
        times.append(time.perf_counter() - begin_s)
    return _agreed(group, sorted(times)[len(times) // 4])


def _agreed(group: Communicator, value: float) -> float:
    found: Any = group.allreduce(np.array([value]), ReduceOp.MAX)
    return float(found[0])
