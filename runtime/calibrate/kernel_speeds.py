# SPDX-License-Identifier: Apache-2.0
"""How fast this processor looks up and updates rows, packs ids, copies, multiplies and reads files, on one thread.

These are the constants of the planner (runtime/planner/constants.py). Each kernel is timed over widths, bags and skews
in turns, between passes over a buffer that put rows out of the cache, as the model does in a step.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from sennit.runtime.backend.torch_versions import HashStore
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Precision, ShardSpec
from sennit.runtime.model.inputs import ModelInputs
from sennit.runtime.planner import dense
from sennit.runtime.planner.constants import (
    CONTENTION_MAX,
    MOMENTUM,
    OPTIMIZERS,
    PHASES,
    Constants,
    Gemm,
    Ids,
    Kernel,
    Memory,
    OptimizerStep,
    Overhead,
    Replicas,
    as_json,
    cores_here,
)
from sennit.runtime.planner.one_thread import one_thread
from sennit.runtime.sharded import Features, PhaseClock, ShardedEmbeddingBags, Table
from sennit.runtime.sharded.batch_parts import joined
from sennit.runtime.sharded.dealing import dealt
from sennit.runtime.sharded.replicated import SparseAllReduce
from sennit.runtime.sharded.shards import Shards
from sennit.runtime.sharded.slices import Slices
from sennit.runtime.sharded.wire import Wire

TURNS: Final = 5
# More than a second-level cache holds.
FLUSH_BYTES: Final = 8 << 20
# More than malloc keeps by itself (M_MMAP_THRESHOLD, at most 32 MiB).
FRESH_BYTES: Final = 64 << 20
# Widths; (bags, ids of each); rows: many, or so few that they stay in a cache. Together two kinds of skew.
WIDTHS: Final = (16, 64, 128)
BAGS: Final = ((4_096, 1), (1_024, 10), (256, 64))
ROWS: Final = (200_000, 100)
# Of optimizers: their states take up to three times the memory of a table. All rows of a batch are distinct.
STEP_ROWS, STEP_BAGS, STEP_WIDTHS = 100_000, 4_096, (16, 128)
# Tables and slices of steps so small that the library's own work is all there is.
STEPS: Final = ((4, 2), (24, 2), (24, 8))
REPLICATED: Final = (4, 24)
# A program that keeps a core busy until it is killed.
BUSY: Final = """
import numpy as np
source, target, square = np.zeros(4 << 20, np.uint8), np.zeros(4 << 20, np.uint8), np.ones((256, 256), np.float32)
print("busy", flush=True)
while True:
    np.copyto(target, source)
    square @ square
