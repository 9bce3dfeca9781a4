# SPDX-License-Identifier: Apache-2.0
"""Two ranks that run collectives, and are then idle until the test asks for a barrier.

A rank imports this file, and nothing of pytest: its interpreter is a new one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from sennit.transport import counters
from sennit.transport.communicator import Communicator
from sennit.transport.config import from_environment
from sennit.transport.meeting.store import FileStore
from sennit.transport.plans.arithmetic import fold
from sennit.transport.plans.elements import Dtype, ReduceOp
from tests.ranks import command

LARGEST: Final = 700_003
SMALLER: Final = (1, 40_001)
ROUNDS: Final = 3
COLLECTIVES: Final = (1 + len(SMALLER)) * ROUNDS
"""So many AllReduces, and as many AlltoAlls."""

WORLD: Final = 2
DEADLINE_S: Final = 60.0

Start = Callable[..., "subprocess.Popen[str]"]


def run_and_answer(rank: int, world: int, store: Path, seed: int, largest: int) -> None:
    """Prints "done" after the collectives. Answers each line of standard input with its counters, as JSON."""
    rng = np.random.default_rng(seed)
    with Communicator(rank=rank, world=world, store=FileStore(store), config=from_environment()) as group:
        wanted = os.environ.get("SENNIT_TRANSPORT", "udp")
        assert all(route == wanted for peer, route in enumerate(group.routes) if peer != rank), group.routes
        # The largest first, so that every plane carries much data before anything is known about it.
        for elements in (largest, *SMALLER) * ROUNDS:
            arrays = [rng.standard_normal(elements).astype(np.float32) for _ in range(world)]
            expected = fold([a.view(np.uint8) for a in arrays], Dtype.F32, ReduceOp.SUM)
            assert group.allreduce(arrays[rank]).tobytes() == expected.tobytes()
            rows = [rng.integers(0, 256, (world, elements), np.uint8) for _ in range(world)]
            received = group.alltoall(rows[rank].reshape(-1))
            assert received.tobytes() == b"".join(row[rank].tobytes() for row in rows)
        print("done", flush=True)
        for _ in sys.stdin:
            group.barrier()
            print(json.dumps(group.counters()), flush=True)


def start_over(transport: str) -> Start:
    """Starts ranks on this host."""
    environment = {**os.environ, "SENNIT_INTERFACES": "lo", "SENNIT_TIMEOUT_S": f"{DEADLINE_S}"}
    environment["SENNIT_TRANSPORT"] = transport

    def start(rank: int, command: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=environment, **options)

    return start


class Ranks:
    """Two ranks that have run collectives and are idle. They are killed at the end of the block."""

    def __init__(self, start: Start, folder: Path, seed: int, *, largest: int = LARGEST) -> None:
        """`start(rank, command, **options)` starts each rank. `largest`: elements of the largest collective."""
        pipe = subprocess.PIPE
        self.processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(WORLD):
                answers = command(partial(run_and_answer, rank, WORLD, folder / "store", seed, largest))
                self.processes.append(start(rank, answers, stdin=pipe, stdout=pipe, text=True))
            assert [self.answer(rank) for rank in range(WORLD)] == ["done\n"] * WORLD
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=DEADLINE_S)

    def begin_barrier(self, rank: int) -> None:
        process = self.processes[rank]
        assert process.stdin is not None
        process.stdin.write("counters\n")
        process.stdin.flush()

    def answer(self, rank: int) -> str:
        """Returns the rank's next line, which has its counters after a barrier."""
        process = self.processes[rank]
        assert process.stdout is not None
        return process.stdout.readline()

    def counted(self) -> list[dict[str, int]]:
        """Returns what each rank has counted, after one more barrier."""
        for rank in range(WORLD):
            self.begin_barrier(rank)
        return [json.loads(self.answer(rank)) for rank in range(WORLD)]

    def end(self) -> list[str]:
        """Lets the ranks end in order. Returns the rest of what they have printed."""
        rest = [process.communicate(timeout=DEADLINE_S)[0] for process in self.processes]
        assert [process.returncode for process in self.processes] == [0] * WORLD
        return rest

    def pages(self) -> list[counters.Page]:
        """Returns the counters of all ranks, in rank order."""
        numbers = {process.pid for process in self.processes}
        return sorted((page for page in counters.pages() if page.process in numbers), key=lambda page: page.rank)

    def wait_for(self, rank: int, group: str, name: str, value: int) -> None:
        """Waits until the rank has counted `value`."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self.pages()[rank].total(group, name) < value:
            assert time.monotonic() < deadline_s, (rank, group, name, value)
