# SPDX-License-Identifier: Apache-2.0
"""How far the clocks of ranks are apart, from round trips between them (Cristian's method, as in NTP, RFC 5905).

A rank notes its time before a question and after the answer, which has the time of rank 0. If both ways took equally
long, that was the time in the middle. It is wrong by half of the round trip at most, so the shortest one counts. Ranks
of one host have one clock, and ask nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

ROUND_TRIPS: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Offset:
    """What to add to this rank's time to get that of rank 0."""

    at_ns: int
    """When the offset was measured, by this rank's clock."""

    offset_ns: int
    uncertainty_ns: int


def estimate(trips: Iterable[tuple[int, int, int]]) -> Offset:
    """The offset from round trips: (asked, the other clock's time, answered), in nanoseconds. At least one."""
    asked, other, answered = min(trips, key=lambda trip: trip[2] - trip[0])
    middle = (asked + answered) // 2
    return Offset(at_ns=middle, offset_ns=other - middle, uncertainty_ns=(answered - asked + 1) // 2)


def shift(time_ns: int, first: Offset, last: Offset) -> int:
    """A time of this rank by the clock of rank 0. Clocks that run apart do so evenly between the two offsets."""
    between = last.at_ns - first.at_ns
    if between <= 0:
        return time_ns + first.offset_ns
    return time_ns + first.offset_ns + (last.offset_ns - first.offset_ns) * (time_ns - first.at_ns) // between


def host_clock() -> str:
    """Names the clock that processes of this host share: that of its boot, and of the time namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    try:
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # A kernel without time namespaces.
        return boot


def offset_to_first(
    group: dist.ProcessGroup | None = None,
    *,
    clock: Callable[[], int] = time.monotonic_ns,
    name: str | None = None,
) -> Offset:
    """This rank's offset to the first rank of the group. Collective: the ranks ask one after the other.

    `clock` is in nanoseconds. Ranks with the same `name` of it (default: `host_clock()`) have the same clock.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    names: list[str | None] = [None] * world
    dist.all_gather_object(names, host_clock() if name is None else name, group=group)
    asking = [one for one in range(1, world) if names[one] != names[0]]
    word = torch.zeros(1, dtype=torch.int64)
    found = Offset(at_ns=clock(), offset_ns=0, uncertainty_ns=0)
    for asker in asking:
        if rank == 0:
            for _ in range(ROUND_TRIPS):
                dist.recv(word, group=group, group_src=asker)
                word[0] = clock()
                dist.send(word, group=group, group_dst=asker)
        elif rank == asker:
            trips = []
            for _ in range(ROUND_TRIPS):
                asked = clock()
                dist.send(word, group=group, group_dst=0)
                dist.recv(word, group=group, group_src=0)
                trips.append((asked, int(word[0]), clock()))
            found = estimate(trips)
    return found