"""
FILE_ROWS, FILE_ROW_BYTES = 2_000, 512
GEMM_SMALL, GEMM_LARGE = 16, 512
# The library's names of the phases.
CLOCKED: Final = {
    "ids": ("input exchange",),
    "lookup": ("lookup",),
    "update": ("sparse update",),
}


def measure(folder: Path | None = None, *, has_contention: bool = True) -> dict[str, Any]:
    """The part `kernels` of a calibration file, in a few seconds. `folder`: of the file tier; None: a temporary one.

    `has_contention`: False if ranks measure that afterwards (`core_sharing`), which is better.
    """
    with one_thread():
        lookup, update = _tables()
        optimizers = _optimizers()
        with tempfile.TemporaryDirectory(prefix="sennit-calibrate-", dir=folder) as there:
            memory = _memory(Path(there))
        constants = Constants(
            lookup=lookup,
            update=update,
            optimizers=optimizers,
            ids=_ids(),
            overhead=_overhead(),
            replicas=_replicas(),
            memory=memory,
            gemm=_gemm(),
            contention=_contention() if has_contention else 1.0,
        )
    return as_json(constants)


def _time(
    calls: Sequence[Callable[[], object]], *, flushes: bool = False, clock: Callable[[], float] = time.thread_time
) -> list[float]:
    """Median seconds of each call. They take turns, so that a disturbance of the machine hits all of them.

    `clock`: processor time, in which other work on the machine has no part, unless calls wait for something.
    """
    buffer = np.zeros(FLUSH_BYTES if flushes else 1, np.uint8)
    times: list[list[float]] = [[] for _ in calls]
    was_on = gc.isenabled()
    gc.disable()
    try:
        for turn in range(TURNS + 1):
            for number, call in enumerate(calls):
                buffer[:] = turn
                begin_s = clock()
                call()
                if turn:  # the first one touches memory
                    times[number].append(clock() - begin_s)
    finally:
        if was_on:
            gc.enable()
    return [statistics.median(found) for found in times]


def _tables() -> tuple[dict[str, Kernel], dict[str, Kernel]]:
    """Lookup and update by precision: constants that are nearest to the times, in ratios."""
    optimizer = OptimizerSpec(kind=Optimizer.ROW_WISE_ADAGRAD)
    generator = torch.Generator().manual_seed(1)
    lookup, update = {}, {}
    for precision in Precision:
        calls: list[Callable[[], object]] = []
        rows: list[tuple[float, ...]] = []
        for dim in WIDTHS:
            for row_count in ROWS:
                spec = ShardSpec(name="t", row_count=row_count, dim=dim, precision=precision)
                engine = EmbeddingEngine([spec], optimizer)
                for bags, length in BAGS:
                    ids = torch.randint(row_count, (bags * length,), generator=generator, dtype=torch.int32)
                    batch = Batch(
                        table_of_block=(0,),
                        bags_of_block=(bags,),
                        lengths=torch.full((bags,), length, dtype=torch.int32),
                        values=ids,
                        slice_of_block=(0,),
                    )
                    gradient = torch.randn(bags * dim, generator=generator) * 1e-3
                    calls += [_lookup(engine, batch), _update(engine, batch, gradient)]
                    distinct = len(np.unique(ids.numpy()))
                    rows.append((bags, bags * dim, len(ids), len(ids) * dim, distinct, distinct * dim))
        times = _time(calls, flushes=True)
        name = precision.name.lower()
        lookup[name] = Kernel(**_fitted(Kernel, np.array(rows), np.array(times[::2])))
        update[name] = Kernel(**_fitted(Kernel, np.array(rows), np.array(times[1::2])))
    return lookup, update


def _optimizers() -> dict[str, OptimizerStep]:
    """What each takes more than row-wise AdaGrad, with which `_tables` times updates. The two take turns."""
    ids = torch.randperm(STEP_ROWS, generator=torch.Generator().manual_seed(3))[:STEP_BAGS].to(torch.int32)
    batch = Batch(
        table_of_block=(0,),
        bags_of_block=(STEP_BAGS,),
        lengths=torch.ones(STEP_BAGS, dtype=torch.int32),
        values=ids,
        slice_of_block=(0,),
    )
    found = {Optimizer.ROW_WISE_ADAGRAD.value: OptimizerStep(row_s=0.0, row_element_s=0.0)}
    for name in OPTIMIZERS:
        if name in found:
            continue
        spec = OptimizerSpec(kind=Optimizer.SGD, momentum=0.9) if name == MOMENTUM else OptimizerSpec.named(name)
        more = []
        for dim in STEP_WIDTHS:
            gradient = torch.full((STEP_BAGS * dim,), 1e-3)
            table = ShardSpec(name="t", row_count=STEP_ROWS, dim=dim)
            engines = [EmbeddingEngine([table], optimizer) for optimizer in (OptimizerSpec(), spec)]
            usual, own = _time([_update(engine, batch, gradient) for engine in engines], flushes=True)
            more.append((own - usual) / STEP_BAGS)
        row_element_s = (more[1] - more[0]) / (STEP_WIDTHS[1] - STEP_WIDTHS[0])
        found[name] = OptimizerStep(row_s=more[0] - STEP_WIDTHS[0] * row_element_s, row_element_s=row_element_s)
    return found


def _lookup(engine: EmbeddingEngine, batch: Batch) -> Callable[[], object]:
    return lambda: engine.lookup(batch)


def _update(engine: EmbeddingEngine, batch: Batch, gradient: Any) -> Callable[[], object]:
    return lambda: engine.update(batch, gradient, rate=1e-6)


def _fitted(kind: type[Any], rows: np.ndarray, times: np.ndarray) -> dict[str, float]:
    """Constants by field, none negative, with the least squares of ratios."""
    values = non_negative(rows / times[:, None], np.ones(len(times)))
    return {one.name: float(value) for one, value in zip(dataclasses.fields(kind), values, strict=True)}


def non_negative(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The x >= 0 for which |rows x - wanted| is least, by coordinate descent."""
    scale = np.sqrt((rows**2).sum(0))
    scale[scale == 0] = 1.0
    gram, right = (rows / scale).T @ (rows / scale), (rows / scale).T @ wanted
    found = np.zeros(len(scale))
    for _ in range(5_000):
        before = found.copy()
        for place in range(len(found)):
            rest = right[place] - gram[place] @ found + gram[place, place] * found[place]
            found[place] = max(0.0, rest / max(gram[place, place], 1e-30))
        if np.abs(found - before).max() < 1e-12 * max(np.abs(found).max(), 1e-30):
            break
    result: np.ndarray = found / scale
    return result


