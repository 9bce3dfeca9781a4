# SPDX-License-Identifier: Apache-2.0
"""The engine over a cache and a file against the engine in memory: equal bits, for all optimizers and precisions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.checks import GradientError, IdError
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Pooling, Precision, Rounding, ShardSpec
from sennit.runtime.memory import store
from sennit.runtime.memory.errors import NoRoom
from sennit.runtime.memory.layout import Arrays
from sennit.runtime.memory.on_device import DeviceTables
from sennit.runtime.memory.tiered import CachedTables, TieredTables, layout_of
from sennit.transport.errors import ConfigError
from tests.runtime.embedding_cases import OPTIMIZERS

ROWS = (3_000, 0, 1_000)


def batch_of(rng: np.random.Generator, pooling: Pooling) -> Batch:
    """Two blocks for one table and one for another. Low ids are frequent."""
    bags = (20, 10, 15)
    lengths = rng.integers(0, 5, sum(bags))
    ids = [
        (rows * rng.random(int(part.sum())) ** 3).astype(np.int64)
        for rows, part in zip((ROWS[0], ROWS[2], ROWS[0]), np.split(lengths, np.cumsum(bags)[:-1]), strict=True)
    ]
    return Batch(
        table_of_block=(0, 2, 0),
        bags_of_block=bags,
        lengths=torch.from_numpy(lengths),
        values=torch.from_numpy(np.concatenate(ids)),
        pooling=pooling,
    )


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "nesterov"])
def test_tables_on_a_file_train_to_the_bits_of_tables_in_memory(
    tmp_path: Path, name: str, precision: Precision, rounding: Rounding, rng: np.random.Generator
) -> None:
    """The random numbers of rounding depend on table and row, not on the row's place in the cache."""
    specs = [
        ShardSpec(name=f"table{n}", row_count=rows, dim=12, precision=precision, first_row=(1 << 33) * n)
        for n, rows in enumerate(ROWS)
    ]
    optimizer = OPTIMIZERS[name]
    memory = EmbeddingEngine(specs, optimizer, implementation_name="native", rounding=rounding, seed=3)
    for spec in specs:
        memory.weight(spec.name).copy_(torch.from_numpy(rng.standard_normal((spec.row_count, 12))))

    def whole() -> Arrays:
        """Returns all rows and states in memory, as the store's parts."""
        weights = torch.cat([memory.weight(spec.name) for spec in specs])
        parts = {"weight": weights.view(torch.uint16) if precision is Precision.BF16 else weights}
        for name in optimizer.states:
            parts[name] = torch.cat([memory.states(spec.name)[name] for spec in specs]).reshape(sum(ROWS), -1)
        return {name: part.numpy() for name, part in parts.items()}

    initial = whole()
    layout = layout_of(specs, optimizer)
    path = tmp_path / "rows"
    rows = store.create(
        path, layout, lambda first, n: {name: part[first : first + n] for name, part in initial.items()}
    )
    tiered = TieredTables(specs, optimizer, rows, line_count=192, spare_count=200, rounding=rounding, seed=3)
    steps = [batch_of(rng, Pooling.NONE if number % 4 == 3 else Pooling.SUM) for number in range(30)]
    ahead = tiered.prefetch(steps[0])
    for number, batch in enumerate(steps):
        current, ahead = ahead, tiered.prefetch(steps[(number + 1) % len(steps)])
        expected = memory.lookup(batch)
        assert torch.equal(tiered.lookup(current), expected)
        memory.update(batch, expected.cos(), rate=0.1)
        tiered.update(current, expected.cos(), rate=0.1)
    tiered.release(ahead)
    assert tiered.flush() == 1
    assert tiered.cache.counters["evictions"] > 100
    tiered.cache.close()
    rows.close()
    with store.open_store(path, layout) as again:
        assert again.tag == len(steps)
        for name, part in again.read(np.arange(layout.row_count)).items():
            np.testing.assert_array_equal(part.view(np.uint8), whole()[name].view(np.uint8), name)


def test_mistakes_are_named(rng: np.random.Generator) -> None:
    spec = ShardSpec(name="ads", row_count=100, dim=4, precision=Precision.FP16)
    optimizer = OptimizerSpec(kind=Optimizer.SGD)
    layout = layout_of([spec], optimizer)
    rows = store.in_dram(layout, {"weight": np.zeros((100, 4), np.float16)})
    with pytest.raises(ConfigError, match="2 dims and precisions"):
        layout_of([spec, ShardSpec(name="users", row_count=1, dim=8)], optimizer)
    with pytest.raises(ConfigError, match="other tables or parts"):
        TieredTables([spec], OptimizerSpec(), rows, line_count=32, spare_count=0)
    with pytest.raises(ConfigError, match="triton"):
        TieredTables([spec], optimizer, rows, line_count=32, spare_count=0, implementation_name="triton")
    tiered = TieredTables([spec], optimizer, rows, line_count=32, spare_count=0)
    batch = Batch(table_of_block=(0,), bags_of_block=(1,), lengths=torch.tensor([1]), values=torch.tensor([100]))
    with pytest.raises(IdError, match="ads"):
        tiered.prefetch(batch)


