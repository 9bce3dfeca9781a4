# SPDX-License-Identifier: Apache-2.0
"""A cache of float32 rows before a store of fp16 or bf16: against a model in plain Python, and under the engine."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.reference_rounding import rounded
from sennit.runtime.kernels.spec import Precision, Rounding, ShardSpec
from sennit.runtime.memory import store
from sennit.runtime.memory.cache import RowCache
from sennit.runtime.memory.layout import Arrays
from sennit.runtime.memory.store import RowStore, widened
from sennit.runtime.memory.tiered import TieredTables, layout_of
from sennit.transport.errors import ArgumentError, ConfigError
from tests.extent import briefly

ROWS = (700, 0, 300)
DIM = 70  # more columns than a block of random words has, and no whole number of vectors
SEED = 0x0123_4567_89AB_CDEF
NARROW = (Precision.FP16, Precision.BF16)
ROW_WISE_ADAGRAD = OptimizerSpec(kind=Optimizer.ROW_WISE_ADAGRAD)


def specs(precision: Precision) -> tuple[ShardSpec, ...]:
    """One table has no rows, and one is the part of a table beyond 2^32 rows."""
    first_rows = (0, 5, (5 << 32) + 4_294_967_280)
    return tuple(
        ShardSpec(name=f"t{n}", row_count=rows, dim=DIM, precision=precision, first_row=first)
        for n, (rows, first) in enumerate(zip(ROWS, first_rows, strict=True))
    )


def as_array(weights: Tensor) -> NDArray[np.generic]:
    return (weights.view(torch.uint16) if weights.dtype is torch.bfloat16 else weights).numpy()


def as_tensor(array: NDArray[np.generic], precision: Precision) -> Tensor:
    return torch.from_numpy(array).view(precision.dtype)


def home(path: Path | None, precision: Precision, weights: Tensor) -> RowStore:
    """Makes a store with these weights and sums of 0; in memory if `path` is None."""
    parts: Arrays = {"weight": as_array(weights.clone()), "sum": np.zeros((sum(ROWS), 1), np.float32)}
    layout = layout_of(specs(precision), ROW_WISE_ADAGRAD)
    if path is None:
        return store.in_dram(layout, parts)
    return store.create(path, layout, lambda first, n: {name: part[first : first + n] for name, part in parts.items()})


class Model:
    """One set of 32 ways, and spare lines. Evicts the row whose last batch is oldest. Takes one batch at a time."""

    def __init__(self, precision: Precision, rounding: Rounding, stored: Tensor) -> None:
        self.places = [(spec, spec.first_row + row) for spec in specs(precision) for row in range(spec.row_count)]
        self.rounding, self.stored = rounding, stored.clone()
        self.lines: dict[int, Tensor] = {}
        self.ways: list[int] = []
        self.last_batch: dict[int, int] = {}
        self.dirty: set[int] = set()
        self.spares: set[int] = set()
        self.batch = self.write_backs = self.rows_written = self.misses = 0

    def fetch(self, rows: list[int]) -> None:
        self.batch += 1
        leaving = []
        for row in rows:
            if row in self.lines:
                self.last_batch[row] = self.batch
        for row in rows:
            if row in self.lines:
                continue
            self.misses += 1
            way = min(range(len(self.ways)), key=lambda n: self.last_batch[self.ways[n]], default=0)
            if len(self.ways) < 32:
                self.ways.append(row)
            elif self.last_batch[self.ways[way]] == self.batch:
                self.spares.add(row)
            else:
                leaving.append((self.ways[way], self.lines.pop(self.ways[way])))
                self.ways[way] = row
            self.lines[row] = torch.empty(0)  # Its rows come after all others have left.
            self.last_batch[row] = self.batch
        self.write([(row, weights) for row, weights in leaving if row in self.dirty])
        self.dirty -= {row for row, _ in leaving}
        for row in rows:
            if not len(self.lines[row]):
                self.lines[row] = self.stored[row].to(torch.float32)

    def release(self, rows: list[int]) -> None:
        self.dirty |= set(rows)
        self.write([(row, self.lines.pop(row)) for row in rows if row in self.spares])
        self.dirty -= self.spares
        self.spares.clear()

    def flush(self) -> None:
        self.write([(row, self.lines[row]) for row in self.dirty])
        self.dirty.clear()

    def write(self, rows: list[tuple[int, Tensor]]) -> None:
        """Rounds and stores the rows: one write-back."""
        if not rows:
            return
        self.write_backs += 1
        self.rows_written += len(rows)
        for row, weights in rows:
            spec, place = self.places[row]
            at = torch.tensor([place])
            self.stored[row] = rounded(spec, weights[None], at, self.rounding, step=self.write_backs, seed=SEED)[0]


@pytest.mark.parametrize(
    ("on_file", "precision", "rounding"),
    briefly(
        product((False, True), NARROW, Rounding),
        [
            (False, Precision.BF16, Rounding.STOCHASTIC),
            (True, Precision.FP16, Rounding.STOCHASTIC),
            (False, Precision.FP16, Rounding.NEAREST),
            (True, Precision.BF16, Rounding.NEAREST),
        ],
    ),
)
def test_rows_are_rounded_when_they_leave(
    tmp_path: Path, precision: Precision, rounding: Rounding, on_file: bool, rng: np.random.Generator
) -> None:
    """Every value that a batch sees, and every stored bit, equals the model's."""
    start = torch.from_numpy(rng.standard_normal((sum(ROWS), DIM))).to(precision.dtype)
    model = Model(precision, rounding, start)
    with home(tmp_path / "rows" if on_file else None, precision, start) as below:
        wide = widened(below, specs(precision), rounding=rounding, seed=SEED)
        with wide, RowCache(wide, line_count=32, spare_count=30, policy="lru") as cache:
            for number in range(40):
                # Sometimes more rows than the set has lines.
                count = 45 if number % 7 == 3 else 20
                rows = sorted({int(row) for row in sum(ROWS) * rng.random(count) ** 4})
                model.fetch(rows)
                batch = cache.prefetch(np.array(rows))
                lines = batch.wait()
                found = cache.arrays["weight"][lines]
                assert found.dtype == np.float32
                np.testing.assert_array_equal(found, torch.stack([model.lines[row] for row in rows]).numpy())
                # Far smaller than the distance to the next 16-bit number.
                change = torch.from_numpy(rng.standard_normal((len(rows), DIM)).astype(np.float32)) * 1e-4
                for row, part in zip(rows, change, strict=True):
                    model.lines[row] = model.lines[row] + part
                torch.from_numpy(cache.arrays["weight"])[lines] += change
                torch.from_numpy(cache.arrays["sum"])[lines] += 1
                batch.release(is_dirty=True)
                model.release(rows)
                if number % 15 == 14:
                    cache.flush(number)
                    model.flush()
            cache.flush(40)
            model.flush()
            assert cache.counters["misses"] == model.misses
            assert cache.counters["write_backs"] == model.rows_written
            assert 0 < cache.counters["conflicts"] < cache.counters["misses"]
        left = below.read(np.arange(sum(ROWS)))
    np.testing.assert_array_equal(left["weight"], as_array(model.stored))
    assert float(torch.from_numpy(left["sum"]).max()) > 3


