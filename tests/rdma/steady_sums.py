# SPDX-License-Identifier: Apache-2.0
"""A rank that sums arrays until it is told to stop, and what waits for its rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sennit.transport.communicator import Communicator
from sennit.transport.config import from_environment
from sennit.transport.meeting.store import FileStore

ELEMENTS = 100_003
DEADLINE_S = 120.0


def sum_until_told(rank: int, world: int, folder: Path, seed: int) -> None:
    """Checks every result, and prints its counters in the end.

    Writes the number of finished rounds to `folder`/rounds<rank>. Rank 0 looks for `folder`/stop.
    """
    rng = np.random.default_rng(seed)
    arrays = rng.integers(-1_000, 1_000, (world, ELEMENTS), np.int64)
    expected = arrays.sum(axis=0)
    with Communicator(rank=rank, world=world, store=FileStore(folder / "store"), config=from_environment()) as group:
        rounds = 0
        done = False
        while not done:
            np.testing.assert_array_equal(group.allreduce(arrays[rank]), expected)
            rounds += 1
            (folder / f"rounds{rank}").write_text(f"{rounds}")
            done = bool(group.allreduce(np.array([rank == 0 and (folder / "stop").exists()], np.int32))[0])
        for name, value in sorted(group.counters().items()):
            print(name, value)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {DEADLINE_S:g} s for {what}"
        time.sleep(0.01)
