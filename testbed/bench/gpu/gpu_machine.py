# SPDX-License-Identifier: Apache-2.0
"""Part of `sennit bench gpu`: versions, devices, a copy's speed, and what the devices are too old or small for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from sennit.runtime.calibrate import machine
from sennit.testbed.bench.gpu.gpu import Settings

NEEDED_CAPABILITY: Final = (8, 0)
"""Older devices have neither bf16 nor the copies that the kernels are written for."""

NEEDED_BYTES: Final = 20 * 10**9
NEED_KERNELS: Final = ("kernels", "embedding", "attention", "training step", "profile")
NEED_MEMORY: Final = ("embedding", "profile")
_SHOWN: Final = ("SENNIT_", "TRITON_", "CUDA_", "NVIDIA_", "NCCL_", "TORCH_", "PYTHONPATH", "LD_LIBRARY_PATH", "PATH")


def run(settings: Settings, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Whole before the copy is timed, which is the first thing that uses the device."""
    found: dict[str, Any] = {
        "gpus": [] if settings.interpreter else gpus(),
        "versions": versions(),
        "machine": machine.describe(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SHOWN)},
        "programs": {name: shutil.which(name) for name in ("c++", "cmake", "ninja", "nvcc", "ncu", "nvidia-smi")},
    }
    found["problems"] = problems(found["gpus"])
    save(found)
    if found["gpus"]:
        from sennit.testbed.bench.tables.embedding_cuda import copy_speed

        found["copy_bytes_per_s"] = copy_speed(torch.device("cuda"), settings.rounds)
    return found


def gpus() -> list[dict[str, Any]]:
    """All devices, the one that is used first."""
    found = []
    for number in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(number)
        free_bytes, _ = torch.cuda.mem_get_info(number)
        found.append(
            {
                "name": one.name,
                "capability": [one.major, one.minor],
                "memory_bytes": one.total_memory,
                "free_bytes": free_bytes,
                "multiprocessors": one.multi_processor_count,
            }
        )
    return found


def problems(devices: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Part -> why the first device cannot run it."""
    if not devices:
        return {}
    found: dict[str, str] = {}
    one = devices[0]
    if one["free_bytes"] < NEEDED_BYTES:
        why = f"{one['name']} has {one['free_bytes'] / 1e9:.1f} GB of memory free; needed: {NEEDED_BYTES / 1e9:.0f} GB"
        found |= dict.fromkeys(NEED_MEMORY, why)
    if tuple(one["capability"]) < NEEDED_CAPABILITY:
        there, needed = (".".join(map(str, two)) for two in (one["capability"], NEEDED_CAPABILITY))
        found |= dict.fromkeys(NEED_KERNELS, f"{one['name']} has compute capability {there}; needed: {needed}")
    return found


def versions() -> dict[str, Any]:
    """Versions of the libraries that a GPU run depends on; None: not installed."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": None, "nccl": None}
    if importlib.util.find_spec("triton") is not None:
        found["triton"] = importlib.metadata.version("triton")
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found