def _ids() -> Ids:
    """Ids as they come, int64, checked and packed to int32; and dealt to row shards."""
    bags, length, shards = 4_096, 16, 8
    values = torch.randint(100_000, (bags * length,), generator=torch.Generator().manual_seed(2))
    lengths = torch.full((bags,), length, dtype=torch.int32)
    table = Table(name="dealt", rows=100_000, dim=1, row_shards=shards)

    def packed() -> object:
        values.aminmax()
        return joined([values], torch.int32)

    ones = torch.ones(bags, dtype=torch.int32)
    short = values[:bags].contiguous()
    pack, deal, deal_short = _time(
        [packed, lambda: dealt(table, lengths, values), lambda: dealt(table, ones, short)], flushes=True
    )
    dealt_id_s = max(deal - deal_short, 0.0) / (len(values) - len(short))
    return Ids(
        id_s=pack / len(values),
        dealt_id_s=dealt_id_s,
        dealt_bag_s=max(deal_short - dealt_id_s * bags, 0.0) / bags / shards,
    )


def _overhead() -> dict[str, Overhead]:
    """Steps of a module on one rank, with a sample in each slice."""
    made_here = not dist.is_initialized()
    if made_here:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        found: list[dict[str, float]] = []
        for count, slices in STEPS:
            found.append(_small_steps(count, slices))
    finally:
        if made_here:
            dist.destroy_process_group()
    rows = np.array([(1, count, count * slices) for count, slices in STEPS], np.float64)
    result = {}
    for phase in PHASES:
        times = np.array([max(one[phase], 1e-9) for one in found])
        result[phase] = Overhead(**_fitted(Overhead, rows, times))
    return result


def _small_steps(count: int, slices: int) -> dict[str, float]:
    clock, rows = PhaseClock(), 64
    tables = [Table(name=f"t{number}", rows=rows, dim=16) for number in range(count)]
    module = ShardedEmbeddingBags(tables, lr=1e-6, slices=slices, gradients="sum", clock=clock)
    features = Features(
        lengths=torch.ones(count, slices, dtype=torch.int32),
        values=torch.arange(count * slices) % rows,
    )
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for turn in range(4 * TURNS):
        before = dict(clock.seconds)
        total = torch.stack(list(module(features).values())).sum()
        total.backward()  # type: ignore[no-untyped-call]
        if turn < TURNS:
            continue
        for phase, names in CLOCKED.items():
            times[phase].append(sum(clock.seconds.get(name, 0.0) - before.get(name, 0.0) for name in names))
    return {phase: statistics.median(values) for phase, values in times.items()}


class _Doubled(Wire):
    """The wire of a rank whose only peer does the same: it receives what it sends, so only Python takes time."""

    def all_gather(self, kind: str, own: Any, sizes: Sequence[int]) -> Any:
        return torch.cat([own, own])


