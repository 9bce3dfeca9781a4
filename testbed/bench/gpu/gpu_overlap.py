# SPDX-License-Identifier: Apache-2.0
"""Part of `sennit bench gpu`: whether copies to the device hide behind its other work while `sennit train` runs.

By the device's own times, which torch's profiler has. Of each rank the later half of the copies counts: before, kernels
are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.data.packages import check_installed
from sennit.runtime.data.source import Source
from sennit.runtime.training import launch
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.run import Place, run_rank
from sennit.testbed.bench.gpu.gpu_staging import TIMEOUT_S

if TYPE_CHECKING:
    from sennit.testbed.bench.gpu.gpu import Settings

COPY: Final = "HtoD"
"""Part of the names of copies from host memory to the device."""

STEPS: Final = 16
MODEL: Final[dict[str, Any]] = {"batch_size": 8_192, "embedding_dim": 64, "bottom": (512,), "top": (512, 256)}
SMALL_MODEL: Final[dict[str, Any]] = {"batch_size": 64, "embedding_dim": 4, "bottom": (8,), "top": (8,)}

Interval = tuple[float, float]
Span = tuple[str, float, float]
"""What the device did, from when to when: microseconds."""


def run(settings: Settings, _: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The rank with the most time in which its device only copied.

    Raises RuntimeError if no copy was seen, and MissingPackage without pyarrow.
    """
    check_installed("pyarrow", purpose="training")
    by_rank = launch.run_ranks(_rank, settings, settings.world, timeout_s=TIMEOUT_S)
    return {"results": [{"name": "sennit train, copies to the device"} | verdict(by_rank, settings.interpreter)]}


def verdict(by_rank: Iterable[dict[str, float] | None], is_without_gpu: bool) -> dict[str, Any]:
    """The worst of what `overlap` found."""
    if is_without_gpu:
        return {"absent": "no GPU"}
    found = [one for one in by_rank if one is not None]
    if not found:
        raise RuntimeError(f"torch's profiler saw no {COPY} copy of sennit train --device cuda")
    worst = max(found, key=lambda one: one["alone_us"] / one["whole_us"])
    hidden, alone = 1 - worst["alone_us"] / worst["copied_us"], worst["alone_us"] / worst["whole_us"]
    text = f"{hidden:.0%} of their time beside other work; the device only copies for {alone:.1%} of the time"
    return worst | {"hidden_share": hidden, "alone_share": alone, "outcome": text}


def overlap(spans: Sequence[Span]) -> dict[str, float] | None:
    """How long the later half of the copies took, how long the device did nothing else meanwhile, and the time from the
    first of them to the end of all. None: there is no copy."""
    copies = sorted((start, end) for name, start, end in spans if COPY in name)
    copies = copies[len(copies) // 2 :]
    if not copies:
        return None
    begin = copies[0][0]
    end = max(end for _, _, end in spans)
    others = [(max(start, begin), end) for name, start, end in spans if COPY not in name and end > begin]
    both = _length([*copies, *others])
    return {"copied_us": _length(copies), "alone_us": both - _length(others), "whole_us": end - begin}


def _length(intervals: Iterable[Interval]) -> float:
    """The length of the union of all intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _rank(settings: Settings, rank: int, world: int, store: Store) -> dict[str, float] | None:
    steps, model = (2, SMALL_MODEL) if settings.interpreter else (STEPS, MODEL)
    config = TrainingConfig(
        source=Source(data="synthetic", samples=(steps + 4) * model["batch_size"]),
        device="cpu" if settings.interpreter else "cuda",
        seed=settings.seed,
        epochs=1,
        max_steps=steps,
        timeout_s=TIMEOUT_S,
        **model,
    )
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU if settings.interpreter else activity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run_rank(config, Place(rank=rank, world_size=world, store=store))
    return overlap(
        [
            (one.name, one.time_range.start, one.time_range.end)
            for one in profile.events() or ()
            if one.device_type.name == "CUDA"
        ]
    )
