# SPDX-License-Identifier: Apache-2.0
"""Part of `sennit bench gpu`: copies between host and device, and collectives of sennit on device memory.

Ranks share GPUs if there are fewer. NCCL refuses two ranks on one GPU, so it is a peer only if each rank has its own.
Without a GPU host tensors take the way of device tensors (`runtime/backend/csrc/stand_in.hpp`), and nothing is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from sennit.runtime.backend.process_group import load_extension
from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.training import launch
from sennit.testbed.bench.tables.embedding_cuda import call_ms

if TYPE_CHECKING:
    from sennit.testbed.bench.gpu.gpu import Settings

TIMEOUT_S: Final = 300.0
SIZES: Final = (64 << 10, 4 << 20, 64 << 20)
SMALL_SIZES: Final = (4 << 10,)
"""Bytes of a rank's tensor without a GPU."""

Operation = tuple[str, int, Callable[[], object]]


def run(settings: Settings, _: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Times of the slowest rank. Raises `launch.RankFailure`, also if a result is wrong."""
    by_rank = launch.run_ranks(_rank, settings, settings.world, timeout_s=TIMEOUT_S)
    results = []
    for of_ranks in zip(*by_rank, strict=True):
        one = dict(of_ranks[0])
        if "ms" in one:
            one["ms"] = max(other["ms"] for other in of_ranks)
            one["bytes_per_s"] = one["bytes"] / (one["ms"] * 1e-3)
        results.append(one)
    return {"ranks_by_gpu": settings.world / max(1, torch.cuda.device_count()), "results": results}


def device_of(settings: Settings, rank: int) -> torch.device:
    """The device of a rank; made current, because streams and kernels take the current one."""
    if settings.interpreter:
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _rank(settings: Settings, rank: int, world: int, store: Store) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    device, found = device_of(settings, rank), []
    dist.init_process_group("sennit", store=store, rank=rank, world_size=world)
    before = load_extension().stand_in.set_active(settings.interpreter)
    try:
        for size in SMALL_SIZES if settings.interpreter else SIZES:
            for name, count, operation in [*_copies(size, device), *_collectives(size, device, rank, world, None)]:
                found.append(_measured(f"{name}, {size >> 10:,} KiB", count, operation, settings))
            found += _nccl(settings, size, device, rank, world)
    finally:
        load_extension().stand_in.set_active(before)
        dist.destroy_process_group()
    return found


def _measured(name: str, count: int, operation: Callable[[], object], settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "bytes": count}
    if not settings.interpreter:
        found["ms"] = statistics.median(call_ms(operation, settings.rounds))
    return found


def _copies(size: int, device: torch.device) -> list[Operation]:
    """Copies to the device and back, with pinned and with pageable memory. Each is checked once."""
    found: list[Operation] = []
    for kind in ("pageable", "pinned"):
        host = torch.arange(size, dtype=torch.int32).to(torch.uint8)
        if kind == "pinned" and device.type == "cuda":
            host = host.pin_memory()
        there, back = torch.zeros(size, dtype=torch.uint8, device=device), torch.zeros_like(host)

        def upload(there: torch.Tensor = there, host: torch.Tensor = host) -> object:
            return there.copy_(host, non_blocking=True)

        def download(there: torch.Tensor = there, back: torch.Tensor = back) -> object:
            return back.copy_(there)

        upload()
        download()
        if not torch.equal(host, back):
            raise RuntimeError(f"{size} bytes of {kind} memory came back from {device} changed")
        found += [(f"host to device, {kind}", size, upload), (f"device to host, {kind}", size, download)]
    return found


def _collectives(
    size: int, device: torch.device, rank: int, world: int, group: dist.ProcessGroup | None
) -> list[Operation]:
    """AllReduce and AlltoAll of `size` bytes a rank. Each is checked once."""
    elements = size // 4 // world * world
    whole = torch.arange(elements, dtype=torch.float32, device=device) % 1_001
    summed = whole + rank
    dist.all_reduce(summed, group=group)
    if not torch.equal(summed, world * whole + sum(range(world))):
        raise RuntimeError(f"AllReduce of {size} bytes on {device} gave a wrong sum")
    given, received = whole + rank, torch.empty_like(whole)
    dist.all_to_all_single(received, given, group=group)
    parts = [(whole + peer).view(world, -1)[rank] for peer in range(world)]
    if not torch.equal(received, torch.cat(parts)):
        raise RuntimeError(f"AlltoAll of {size} bytes on {device} gave wrong parts")
    summed.zero_()
    return [
        ("AllReduce", size, lambda: dist.all_reduce(summed, group=group)),
        ("AlltoAll", size, lambda: dist.all_to_all_single(received, given, group=group)),
    ]


def _nccl(settings: Settings, size: int, device: torch.device, rank: int, world: int) -> list[dict[str, Any]]:
    gpus = torch.cuda.device_count()
    reason = None
    if settings.interpreter:
        reason = "no GPU"
    elif not dist.is_nccl_available():
        reason = "this torch has no NCCL"
    elif gpus < world:
        reason = f"{world} ranks share {gpus} GPU, which NCCL refuses"
    if reason is not None:
        return [{"name": f"nccl, {size >> 10:,} KiB", "absent": reason}]
    group = dist.new_group(backend="nccl")
    found = [
        _measured(f"nccl {name}, {size >> 10:,} KiB", count, operation, settings)
        for name, count, operation in _collectives(size, device, rank, world, group)
    ]
    dist.destroy_process_group(group)
    return found