@pytest.mark.parametrize("implementation_name", ["native", "reference"])
def test_a_gradient_that_is_not_finite_is_told_by_its_table_and_row(implementation_name: str) -> None:
    specs = [ShardSpec(name=name, row_count=100, dim=4) for name in ("ads", "users")]
    optimizer = OptimizerSpec(kind=Optimizer.SGD)
    rows = store.in_dram(layout_of(specs, optimizer), {"weight": np.ones((200, 4), np.float32)})
    with TieredTables(
        specs, optimizer, rows, line_count=64, spare_count=0, implementation_name=implementation_name
    ) as tiered:
        batch = Batch(
            table_of_block=(0, 1), bags_of_block=(1, 2), lengths=torch.ones(3).int(), values=torch.tensor([5, 77, 8])
        )
        ahead = tiered.prefetch(batch)
        tiered.lookup(ahead)
        gradient = torch.ones(12)
        gradient[5] = torch.inf
        with pytest.raises(GradientError, match="of 1 rows is not finite, first table users row 77"):
            tiered.update(ahead, gradient, rate=0.5)
        now = tiered.cache.read(np.array([5, 177, 108]))["weight"]
        np.testing.assert_array_equal(now[:, 0], [0.5, 1, 0.5])


@pytest.fixture
def there() -> DeviceTables:
    """40 lines on a "device" for 100 rows. Row n of the store has weights n."""
    spec, optimizer = ShardSpec(name="ads", row_count=100, dim=2, first_row=1000), OptimizerSpec(kind=Optimizer.ADAGRAD)
    layout = layout_of([spec], optimizer)
    weights = np.repeat(np.arange(100, dtype=np.float32), 2).reshape(100, 2)
    rows = store.in_dram(layout, {"weight": weights, "sum": np.ones((100, 2), np.float32)})
    host = CachedTables([spec], optimizer, rows, line_count=64, spare_count=0)
    return DeviceTables(host, line_count=40, device=torch.device("cpu"))


def test_rows_that_were_to_begin_on_a_device_are_read_anew_if_they_do_not(there: DeviceTables) -> None:
    """Nobody has read them from the store, so what has come to the device is nothing."""
    table, ids = torch.zeros(2, dtype=torch.int64), torch.tensor([7, 8])
    refused = there.prefetch(table, ids, {0: torch.tensor([8])})
    refused.lines(10.0)
    refused.release(is_dirty=False)
    again = there.prefetch(table, ids)
    assert there.memory[0].weight[again.lines(10.0), 0].tolist() == [7, 8]
    again.release(is_dirty=False)
    there.close()


def test_rows_that_begin_on_a_device_are_on_the_host_before_their_batch_ends(there: DeviceTables) -> None:
    """Rows that leave a dynamic table are read there, also those of a batch that has no backward pass yet."""
    table, ids = torch.zeros(2, dtype=torch.int64), torch.tensor([7, 8])
    begins = there.prefetch(table, ids, {0: ids})
    there.begin(begins.lines(10.0), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    now = there.cache.read(ids.numpy(), is_between=True)
    np.testing.assert_array_equal(now["weight"], [[1, 2], [3, 4]])
    np.testing.assert_array_equal(now["sum"], np.zeros((2, 2)))
    begins.release(is_dirty=True)
    there.close()


def test_loose_rows_have_lines_of_their_own_on_a_device_until_their_batch_ends(there: DeviceTables) -> None:
    numbers = torch.tensor([1100, 1101, 1100])
    loose = there.loose(numbers - 1000, numbers)
    lines = loose.lines(10.0)
    assert lines[0] == lines[2] != lines[1]
    assert there.row_numbers[lines].tolist() == numbers.tolist()
    rows = there.prefetch(torch.zeros(38, dtype=torch.int64), torch.arange(38))
    assert not set(lines.tolist()) & set(rows.lines(10.0).tolist())
    full = there.loose(numbers, numbers)
    with pytest.raises(NoRoom, match="a batch needs 2 rows, other batches hold 40; the device has 40 lines"):
        full.lines(10.0)
    full.release(is_dirty=False)
    loose.release(is_dirty=True)
    more = there.prefetch(torch.zeros(2, dtype=torch.int64), torch.tensor([50, 51]))
    assert there.memory[0].weight[more.lines(10.0), 0].tolist() == [50, 51]
    assert there.last_line == 40
    there.close()