def _replicas() -> Replicas:
    """What tables on all ranks take in a step of two ranks, with a sample in each."""
    optimizer = OptimizerSpec(kind=Optimizer.ROW_WISE_ADAGRAD)
    wire, slices = _Doubled(rank=0, world_size=2, group=None), Slices(count=2, rank=0, world_size=2)
    calls: list[Callable[[], object]] = []
    for count in REPLICATED:
        engine = EmbeddingEngine([ShardSpec(name=f"t{n}", row_count=64, dim=16) for n in range(count)], optimizer)
        batch = Batch(
            table_of_block=tuple(range(count)),
            bags_of_block=(1,) * count,
            lengths=torch.ones(count, dtype=torch.int32),
            values=torch.zeros(count, dtype=torch.int32),
            slice_of_block=(0,) * count,
        )
        calls.append(_replicated(SparseAllReduce(Shards(engine, range(count)), slices, wire), engine, batch))
    few, many = _time(calls)
    table_s = max(many - few, 0.0) / (REPLICATED[1] - REPLICATED[0])
    return Replicas(step_s=max(few - REPLICATED[0] * table_s, 0.0), table_s=table_s)


def _replicated(reduction: SparseAllReduce, engine: EmbeddingEngine, batch: Batch) -> Callable[[], object]:
    gradient = torch.zeros(16 * len(batch.lengths))

    def call() -> None:
        engine.lookup(batch)
        engine.update(*reduction.of_all(batch, gradient, before=None), rate=1e-6)

    return call


def _memory(folder: Path) -> Memory:
    """Copies in memory, and rows of a file that are read and written at random places."""
    # Exchanges pack what they send to memory that was used before; very large ones to new pages.
    source = torch.zeros(FLUSH_BYTES // 4)
    copy = _time([lambda: joined([source], torch.float32)], flushes=True)[0] / FLUSH_BYTES
    places = np.random.default_rng(3).permutation(FILE_ROWS)
    path = folder / "rows"
    path.write_bytes(bytes(FILE_ROWS * FILE_ROW_BYTES))
    file = os.open(path, os.O_RDWR)
    try:
        os.fsync(file)

        def through(size: int) -> Callable[[], object]:
            def call() -> None:
                for place in places:
                    at = int(place) * FILE_ROW_BYTES
                    os.pwrite(file, os.pread(file, size, at), at)
                os.fdatasync(file)

            return call

        small, large = _time([through(64), through(FILE_ROW_BYTES)], clock=time.perf_counter)
    finally:
        os.close(file)
    byte_s = max(large - small, 0.0) / FILE_ROWS / (FILE_ROW_BYTES - 64)
    return Memory(
        copy_byte_s=copy,
        fresh_byte_s=_fresh_byte_s(),
        file_row_s=max(small / FILE_ROWS - 64 * byte_s, 0.0),
        file_byte_s=byte_s,
    )


def _fresh_byte_s() -> float:
    """Seconds that a byte of new pages takes: a tensor whose pages come from the kernel, less one that is kept."""
    kept = torch.zeros(FRESH_BYTES // 4)

    def new() -> None:
        torch.empty(len(kept)).zero_()

    fresh, again = _time([new, kept.zero_])
    return max(fresh - again, 0.0) / kept.nbytes


def _contention() -> float:
    """A pass of a model while every other core copies and multiplies, over one while they do nothing."""
    inputs = ModelInputs(
        dense_count=13,
        tables=tuple(Table(name=f"t{n}", rows=1, dim=32) for n in range(26)),
        bottom=(64,),
        top=(128,),
        seed=1,
    )

    def passes() -> float:
        return dense.measure("dlrm", inputs, slices=Slices(count=1, rank=0, world_size=1), batch=1024).slice_s

    others = cores_here() - 1
    if not others:
        return 1.0
    alone = min(passes(), passes())
    busy = [
        subprocess.Popen(
            [sys.executable, "-c", BUSY], env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, stdout=subprocess.PIPE
        )
        for _ in range(others)
    ]
    try:
        for process in busy:
            assert process.stdout is not None
            process.stdout.readline()
        return min(max(min(passes(), passes()) / alone, 1.0), CONTENTION_MAX)
    finally:
        for process in busy:
            process.kill()
            process.communicate()


def _gemm() -> Gemm:
    """A large product, and one so small that its call is all there is."""
    pairs = [(torch.randn(size, size), torch.randn(size, size)) for size in (GEMM_SMALL, GEMM_LARGE)]
    small, large = _time([_product(*pair) for pair in pairs])
    return Gemm(flop_s=large / (2 * GEMM_LARGE**3), operator_s=small)


def _product(left: Any, right: Any) -> Callable[[], object]:
    return lambda: left @ right