def batches(rng: np.random.Generator, count: int) -> list[Batch]:
    made = []
    for _ in range(count):
        lengths = rng.integers(0, 4, 30)
        ids = [
            (rows * rng.random(int(part.sum())) ** 3).astype(np.int64)
            for rows, part in zip((ROWS[0], ROWS[2]), np.split(lengths, [20]), strict=True)
        ]
        made.append(
            Batch(
                table_of_block=(0, 2),
                bags_of_block=(20, 10),
                lengths=torch.from_numpy(lengths),
                values=torch.from_numpy(np.concatenate(ids)),
            )
        )
    return made


def trained(path: Path, line_count: int, steps: list[Batch], start: Tensor) -> tuple[TieredTables, RowStore]:
    below = home(path, Precision.BF16, start)
    tiered = TieredTables(
        specs(Precision.BF16),
        ROW_WISE_ADAGRAD,
        below,
        line_count=line_count,
        spare_count=200,
        rounding=Rounding.STOCHASTIC,
        cache_precision=Precision.FP32,
        seed=SEED,
    )
    ahead = tiered.prefetch(steps[0])
    for number in range(len(steps)):
        current, ahead = ahead, tiered.prefetch(steps[(number + 1) % len(steps)])
        tiered.update(current, tiered.lookup(current).cos() * 1e-3, rate=1e-3)
    tiered.release(ahead)
    return tiered, below


