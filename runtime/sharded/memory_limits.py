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

from sennit.runtime.sharded.files import TableStore
from sennit.runtime.sharded.tables import Home, Homes, Table, shard_bytes, shards_of
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


def limits_by_home(
    tables: Sequence[Table],
    homes: Homes,
    own_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device,
    store: TableStore | None = None,
) -> dict[Home, list[int]]:
    """`memory_limits` of each kind of memory that these tables may be in, less what caches of `store` take. Collective.

    `own_bytes`: of this rank in the memory of the device, beside all caches.
    """
    found = {homes.memory: memory_limits(own_bytes, group, device=device)}
    if homes.memory is not Home.DRAM:
        found[Home.DRAM] = _beside_caches(tables, store, Home.DRAM, memory_limits(group=group))
    if own_bytes is None:
        found[homes.memory] = _beside_caches(tables, store, homes.memory, found[homes.memory])
    return found


def _beside_caches(tables: Sequence[Table], store: TableStore | None, home: Home, limits: Sequence[int]) -> list[int]:
    """What the caches of a table store leave. They have no use for more than twice the rows (`files.divided`)."""
    if store is None:
        return list(limits)
    given = store.memory_bytes if home is Home.DRAM else store.device_bytes or 0
    taken = min(given, 2 * sum(shard_bytes(tables, shard) for shard in shards_of(tables)))
    return [max(0, limit - taken) for limit in limits]


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
