# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr"
"""A process holds no more memory and descriptors after thousands of calls, also of such as nobody waits for."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.extent import briefly
from tests.runtime.world import WorldFactory

TURNS, CALLS_A_TURN = 20, 200
# Less than 48 bytes a call.
GROWTH_MAX_BYTES = 48 * TURNS * 2 * CALLS_A_TURN


def own_bytes() -> int:
    found = re.search(r"^RssAnon:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def calls(rank: int, world: int) -> None:
    """Sums whose futures are dropped, messages, and vectors of sizes that change."""
    small, message, large = torch.ones(64), torch.ones(64), torch.ones(1 << 18)
    for turn in range(TURNS):
        for _ in range(CALLS_A_TURN):
            dist.all_reduce(small, async_op=True).get_future()
            work = dist.isend(message, 1) if rank == 0 else dist.irecv(message, 0)
            work.wait()
        dist.all_reduce(large)
        dist.all_reduce(torch.ones(1_000 + turn))
        for tensor in (small, large):
            tensor.fill_(1)
        dist.barrier()


def grown(rank: int, world: int) -> tuple[int, int]:
    """By how many bytes and descriptors a round of calls makes this process larger.

    A leak makes it larger in every round. The allocator and queues that were never so full do so once, on a busy
    machine in a later round. So rounds go on, four at most, until none of the ranks has grown.
    """
    calls(rank, world)
    for _ in range(4):
        before = own_bytes(), len(os.listdir("/proc/self/fd"))
        calls(rank, world)
        added = own_bytes() - before[0], len(os.listdir("/proc/self/fd")) - before[1]
        ranks_that_grew = torch.tensor(int(added[0] >= GROWTH_MAX_BYTES or added[1] > 0))
        dist.all_reduce(ranks_that_grew)
        if not ranks_that_grew:
            break
    return added


@pytest.mark.parametrize("transport", briefly(["shm", "udp"], ["udp"]))
def test_calls_leave_nothing_behind(new_world: WorldFactory, transport: str) -> None:
    for grown_bytes, descriptors in new_world(2, environment={"SENNIT_TRANSPORT": transport}).run(grown):
        print(f"{grown_bytes >> 10} KiB")
        assert grown_bytes < GROWTH_MAX_BYTES
        assert descriptors <= 0
