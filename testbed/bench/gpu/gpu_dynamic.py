# SPDX-License-Identifier: Apache-2.0
# Torch types some functions thinly:
# mypy: disable-error-code="no-untyped-call"
"""Part of `sennit bench gpu`: steps of a dynamic table in device memory, beside a fixed table there and itself on the
host.

The fixed table gets the numbers of rows where the dynamic one gets ids of 64 bits. Before steps are timed, both homes
of a small table must end with the same bits while rows come and go. Growth means steps of new ids alone, which fill an
empty table.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.backend.process_group import load_extension
from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.sharded import ShardedEmbeddingBags as Module
from sennit.runtime.sharded import Table
from sennit.runtime.training import launch
from sennit.testbed.bench.gpu.gpu_staging import TIMEOUT_S, device_of
from sennit.testbed.bench.tables.dynamic import RATE, Ids, Shape, step_of

if TYPE_CHECKING:
    from sennit.testbed.bench.gpu.gpu import Settings

SIZE: Final[dict[str, Any]] = {"rows": 4_000_000, "dim": 64, "bags": 16_384, "length": 20}
SMALL: Final[dict[str, Any]] = {"rows": 200, "dim": 8, "bags": 8, "length": 3}
"""Of the table whose bits are compared, and without a GPU of the others, too."""

LOADS: Final = ((0.8, 0.0), (0.95, 0.02))
"""Of the rows, the share that ids have; of the ids of a batch, the share that has never come before."""

COMPARED_STEPS: Final = 12


def run(settings: Settings, _: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Times of one rank. Raises `launch.RankFailure`, also if bits differ."""
    (found,) = launch.run_ranks(_rank, settings, 1, timeout_s=TIMEOUT_S)
    return {"dynamic": SMALL if settings.interpreter else SIZE, "results": found}


def _rank(settings: Settings, rank: int, world: int, store: Store) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    device = device_of(settings, rank)
    dist.init_process_group("sennit", store=store, rank=rank, world_size=world)
    before = load_extension().stand_in.set_active(settings.interpreter)
    try:
        digest = _compared(settings, device)
        found: list[dict[str, Any]] = [{"name": "dynamic table, bits of host memory", "outcome": digest}]
        size = SMALL if settings.interpreter else SIZE
        for load, new in LOADS:
            found += _beside_fixed(Shape(**size, load=load, new=new), settings, device)
        return [*found, _growth(Shape(**size, load=0.95, new=1.0), settings, device)]
    finally:
        load_extension().stand_in.set_active(before)
        dist.destroy_process_group()


def _module(shape: Shape, seed: int, device: torch.device, kernels: str = "triton", **options: Any) -> Module:
    table = Table(name="id", rows=shape.rows, dim=shape.dim, optimizer="row_wise_adagrad", **options)
    return Module([table], lr=RATE, gradients="sum", seed=seed, implementation_name=kernels, device=device)


def _compared(settings: Settings, device: torch.device) -> str:
    """The digest of a small table on the device. Raises RuntimeError if that on the host is another."""
    shape = Shape(**SMALL, load=0.95, new=0.5)
    digests = []
    for place, kernels in ((device, "triton"), (torch.device("cpu"), "native")):
        ids, module = Ids(shape, settings.seed), _module(shape, settings.seed, place, kernels, ids="dynamic")
        for number in range(COMPARED_STEPS):
            step_of(module, ids.of(number)[0])
        digests.append(module.digest())
    if digests[0] != digests[1]:
        raise RuntimeError(f"a dynamic table has weights {digests[0]} on {device}, and {digests[1]} in host memory")
    return digests[0]


def _beside_fixed(shape: Shape, settings: Settings, device: torch.device) -> list[dict[str, Any]]:
    ids = Ids(shape, settings.seed)
    dynamic, fixed = _module(shape, settings.seed, device, ids="dynamic"), _module(shape, settings.seed, device)
    # All known ids have rows, in the order in which they come.
    for part in ids.known.split(shape.bags * shape.length):
        step_of(dynamic, part.view(-1, 1))
    taken: dict[str, list[float]] = {"dynamic": [], "fixed": []}
    for number in range(1 if settings.interpreter else settings.rounds + 1):
        drawn, rows = ids.of(number)
        turns = [("dynamic", dynamic, drawn), ("fixed", fixed, rows)]
        for name, module, given in turns[:: 1 if number % 2 else -1]:
            if settings.interpreter:
                step_of(module, given)
            else:
                taken[name].append(_step_ms(module, given))
    what = f"{shape.load:.0%} of rows in use, {shape.new:.0%} new ids"
    found: list[dict[str, Any]] = [{"name": f"{name} table, {what}"} for name in taken]
    if not settings.interpreter:
        for one, times in zip(found, taken.values(), strict=True):
            one["ms"] = statistics.median(times[1:])
        pairs = zip(taken["fixed"][1:], taken["dynamic"][1:], strict=True)
        found[0]["fixed_over_dynamic"] = statistics.median(theirs / ours for theirs, ours in pairs)
    return found


def _step_ms(module: Module, ids: Tensor) -> float:
    """One step, on the clock of the device. New ids are new once, so nothing runs beforehand."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step_of(module, ids)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _growth(shape: Shape, settings: Settings, device: torch.device) -> dict[str, Any]:
    module, taken = _module(shape, settings.seed, device, ids="dynamic"), list[float]()
    batches = Ids(shape, settings.seed).known.split(shape.bags * shape.length)
    for part in batches[:-1] if len(batches) > 1 else batches:
        given = part.view(-1, 1)
        if settings.interpreter:
            step_of(module, given)
        else:
            taken.append(_step_ms(module, given))
    one: dict[str, Any] = {"name": f"dynamic table that fills, {shape.rows:,} rows"}
    if not settings.interpreter:
        one |= {"ms": statistics.median(taken), "longest_over_median": max(taken) / statistics.median(taken)}
    return one
