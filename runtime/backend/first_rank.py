# SPDX-License-Identifier: Apache-2.0
"""What one rank alone is to do for all: to read a folder, to make an index, to plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


def place_in(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """(rank, ranks) in `group`, or in the default group; alone without a process group."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def on_first(call: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """What `call` returns on rank 0, on every rank. Collective over `group`, if there is a process group.

    Raises the error of rank 0 on every rank, of whatever type it is: the others wait for an answer.
    """
    rank, world_size = place_in(group)
    if world_size == 1:
        return call()
    told: list[Any] = [None, None]
    if rank == 0:
        try:
            told[0] = call()
        except Exception as error:
            told[1] = error
    dist.broadcast_object_list(told, group=group, group_src=0)
    result, failure = told
    if failure is not None:
        raise failure
    found: Result = result
    return found
