# SPDX-License-Identifier: Apache-2.0
"""Clocks and mishaps of timelines: run on each rank by test_timeline.py."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sennit.runtime.timeline import Timeline
from sennit.runtime.timeline.clocks import offset_to_first
from sennit.transport.errors import ConfigError

SKEW_NS = 3_000_000_000


def skewed(rank: int, world: int) -> list[int]:
    """The offset that a rank finds whose clock is ahead by SKEW_NS a rank, and its uncertainty."""
    found = offset_to_first(clock=lambda: time.monotonic_ns() + rank * SKEW_NS, name=f"clock {rank}")
    same = offset_to_first(clock=lambda: time.monotonic_ns() + rank * SKEW_NS)
    return [found.offset_ns, found.uncertainty_ns, same.offset_ns, same.uncertainty_ns]


def mishaps(rank: int, world: int, folder: str) -> list[Any]:
    """What is said of a path that is a folder, of a full disk, and of a block that fails; then what is left there."""
    found: list[Any] = []
    try:
        with Timeline(folder):
            found.append("entered")
    except ConfigError as error:
        found.append(str(error))
    full = Path(folder) / "full.json"
    if rank == 0:
        Path(folder, ".full.json.part").symlink_to("/dev/full")
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Timeline(full) as timeline, timeline.step(0):
            pass
    found += [[str(warning.message) for warning in caught], timeline.is_written]
    try:
        with Timeline(Path(folder) / "empty.json"):
            raise ValueError("a step failed")
    except ValueError as error:
        found.append(str(error))
    dist.barrier()
    return [*found, sorted(entry.name for entry in Path(folder).iterdir())]


def cut_short(rank: int, world: int, path: str, how: str) -> dict[str, Any] | None:
    """All take step 0; in step 1 some end as `how` says, the others wait for them. What a rank that lives has written.

    The last rank is killed, aborts or exits; all are killed, or terminated; all raise.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"process/{rank}", str(os.getpid()))
    timeline = Timeline(path)
    phases = timeline.clock()
    with contextlib.suppress(dist.DistBackendError, ValueError), timeline:
        with timeline.step(0), phases.phase("sum"):
            dist.all_reduce(torch.ones(5))
        dist.barrier()
        with timeline.step(1), phases.phase("last words"):
            store.set(f"inside/{rank}", "")
            if how == "all raise":
                raise ValueError(f"rank {rank}")
            if how == "all are killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == world - 1:
                store.wait([f"inside/{one}" for one in range(world)])
                end(how, [int(store.get(f"process/{one}")) for one in range(world)])
            dist.all_reduce(torch.ones(5))
    left = timeline.left
    return None if left is None else {"path": str(left.path), "ranks": left.ranks, "died": left.died}


def end(how: str, processes: list[int]) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        os._exit(3)
    assert how == "all are terminated", how
    for process in processes:  # The others wait for this rank.
        os.kill(process, signal.SIGTERM)
    signal.pause()
