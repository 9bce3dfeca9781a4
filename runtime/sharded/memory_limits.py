# SPDX-License-Identifier: Apache-2.0
"""The memory of each rank for embedding tables: what its host or GPU has available, divided by the ranks there."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from sennit.transport._core import available_bytes

SHARE: Final = 0.9
"""The share of available memory that tables may use. The rest is for batches, gradients and buffers."""

PROC: Final = Path("/proc")


def memory_limits(
    own_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | None = None,
) -> list[int]:
    """Bytes for tables on each rank of the group, the same list on every rank. Collective.

    `own_bytes`: what the user gives this rank. None: what the host has available, divided by the ranks there; with a
    GPU as `device`, the free memory of the GPU, divided by the ranks on it.
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
    """A name that all ranks have in common which share the memory of a host, or of a container."""
    return f"{socket.gethostname()} {_read(PROC / 'sys/kernel/random/boot_id')}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
