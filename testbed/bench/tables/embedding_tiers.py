# SPDX-License-Identifier: Apache-2.0
"""Lookups and updates of tables larger than memory, beside the same tables in memory.

Rows live in a file (past the page cache, or through it) or in DRAM, which shows the cost of the cache itself. The cache
in front holds a tenth of the rows. One thread computes, another fetches the next batch's rows. Memory and tiers take
turns, step by step, with equal batches. The results of each step must be equal bit for bit.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Rounding, ShardSpec
from sennit.runtime.memory import store
from sennit.runtime.memory.layout import Arrays, StoreLayout
from sennit.runtime.memory.tiered import TieredTables, layout_of
from sennit.runtime.sharded.files import divided

HOMES: Final = ("file", "page-cache", "dram")
OPTIMIZER: Final = OptimizerSpec(kind=Optimizer.ROW_WISE_ADAGRAD)
ZIPF: Final = 1.05
RATE: Final = 0.01
WARM_ROWS: Final = 100_000
"""The share of the most frequent rows that is loaded before the first step."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is trained. Row frequencies follow Zipf's law, in random order."""

    table_count: int = 26
    row_count: int = 100_000
    dim: int = 64
    bags: int = 2_048
    """Samples per table."""

    length: int = 1
    memory_share: float = 0.1
    """Bytes of rows and optimizer states."""

    @property
    def lookup_count(self) -> int:
        return self.table_count * self.bags * self.length

    @property
    def specs(self) -> list[ShardSpec]:
        return [
            ShardSpec(name=f"table_{n:02d}", row_count=self.row_count, dim=self.dim) for n in range(self.table_count)
        ]

    @property
    def layout(self) -> StoreLayout:
        return layout_of(self.specs, OPTIMIZER)

    @property
    def memory_bytes(self) -> int:
        return int(self.layout.row_count * self.layout.row_bytes * self.memory_share)

    def draw(self, order: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Int64 ids [count] of a table whose rows, most frequent first, are `order` [row_count]."""
        weights = torch.arange(1, self.row_count + 1, dtype=torch.float64) ** -ZIPF
        edges = torch.cumsum(weights / weights.sum(), 0)
        drawn = torch.searchsorted(edges, torch.rand(count, generator=generator, dtype=torch.float64))
        return order[drawn.clamp(max=self.row_count - 1)]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Seconds of each step, and mean counts per step."""

    home: str
    access: str
    memory_s: list[float]
    tiers_s: list[float]
    wait_s: list[float]
    misses: float
    reads: float
    bytes_read: float
    bytes_written: float

    @property
    def ratio(self) -> float:
        """Samples/s of the tiers divided by those in memory: the median over steps."""
        return statistics.median(m / t for m, t in zip(self.memory_s, self.tiers_s, strict=True))


def run(folder: Path, load: Load, *, home: str, steps: int, seed: int) -> Result:
    """Creates the file in `folder` and removes it. Raises AssertionError if results differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = folder / f"rows-{seed}"
    try:
        return _run(path, load, home, steps, seed)
    finally:
        torch.set_num_threads(threads)
        path.unlink(missing_ok=True)


def _run(path: Path, load: Load, home: str, steps: int, seed: int) -> Result:
    generator = torch_stream(seed, "bench tiers")
    specs, layout = load.specs, load.layout
    memory = EmbeddingEngine(specs, OPTIMIZER, implementation_name="native", rounding=Rounding.NEAREST)
    for spec in specs:
        memory.weight(spec.name).uniform_(-0.1, 0.1, generator=generator)
    weights = torch.cat([memory.weight(spec.name) for spec in specs]).numpy()
    initial: Arrays = {"weight": weights, "sum": np.zeros((layout.row_count, 1), np.float32)}
    if home == "dram":
        rows, access = store.in_dram(layout, initial), "memory"
    else:
        rows = store.create(
            path,
            layout,
            lambda first, count: {name: part[first : first + count] for name, part in initial.items()},
            access=store.FileAccess(is_direct=home == "file"),
        )
        access = rows.access
        del weights, initial
    ((line_count, spare_count),) = divided(load.memory_bytes, [layout])
    ranks = [torch.randperm(load.row_count, generator=generator) for _ in specs]
    batches = [_batch(load, ranks, generator) for _ in range(steps + 2)]
    gradient = torch.randn(load.table_count * load.bags * load.dim, generator=generator) * 0.01
    with rows, TieredTables(specs, OPTIMIZER, rows, line_count=line_count, spare_count=spare_count) as tiers:
        # Not a cold start: the frequent rows are loaded.
        for warm in torch.cat(
            [
                order[: line_count * 9 // 10 // load.table_count] + layout.first_row(spec.name)
                for spec, order in zip(specs, ranks, strict=True)
            ]
        ).split(WARM_ROWS):  # type: ignore[no-untyped-call]
            some = tiers.cache.prefetch(warm.numpy())
            some.wait()
            some.release(is_dirty=False)
        memory_s, tiers_s, wait_s = [], [], []
        before: dict[str, int] = {}
        ahead = tiers.prefetch(batches[0])
        for number, batch in enumerate(batches[:-1]):
            start = time.perf_counter()
            expected = memory.lookup(batch)
            memory.update(batch, gradient, rate=RATE)
            memory_s.append(time.perf_counter() - start)
            # The next batch is fetched while this batch is computed, not while the trainer in memory has its turn.
            ahead.rows.wait()
            if number == 1:
                before = _counts(tiers, rows, home)
            start = time.perf_counter()
            current, ahead = ahead, tiers.prefetch(batches[number + 1])
            found = tiers.lookup(current)
            tiers.update(current, gradient, rate=RATE)
            computed = time.perf_counter()
            ahead.rows.wait()
            tiers_s.append(time.perf_counter() - start)
            wait_s.append(time.perf_counter() - computed)
            if not torch.equal(found, expected):
                raise AssertionError(f"step {number}: the results of the tiers differ from those in memory")
        after = _counts(tiers, rows, home)
        tiers.release(ahead)
    mean = {name: (after[name] - before[name]) / steps for name in after}
    return Result(
        home=home,
        access=access,
        memory_s=memory_s[1:],
        tiers_s=tiers_s[1:],
        wait_s=wait_s[1:],
        misses=mean["misses"],
        reads=mean.get("reads", 0),
        bytes_read=mean.get("bytes_read", 0),
        bytes_written=mean.get("bytes_written", 0),
    )


def _counts(tiers: TieredTables, rows: store.RowStore, home: str) -> dict[str, int]:
    return tiers.cache.counters | ({} if home == "dram" else rows.counters)


def _batch(load: Load, ranks: list[Tensor], generator: torch.Generator) -> Batch:
    return Batch(
        table_of_block=tuple(range(load.table_count)),
        bags_of_block=(load.bags,) * load.table_count,
        lengths=torch.full((load.table_count * load.bags,), load.length),
        values=torch.cat([load.draw(order, load.bags * load.length, generator) for order in ranks]),
    )
