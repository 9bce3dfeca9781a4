# SPDX-License-Identifier: Apache-2.0
"""Part of `sennit bench gpu`: what an update with Adam launches, and which kernels take longest.

By torch's profiler, and then by `ncu` where it is. `python -m sennit.testbed.bench.gpu.gpu_profile` is what ncu runs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Rounding
from sennit.runtime.kernels.triton_operator import TritonOperator
from sennit.testbed.bench.gpu.gpu import Settings
from sennit.testbed.bench.tables import embedding_cuda

SLOWEST: Final = 15
NCU_BYTES: Final = 200_000
"""The most of ncu's output that is kept."""


def run(settings: Settings, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """`launches`, `torch_operations` and `slowest` of one update. `ncu`: its output, or why there is none."""
    update = prepared(settings)
    update()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not settings.interpreter:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        update()
        if not settings.interpreter:
            torch.cuda.synchronize()
    events = profile.key_averages()
    times = sorted(((float(one.self_device_time_total), one.key, one.count) for one in events), reverse=True)
    found: dict[str, Any] = {
        "launches": sum(one.count for one in events if "LaunchKernel" in one.key),
        # The device as a whole is awaited by this function, and by the profiler.
        "waits": sum(one.count for one in events if "Synchronize" in one.key and "Device" not in one.key),
        "torch_operations": sum(one.count for one in events if one.key.startswith("aten::")),
        "slowest": [{"name": name, "device_us": us, "calls": count} for us, name, count in times[:SLOWEST] if us > 0],
        "ncu": "not installed",
    }
    save(found)
    if not settings.interpreter and (program := shutil.which("ncu")) is not None:
        found["ncu"] = _ncu(program)
    return found


def prepared(settings: Settings) -> Callable[[], object]:
    """One update with Adam: at the shape of FBGEMM's published times, or a small one on the CPU."""
    device = torch.device("cpu" if settings.interpreter else "cuda")
    lookups, rows, dim = (
        (200, 50, 16)
        if settings.interpreter
        else (
            embedding_cuda.LOOKUPS,
            embedding_cuda.ROWS,
            embedding_cuda.DIM,
        )
    )
    spec = OptimizerSpec(kind=Optimizer.ADAM)
    tables = embedding_cuda.random_tables(spec, device, rows, dim)
    batch = embedding_cuda.power_law_batch(device, settings.seed, lookups=lookups, rows=rows)
    gradient, operator = torch.randn(lookups * dim, device=device), TritonOperator()
    return lambda: operator.update(
        tables,
        batch,
        gradient,
        kind=spec.kind,
        constants=spec.constants(step=1, rate=0.01),
        rounding=Rounding.NEAREST,
        seed=0,
    )


def _ncu(program: str) -> str:
    """Clocks are left as they are. The limit of the part ends it. Where counters are refused, ncu says so."""
    command = [program, "--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all", "--csv"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "sennit.testbed.bench.gpu.gpu_profile"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return (done.stdout + done.stderr)[-NCU_BYTES:]


if __name__ == "__main__":
    once = prepared(Settings())
    once()  # compiles
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    once()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
