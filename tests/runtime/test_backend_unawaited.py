# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="union-attr"
"""Calls whose Work nobody waits for: a barrier comes after them, and a rank that leaves its group ends them first."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(120)

# One fits into what a lane takes at once; the other has many messages, and goes on while its peer takes part.
SIZES = (10, 1_000_000)


def before_a_barrier(rank: int, world: int) -> None:
    for is_async in (False, True):
        sums = [torch.full((size,), float(rank + place)) for place, size in enumerate((1_000_000, 3, 200_000))]
        for one in sums:
            dist.all_reduce(one, async_op=True)
        barrier = dist.barrier(async_op=is_async)
        if is_async:
            barrier.wait()
        for place, one in enumerate(sums):
            assert one.eq(sum(range(world)) + place * world).all(), (place, one)


def before_the_end(rank: int, world: int, size: int, is_message: bool) -> None:
    """Rank 0 leaves a group when it has begun a call. The others begin it only then."""
    group = dist.new_group()
    store: Any = dist.distributed_c10d._get_default_store()
    name = f"begun {size} {is_message}"
    if rank != 0:
        store.wait([name], timedelta(seconds=30))
    tensor = torch.full((size,), 1.0 + rank)
    if not is_message:
        work = dist.all_reduce(tensor, group=group, async_op=True)
    elif rank == 0:
        work = dist.isend(tensor, 1, group=group)
    else:
        work = dist.irecv(tensor, 0, group=group) if rank == 1 else None
    if rank == 0:
        store.set(name, "")
    elif work is not None:
        work.wait()
        assert tensor.eq(1 if is_message else sum(range(1, world + 1))).all()
    dist.destroy_process_group(group)
    dist.barrier()


def a_receive_that_nobody_answers(rank: int, world: int) -> None:
    """Holds up no end: no peer needs it."""
    group = dist.new_group()
    dist.irecv(torch.ones(3), (rank + 1) % world, group=group)
    dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_a_barrier_comes_after_earlier_calls(kept_world: WorldFactory, transport: str) -> None:
    kept_world(3, transport).run(before_a_barrier)


@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_who_leaves_ends_what_it_has_begun(kept_world: WorldFactory, transport: str) -> None:
    world = kept_world(3, transport)
    for size in SIZES:
        for is_message in (False, True):
            world.run(before_the_end, size=size, is_message=is_message)
    world.run(a_receive_that_nobody_answers)
