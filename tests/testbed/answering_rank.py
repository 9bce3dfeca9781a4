# SPDX-License-Identifier: Apache-2.0
"""A rank that runs collectives, and is then idle until the test asks for a barrier."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

from sennit.transport.communicator import Communicator
from sennit.transport.config import from_environment
from sennit.transport.meeting.store import FileStore
from sennit.transport.plans.arithmetic import fold
from sennit.transport.plans.elements import Dtype, ReduceOp

# The largest first, so that every plane carries much data before anything is known about it.
ELEMENTS = (2_000_003, 1, 40_001)
ROUNDS = 3


def run_and_answer(rank: int, world: int, store: Path, seed: int) -> None:
    """Prints "done" after the collectives. Answers each line of standard input with its counters, as JSON."""
    rng = np.random.default_rng(seed)
    with Communicator(rank=rank, world=world, store=FileStore(store), config=from_environment()) as group:
        wanted = os.environ.get("SENNIT_TRANSPORT", "udp")
        assert all(route == wanted for peer, route in enumerate(group.routes) if peer != rank), group.routes
        for elements in ELEMENTS * ROUNDS:
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
