# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type"
"""64 groups of 8 ranks fit the 1,024 descriptors that Linux allows a process by default, and none stays behind."""

from __future__ import annotations

import os
import resource

import pytest
import torch
import torch.distributed as dist

from tests.extent import briefly
from tests.runtime.world import WorldFactory

# Two for each rank of each group: what a group over shared memory held once, without what the process itself has.
DESCRIPTORS_A_RANK = 2


def sums(group: dist.ProcessGroup, rank: int, world: int, number: int) -> None:
    total = torch.full((5,), float(rank + number))
    dist.all_reduce(total, group=group)
    assert torch.equal(total, torch.full((5,), float(sum(range(world)) + number * world)))


def within(rank: int, world: int, groups: int, limit: int) -> tuple[int, int]:
    """Has `groups` groups at a time, and each of them works, twice. The process may have `limit` descriptors.

    Returns how many it had before and after.
    """
    dist.barrier()
    before = len(os.listdir("/proc/self/fd"))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    made = []
    for number in range(groups):
        made.append(dist.new_group())
        sums(made[-1], rank, world, number)
    for number, group in enumerate(made):
        sums(group, rank, world, number)
        dist.destroy_process_group(group)
    # As with gloo, a group that has ended keeps its descriptors while the program still names it.
    del group
    made.clear()
    return before, len(os.listdir("/proc/self/fd"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("transport", "groups", "size"),
    briefly(
        [(transport, groups, size) for transport in ("shm", "udp") for groups, size in ((16, 4), (64, 8))],
        [("shm", 16, 4)],
    ),
)
def test_groups_fit_the_limit_on_descriptors(new_world: WorldFactory, transport: str, groups: int, size: int) -> None:
    world = new_world(size, environment={"SENNIT_TRANSPORT": transport})
    for before, after in world.run_within(280.0, within, groups, DESCRIPTORS_A_RANK * groups * size):
        # What the second group shares with the first may stay.
        assert after <= before + 4
