# SPDX-License-Identifier: Apache-2.0
"""The memory of each rank for embedding tables: what its host or GPU has available, divided by the ranks there."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

SHARE: Final = 0.9
"""The share of available memory that tables may use. The rest is for batches, gradients and buffers."""

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")


class _Names(NamedTuple):
    """Of a control group's files, and of the entry of `memory.stat` for clean file pages."""

    limit: str
    used: str
    clean: str


# Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
_SECOND: Final = _Names("memory.max", "memory.current", "inactive_file")
_FIRST: Final = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def memory_limits(
    own_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | None = None,
) -> list[int]:
    """Bytes for tables on each rank of the group, the same list on every rank. Collective.

    `own_bytes` is what the user gives each rank; None: `available_bytes` of the host, divided by the ranks there.
    With a GPU as `device`, its free memory, divided by the ranks on it.
    """
    place, available = host_place(), available_bytes()
    if device is not None and device.type == "cuda":
        # Ranks may count GPUs differently (CUDA_VISIBLE_DEVICES).
        place = f"{place} {torch.cuda.get_device_properties(device).uuid}"
        available, _ = torch.cuda.mem_get_info(device)
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (place, own_bytes, available), group=group)
    return shared_limits(told)


def shared_limits(told: Sequence[tuple[str, int | None, int]]) -> list[int]:
    """The limit of each rank. Each rank tells its host or GPU, its own limit or None, and what is available there."""
    ranks_on = Counter(place for place, _, _ in told)
    # The ranks of a place measured at different moments.
    least = {place: min(available for other, _, available in told if other == place) for place in ranks_on}
    return [int(least[place] * SHARE) // ranks_on[place] if own is None else own for place, own, _ in told]


def host_place() -> str:
    """What ranks that share the memory of a host, or of a container, have in common."""
    return f"{socket.gethostname()} {_read(PROC / 'sys/kernel/random/boot_id')}"


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Memory that this process can still use: `MemAvailable`, or less if its control group (v1 or v2) has less left."""
    fields = dict(line.split(":", 1) for line in _read(proc / "meminfo").splitlines())
    found = [int(fields["MemAvailable"].split()[0]) << 10] if "MemAvailable" in fields else []
    for line in _read(proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            found += _left_in(cgroup, path, _SECOND)
        elif "memory" in controllers.split(","):
            found += _left_in(cgroup / "memory", path, _FIRST)
    # Without information, there is no limit.
    return min(found, default=1 << 62)


def _left_in(root: Path, path: str, names: _Names) -> Iterator[int]:
    """What a control group has left, and what its parents have: their limits apply, too."""
    group = root / path.lstrip("/")
    for level in (group, *group.parents):
        limit, used = _read(level / names.limit), _read(level / names.used)
        if limit.isdecimal() and used.isdecimal():
            # Clean file pages count as used, but can be reclaimed.
            stat = dict(line.split(" ", 1) for line in _read(level / "memory.stat").splitlines())
            yield max(0, int(limit) - int(used) + int(stat.get(names.clean, "0")))
        if level == root:
            break


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
