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
    """By how many bytes and descriptors the last third of the calls made this process larger."""
    for _ in range(2):  # the second round still takes a mebibyte, once
        calls(rank, world)
    before = own_bytes(), len(os.listdir("/proc/self/fd"))
    calls(rank, world)
    return own_bytes() - before[0], len(os.listdir("/proc/self/fd")) - before[1]


@pytest.mark.parametrize("transport", briefly(["shm", "udp"], ["udp"]))
def test_calls_leave_nothing_behind(new_world: WorldFactory, transport: str) -> None:
    for grown_bytes, descriptors in new_world(2, environment={"SENNIT_TRANSPORT": transport}).run(grown):
        print(f"{grown_bytes >> 10} KiB")
        assert grown_bytes < GROWTH_MAX_BYTES
        assert descriptors <= 0