def test_a_cache_that_holds_all_rows_trains_as_float32(tmp_path: Path, rng: np.random.Generator) -> None:
    start = torch.from_numpy(rng.standard_normal((sum(ROWS), DIM))).to(torch.bfloat16)
    steps = batches(rng, 30)
    memory = EmbeddingEngine(specs(Precision.FP32), ROW_WISE_ADAGRAD)
    for spec, part in zip(memory.specs, torch.split(start, list(ROWS)), strict=True):
        memory.weight(spec.name).copy_(part)
    for batch in steps:
        memory.update(batch, memory.lookup(batch).cos() * 1e-3, rate=1e-3)
    tiered, below = trained(tmp_path / "rows", 4096, steps, start)
    with below, tiered:
        now = tiered.cache.read(np.arange(sum(ROWS)))
        wide = torch.cat([memory.weight(spec.name) for spec in memory.specs])
        assert torch.equal(torch.from_numpy(now["weight"]), wide)
        tiered.flush()
        tiered.close()
        found = as_tensor(below.read(np.arange(sum(ROWS)))["weight"], Precision.BF16)
    changed = (wide != start.to(torch.float32)).any(1)
    assert 50 < int(changed.sum()) < sum(ROWS)
    assert torch.equal(found[~changed], start[~changed])
    for number, spec in enumerate(specs(Precision.BF16)):
        rows = slice(sum(ROWS[:number]), sum(ROWS[: number + 1]))
        # The flush is the first write-back.
        numbers = torch.arange(spec.row_count) + spec.first_row
        wanted = rounded(spec, wide[rows], numbers, Rounding.STOCHASTIC, step=1, seed=SEED)
        assert torch.equal(found[rows][changed[rows]], wanted[changed[rows]])


def test_the_same_calls_store_the_same_bits(tmp_path: Path, rng: np.random.Generator) -> None:
    start = torch.from_numpy(rng.standard_normal((sum(ROWS), DIM))).to(torch.bfloat16)
    steps = batches(rng, 30)
    found = []
    for name in ("one", "two"):
        tiered, below = trained(tmp_path / name, 64, steps, start)
        with below, tiered:
            assert tiered.cache.counters["evictions"] > 50
            assert tiered.flush() == 1
            tiered.close()
            found.append(as_tensor(below.read(np.arange(sum(ROWS)))["weight"], Precision.BF16))
    assert torch.equal(*found)
    assert not torch.equal(found[0], start)


def test_mistakes_are_named() -> None:
    start = torch.zeros(sum(ROWS), DIM, dtype=torch.float16)
    below = home(None, Precision.FP16, start)
    with pytest.raises(ArgumentError, match="allowed: 1, of fp16 or bf16"):
        widened(below, specs(Precision.FP32), rounding=Rounding.NEAREST, seed=0)
    with pytest.raises(ArgumentError, match="700 rows of tables over a store of 1000"):
        widened(below, specs(Precision.FP16)[:1], rounding=Rounding.NEAREST, seed=0)
    with pytest.raises(ConfigError, match="a cache of BF16 before tables of FP16; allowed: the same, or FP32"):
        TieredTables(
            specs(Precision.FP16),
            ROW_WISE_ADAGRAD,
            below,
            line_count=32,
            spare_count=0,
            cache_precision=Precision.BF16,
        )
    wide = widened(below, specs(Precision.FP16), rounding=Rounding.NEAREST, seed=0)
    with pytest.raises(ArgumentError, match="used by a cache"):
        below.read(np.arange(3))
    with pytest.raises(ArgumentError, match="row 1000; allowed: below 1000"):
        wide.read(np.array([1000]))
    wide.write(np.array([999]), {"weight": np.full((1, DIM), 1.0001, np.float32), "sum": np.ones((1, 1), np.float32)})
    assert wide.read(np.array([999]))["weight"][0, 0] == 1.0
    wide.close()
    assert below.read(np.array([999]))["weight"][0, 0] == 1.0
