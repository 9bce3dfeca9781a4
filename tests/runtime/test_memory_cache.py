# SPDX-License-Identifier: Apache-2.0
"""Training over a cache of a few rows gives the bits that training in memory gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sennit.runtime.memory import store
from sennit.runtime.memory.cache import CachedBatch, RowCache
from sennit.runtime.memory.errors import NoRoom
from sennit.runtime.memory.layout import Arrays, RowPart, StoreLayout
from sennit.transport.errors import ArgumentError

DIM = 12
ROWS = 5_000
LAYOUT = StoreLayout(
    tables=(("ads", ROWS - 1_000), ("users", 1_000)),
    parts=(RowPart(name="weight", columns=DIM), RowPart(name="sum", columns=1)),
)


def step(weight: torch.Tensor, state: torch.Tensor, rows: NDArray[np.int64], gradient: torch.Tensor) -> None:
    """Row-wise AdaGrad on distinct `rows` of these arrays."""
    place = torch.from_numpy(rows)
    state[place] += gradient.square().mean(1)
    weight[place] -= gradient * (0.1 / (state[place].sqrt() + 1e-8)).unsqueeze(1)


def batches(rng: np.random.Generator, count: int) -> list[NDArray[np.int64]]:
    """Returns distinct rows, some much more frequent than others."""
    return [np.unique((ROWS * rng.random(200) ** 3).astype(np.int64)) for _ in range(count)]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("home", ["file", "dram"])
def test_training_over_a_cache_equals_training_in_memory(
    tmp_path: Path, policy: str, home: str, rng: np.random.Generator
) -> None:
    initial: Arrays = {
        "weight": rng.standard_normal((ROWS, DIM)).astype(np.float32),
        "sum": np.zeros((ROWS, 1), np.float32),
    }
    weight, state = torch.from_numpy(initial["weight"].copy()), torch.zeros(ROWS)
    path = tmp_path / "rows"
    if home == "file":
        rows = store.create(
            path, LAYOUT, lambda first, count: {name: array[first : first + count] for name, array in initial.items()}
        )
    else:
        rows = store.in_dram(LAYOUT, initial)
    steps = batches(rng, 80)
    with rows, RowCache(rows, line_count=512, spare_count=400, policy=policy) as cache:
        lines = {name: torch.from_numpy(array) for name, array in cache.arrays.items()}
        ahead: list[CachedBatch] = [cache.prefetch(steps[0])]
        for number, wanted in enumerate(steps):
            if number + 1 < len(steps):
                ahead.append(cache.prefetch(steps[number + 1]))
            batch = ahead.pop(0)
            at = batch.wait()
            np.testing.assert_array_equal(cache.arrays["weight"][at], weight[wanted].numpy())
            # A gradient that depends on the weights, as real ones do.
            step(lines["weight"], lines["sum"].view(-1), at, lines["weight"][at].sin())
            step(weight, state, wanted, weight[wanted].sin())
            batch.release(is_dirty=True)
            if number == 40:
                cache.flush(number)
            if number == 60:
                # Some rows are in cache lines, some in the log, some in the base. The next batch is already pinned.
                now = cache.read(np.arange(ROWS))
                np.testing.assert_array_equal(now["weight"], weight.numpy())
                np.testing.assert_array_equal(now["sum"][:, 0], state.numpy())
        assert cache.flush(80) == 2
        counters = cache.counters
        assert counters["hits"] + counters["misses"] == sum(map(len, steps))
        assert counters["evictions"] > 1_000
        assert counters["write_backs"] > 0
        with pytest.raises(ArgumentError, match="used by a cache"):
            rows.read(np.arange(3))
        cache.close()
        found = rows.read(np.arange(ROWS))
        np.testing.assert_array_equal(found["weight"], weight.numpy())
        np.testing.assert_array_equal(found["sum"][:, 0], state.numpy())
    if home == "file":
        with store.open_store(path, LAYOUT) as again:
            np.testing.assert_array_equal(again.read(np.arange(ROWS))["weight"], weight.numpy())


def hits_of(policy: str, seed: int, days: list[tuple[int, int, int]]) -> float:
    """The share of hits in the last hundred of these batches: rows from `first` to `end`, so many batches each."""
    layout = StoreLayout(tables=(("ids", 20_000),), parts=(RowPart(name="weight", columns=1),))
    rows = store.in_dram(layout, {"weight": np.zeros((20_000, 1), np.float32)})
    rng = np.random.default_rng(seed)
    with RowCache(rows, line_count=2_048, policy=policy) as cache:
        wanted = [rng.integers(first, end, 256) for first, end, count in days for _ in range(count)]
        for number, batch in enumerate(wanted):
            if number == len(wanted) - 100:
                before = cache.counters
            fetched = cache.prefetch(batch)
            fetched.wait()
            fetched.release(is_dirty=False)
        counted = {name: count - before[name] for name, count in cache.counters.items()}
    return counted["hits"] / (counted["hits"] + counted["misses"])


def test_rows_of_yesterday_make_room(seed: int) -> None:
    """The hot rows of a day fit into the cache. Without ageing, LFU would keep half of its hits."""
    yesterday, today = (0, 1_500, 500), (5_000, 6_500, 1_500)
    assert hits_of("lfu", seed, [yesterday, today]) > 0.97
    assert hits_of("lru", seed, [yesterday, today]) > 0.99


def test_rows_that_repeat_share_a_line(rng: np.random.Generator) -> None:
    rows = store.in_dram(LAYOUT, {"weight": np.zeros((ROWS, DIM), np.float32), "sum": np.zeros((ROWS, 1), np.float32)})
    wanted = rng.integers(0, 50, 1_000)
    with RowCache(rows, line_count=1024, policy="lru") as cache:
        batch = cache.prefetch(wanted)
        lines = batch.wait()
        for row in np.unique(wanted):
            assert len(np.unique(lines[wanted == row])) == 1
        assert len(np.unique(lines)) == len(np.unique(wanted))
        # Row r of set s is in one of the 32 lines of that set.
        assert all(line // 32 == cache.set_of(int(row)) for row, line in zip(wanted, lines, strict=True))
        batch.release(is_dirty=False)
        cache.flush()
        assert cache.counters["lookups"] == 1_000
        assert cache.counters["write_backs"] == 0


def test_conflicts_take_spare_lines_and_are_counted() -> None:
    rows = store.in_dram(LAYOUT, {"weight": np.zeros((ROWS, DIM), np.float32), "sum": np.zeros((ROWS, 1), np.float32)})
    with RowCache(rows, line_count=32, spare_count=8) as cache:
        batch = cache.prefetch(np.arange(40))
        lines = batch.wait()
        assert sorted(lines) == list(range(40))
        cache.arrays["weight"][lines] = np.arange(40, dtype=np.float32)[:, None]
        again = cache.prefetch(np.arange(32, 40))
        batch.release(is_dirty=True)
        # The next batch finds rows in spare lines.
        assert set(again.wait()) <= set(lines)
        again.release(is_dirty=False)
        cache.flush()
        assert cache.counters["conflicts"] == 8
        cache.close()
    np.testing.assert_array_equal(rows.read(np.arange(40))["weight"][:, 0], np.arange(40))


def test_arguments_are_checked() -> None:
    rows = store.in_dram(LAYOUT, {"weight": np.zeros((ROWS, DIM), np.float32), "sum": np.zeros((ROWS, 1), np.float32)})
    for line_count in (0, 31, 33):
        with pytest.raises(ArgumentError, match="multiples of 32"):
            RowCache(rows, line_count=line_count)
    with pytest.raises(ArgumentError, match="policy 'random'; allowed: lfu, lru"):
        RowCache(rows, line_count=32, policy="random")
    with RowCache(rows, line_count=32) as cache:
        with pytest.raises(ArgumentError, match=r"row 5000 at position 1; allowed: 0 to 5000, that excluded"):
            cache.prefetch(np.array([4999, 5000]))
        with pytest.raises(ArgumentError, match="used by a cache"):
            RowCache(rows, line_count=32)
        batch = cache.prefetch(np.arange(40))
        with pytest.raises(
            NoRoom, match="a batch needs 40 rows, other batches hold 0; the cache has 32 lines in sets of"
        ):
            batch.wait()
        batch.release(is_dirty=False)
        smaller = cache.prefetch(np.arange(32))
        assert sorted(smaller.wait()) == list(range(32))
        assert (cache.arrays["weight"] == 0).all()
        smaller.release(is_dirty=False)
        cache.flush()
        assert (cache.counters["batches"], cache.counters["misses"]) == (1, 32)


def test_counters_can_be_read_while_batches_are_released() -> None:
    """The cache's thread must release a batch without the GIL: readers hold the GIL and wait for that thread."""
    rows = store.in_dram(LAYOUT, {"weight": np.zeros((ROWS, DIM), np.float32), "sum": np.zeros((ROWS, 1), np.float32)})
    wanted = np.arange(20)
    with RowCache(rows, line_count=32) as cache:
        for number in range(2_000):
            batch = cache.prefetch(wanted)
            batch.wait()
            batch.release(is_dirty=False)
            del batch
            assert cache.counters["batches"] >= number
