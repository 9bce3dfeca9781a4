# SPDX-License-Identifier: Apache-2.0
"""Tensor-train tables against the dense contraction in float64 under torch.autograd; specs, checks, initial values."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels import tensor_train_tables
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.checks import GradientError, IdError
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.layout import allocate
from sennit.runtime.kernels.operators import FusedTables
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Bounds, Pooling, Precision, ShardSpec
from sennit.runtime.kernels.tensor_train import TensorTrainSpec, factor_columns, factor_rows, initialise
from sennit.runtime.kernels.tensor_train_tables import bands
from sennit.transport.errors import ArgumentError, ConfigError

SHAPES: list[dict[str, Any]] = [
    {"row_factors": (3, 4, 5), "column_factors": (2, 2, 4), "ranks": (3, 5), "row_count": 53, "dim": 16},
    {"row_factors": (2, 3, 4), "column_factors": (1, 3, 2), "ranks": (1, 1), "row_count": 24, "dim": 6},
    {"row_factors": (1, 1, 1), "column_factors": (1, 1, 1), "ranks": (1, 1), "row_count": 1, "dim": 1},
    {"row_factors": (4, 2, 40), "column_factors": (2, 1, 16), "ranks": (7, 9), "row_count": 311, "dim": 32},
]


def cores_of(engine: EmbeddingEngine, name: str) -> list[Tensor]:
    return [engine.weight(f"{name}.core{number}") for number in (1, 2, 3)]


def engine_of(spec: ShardSpec, *others: ShardSpec, seed: int, **more: Any) -> EmbeddingEngine:
    more = {"optimizer": OptimizerSpec(kind=Optimizer.SGD)} | more
    engine = EmbeddingEngine([spec, *others], **more)
    for name in engine.names:
        start = torch.randn(engine.weight(name).shape, generator=torch_stream(seed, name))
        engine.weight(name).copy_(start)
    return engine


def contracted(spec: TensorTrainSpec, cores: list[Tensor]) -> Tensor:
    """Returns the whole table by torch's own contraction."""
    (d1, d2, d3), (r1, r2) = spec.column_factors, spec.ranks
    whole = torch.einsum(
        "iua,javb,kbw->ijkuvw", cores[0].view(-1, d1, r1), cores[1].view(-1, r1, d2, r2), cores[2].view(-1, r2, d3)
    )
    return whole.reshape(-1, spec.dim)[: spec.row_count]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape['row_count']} x {shape['dim']}")
@pytest.mark.parametrize("pooling", ["sum", "weighted", "mean", "none"])
def test_lookups_and_gradients_equal_the_contraction_in_float64(shape: dict[str, Any], pooling: str, seed: int) -> None:
    spec = TensorTrainSpec(name="t", **shape)
    engine = engine_of(spec, seed=seed)
    generator = torch_stream(seed, pooling)
    lengths = torch.randint(1, 6, (200,), generator=generator)
    count = int(lengths.sum())
    weights = torch.randn(count, generator=generator)
    batch = Batch(
        table_of_block=(0,),
        bags_of_block=(200,),
        lengths=lengths,
        values=torch.randint(spec.row_count, (count,), generator=generator),
        weights=weights if pooling == "weighted" else None,
        pooling=Pooling.SUM if pooling == "weighted" else Pooling(pooling),
    )
    exact = [core.to(torch.float64).requires_grad_() for core in cores_of(engine, "t")]
    exact_weights = weights.to(torch.float64).requires_grad_()
    vectors = contracted(spec, exact)[batch.values]
    if pooling == "weighted":
        vectors = exact_weights.unsqueeze(1) * vectors
    if pooling != "none":
        bags = torch.repeat_interleave(torch.arange(200), lengths)
        vectors = torch.zeros(200, spec.dim, dtype=torch.float64).index_add(0, bags, vectors)
    if pooling == "mean":
        vectors = vectors / lengths.unsqueeze(1)
    found = engine.lookup(batch)
    torch.testing.assert_close(found.to(torch.float64), vectors.detach().flatten(), rtol=1e-4, atol=1e-4)
    gradient = torch.randn(len(found), generator=generator)
    torch.autograd.backward(vectors.flatten(), gradient.to(torch.float64))
    if pooling == "weighted":
        assert exact_weights.grad is not None
        of_weights = engine.weight_gradient(batch, gradient).to(torch.float64)
        torch.testing.assert_close(of_weights, exact_weights.grad, rtol=1e-4, atol=1e-4)
    # At rate 1 SGD subtracts the gradient itself. A large gradient would hide the weights' digits.
    engine.update(batch, gradient, rate=1.0)
    for core, start in zip(cores_of(engine, "t"), exact, strict=True):
        assert start.grad is not None
        scale = float(start.grad.abs().max())
        stepped = (start - start.grad).detach()
        torch.testing.assert_close(core.to(torch.float64), stepped, rtol=1e-4, atol=1e-5 * scale)


def test_rows_that_were_not_looked_up_share_slices_and_change_with_them(seed: int) -> None:
    """The table stays the contraction of its cores, as a whole and in parts."""
    spec = TensorTrainSpec(name="t", **SHAPES[0])
    engine = engine_of(spec, seed=seed)
    whole = engine.materialise("t", 0, spec.row_count)
    torch.testing.assert_close(whole, contracted(spec, cores_of(engine, "t")), rtol=1e-4, atol=1e-4)
    assert torch.equal(engine.materialise("t", 17, 20), whole[17:37])
    assert len(engine.materialise("t", 53, 0)) == 0
    for first, count in ((-1, 3), (50, 4), (3, -1)):
        with pytest.raises(ArgumentError, match=r"allowed: within 0 to 53"):
            engine.materialise("t", first, count)
    with pytest.raises(ArgumentError, match="table 'u'; allowed: t"):
        engine.materialise("u", 0, 1)


def test_rows_at_a_time_change_no_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(TensorTrainSpec(name="t", **SHAPES[0]), ShardSpec(name="u", row_count=9, dim=4), seed=seed)
    whole = engine.materialise("t", 0, 53)
    monkeypatch.setattr(tensor_train_tables, "ROWS_AT_ONCE", 10)
    assert torch.equal(engine.materialise("t", 0, 53), whole)
    assert torch.equal(engine.materialise("u", 2, 5), engine.weight("u")[2:7])


@pytest.mark.parametrize("kind", [Optimizer.SGD, Optimizer.ADAM], ids=lambda kind: kind.value)
def test_bands_change_no_bit(kind: Optimizer, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A band holds the gradients of a few slices, or of one slice if even that is too large."""
    spec = TensorTrainSpec(name="t", **SHAPES[3])
    found = []
    for size_bytes in (1 << 20, 5000, 1):
        monkeypatch.setitem(tensor_train_tables.BAND_BYTES, "cpu", size_bytes)
        engine = engine_of(spec, seed=seed, optimizer=OptimizerSpec(kind=kind))
        generator = torch_stream(seed, "bands")
        for _ in range(2):
            batch = lookups(torch.randint(311, (3000,), generator=generator))
            engine.update(batch, torch.randn(3000 * spec.dim, generator=generator), rate=0.01)
        found.append(cores_of(engine, "t"))
    for other in found[1:]:
        assert all(torch.equal(left, right) for left, right in zip(found[0], other, strict=True))


@pytest.mark.parametrize("most", [1, 3, 4, 100])
def test_bands_are_as_long_as_they_may_be(most: int) -> None:
    chunks = [2, 1, 1, 7, 1, 3]
    found = list(bands(torch.tensor(list(itertools.accumulate(chunks))), most))
    assert [place for first, last in found for place in range(first, last)] == list(range(len(chunks)))
    for first, last in found:
        assert last - first == 1 or sum(chunks[first:last]) <= most
        if last < len(chunks):
            assert sum(chunks[first : last + 1]) > most
    assert list(bands(torch.tensor([], dtype=torch.int64), most)) == []


def lookups(ids: Tensor, table: int = 0) -> Batch:
    return Batch(
        table_of_block=(table,),
        bags_of_block=(len(ids),),
        lengths=torch.ones(len(ids), dtype=torch.int64),
        values=ids,
        pooling=Pooling.NONE,
    )


def test_bits_do_not_depend_on_other_tables_or_the_placement(seed: int) -> None:
    """The same lookups alone, beside other tables, and in two blocks, as two ranks would send them."""
    spec = TensorTrainSpec(name="t", **SHAPES[0])
    other = TensorTrainSpec(name="u", **SHAPES[1])
    generator = torch_stream(seed, "placement")
    ids = torch.randint(53, (300,), generator=generator)
    gradient = torch.randn(300 * 16, generator=generator)
    alone = engine_of(spec, seed=seed)
    alone.update(lookups(ids), gradient, rate=0.1)
    beside = engine_of(ShardSpec(name="v", row_count=7, dim=3), other, spec, seed=seed)
    batch = dataclasses.replace(
        lookups(torch.cat((ids[:100], torch.arange(6), torch.arange(6), ids[100:]))),
        table_of_block=(2, 0, 1, 2),
        bags_of_block=(100, 6, 6, 200),
    )
    middle = torch.randn(6 * 3 + 6 * 6, generator=generator)
    beside.update(batch, torch.cat((gradient[:1600], middle, gradient[1600:])), rate=0.1)
    for left, right in zip(cores_of(alone, "t"), cores_of(beside, "t"), strict=True):
        assert torch.equal(left, right)


def test_threads_change_no_bit(seed: int) -> None:
    """Covers pooling of rows, sums of their gradients, and updates of slices."""
    spec = TensorTrainSpec(name="t", **SHAPES[3])
    found = []
    for threads in (1, 3):
        engine = engine_of(spec, seed=seed, threads=threads, optimizer=OptimizerSpec(kind=Optimizer.ADAM))
        generator = torch_stream(seed, "threads")
        for _ in range(2):
            # Long runs of one id and of one slice, which threads share.
            ids = (torch.rand(20_000, generator=generator) ** 6 * spec.row_count).to(torch.int64)
            engine.update(lookups(ids), torch.randn(len(ids) * spec.dim, generator=generator), rate=0.01)
        found.append([engine.lookup(lookups(torch.arange(spec.row_count))), *cores_of(engine, "t")])
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_autograd_and_compile_take_the_step_of_the_engine(seed: int) -> None:
    spec = TensorTrainSpec(name="t", **SHAPES[0])
    plain = ShardSpec(name="v", row_count=7, dim=3)
    by_hand, fused = engine_of(spec, plain, seed=seed), FusedTables(engine_of(spec, plain, seed=seed), lr=0.1)
    blocks: dict[str, Any] = {"table_of_block": (0, 1), "bags_of_block": (5, 5)}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(lengths: Tensor, values: Tensor) -> Tensor:
        return fused(lengths, values, **blocks).square().sum()  # type: ignore[no-any-return]

    lengths, values = torch.full((10,), 2), torch.arange(20) % 7
    batch = Batch(**blocks, lengths=lengths, values=values)
    result = by_hand.lookup(batch)
    by_hand.update(batch, 2 * result, rate=0.1)
    torch.autograd.backward(model(lengths, values))
    for name in by_hand.names:
        assert torch.equal(fused.engine.weight(name), by_hand.weight(name))


def test_ids_out_of_range_raise_before_anything_changes(seed: int) -> None:
    """This includes ids for which only the padded factors have rows."""
    engine = engine_of(TensorTrainSpec(name="t", **SHAPES[0]), seed=seed)
    before = [core.clone() for core in cores_of(engine, "t")]
    for wrong in (-1, 53, 59, 60, 1 << 40):
        batch = lookups(torch.tensor([3, wrong]))
        for call in (engine.lookup, lambda batch: engine.update(batch, torch.ones(32), rate=1.0)):
            with pytest.raises(IdError, match=rf"table t: id {wrong} at position 1; allowed: \[0, 53\)"):
                call(batch)
    assert all(torch.equal(*pair) for pair in zip(before, cores_of(engine, "t"), strict=True))


def test_a_gradient_that_is_not_finite_leaves_its_row_out(seed: int) -> None:
    """Shared slices are updated by the other rows. The error of a product that overflows names the core's slice."""
    spec = TensorTrainSpec(name="t", **SHAPES[0])
    engine, without = (engine_of(spec, seed=seed, optimizer=OptimizerSpec(kind=Optimizer.ADAM)) for _ in range(2))
    gradient = torch.randn(3 * 16, generator=torch_stream(seed, "wild"))
    without.update(lookups(torch.tensor([2, 40])), torch.cat((gradient[:16], gradient[32:])), rate=0.1)
    gradient[20] = float("nan")
    with pytest.raises(GradientError, match="gradient of 1 rows is not finite, first table t row 7;"):
        engine.update(lookups(torch.tensor([2, 7, 40])), gradient, rate=0.1)
    for left, right in zip(cores_of(engine, "t"), cores_of(without, "t"), strict=True):
        assert torch.equal(left, right)
    assert engine.rows_skipped == {"t": 1}
    for core in cores_of(engine, "t"):
        core.fill_(1e20)
    with pytest.raises(GradientError, match=r"first table t\.core3 row 2;"):
        engine.update(lookups(torch.tensor([2])), torch.full((16,), 1e10), rate=0.1)


def test_wrapped_and_ignored_ids_are_counted(seed: int) -> None:
    spec = TensorTrainSpec(name="t", **SHAPES[0])
    ids = torch.tensor([3, 56, -50, 4])
    wrapping, ignoring, checking = (
        engine_of(spec, seed=seed, bounds=bounds) for bounds in (Bounds.WRAP, Bounds.IGNORE, Bounds.ERROR)
    )
    expected = checking.lookup(lookups(torch.tensor([3, 3, 3, 4]))).view(4, 16)
    assert torch.equal(wrapping.lookup(lookups(ids)).view(4, 16), expected)
    expected[1:3] = 0
    assert torch.equal(ignoring.lookup(lookups(ids)).view(4, 16), expected)
    assert wrapping.ids_outside["t"] == ignoring.ids_outside["t"] == 2


@pytest.mark.parametrize(
    ("rows", "dim", "rank"), [(1_000_000, 64, 16), (4039, 16, 8), (1, 1, 4), (0, 7, 2), (17, 257, 3)]
)
def test_factors_are_chosen_for_a_rank(rows: int, dim: int, rank: int) -> None:
    spec = TensorTrainSpec.of_rank(name="t", row_count=rows, dim=dim, rank=rank)
    assert math.prod(spec.row_factors) >= rows
    assert math.prod(spec.row_factors) <= max(1, rows) * 1.1 + 16
    assert math.prod(spec.column_factors) == dim
    assert max(spec.ranks) <= rank
    assert spec.parameter_count == sum(core.row_count * core.dim for core in spec.cores)
    assert spec.compression == rows * dim / spec.parameter_count
    assert factor_rows(rows) == spec.row_factors
    assert factor_columns(dim) == spec.column_factors


def test_factors_of_any_count_suffice() -> None:
    for count in [*range(2000), 10**6, 10**9 + 7, (1 << 32) - 1]:
        rows = factor_rows(count)
        assert math.prod(rows) >= count
        assert max(rows) - min(rows) <= 2 or count < 8
    for dim in range(1, 400):
        columns = factor_columns(dim)
        assert math.prod(columns) == dim
        assert columns[2] >= min(dim, 16)


GOOD: dict[str, Any] = {"name": "t", **SHAPES[0]}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"row_factors": (3, 4, 4)}, "product of row factors 48; allowed: 53 to"),
        ({"row_factors": (0, 4, 400)}, "row factor 0; allowed: 1 to"),
        ({"row_factors": (6, 10)}, "2 row factors; allowed: 3"),
        ({"column_factors": (2, 2, 5)}, "product of column factors 20; allowed: 16"),
        ({"column_factors": (-2, -2, 4)}, "column factor -2; allowed: 1 to"),
        ({"ranks": (0, 4)}, "rank 0; allowed: 1 to 4096"),
        ({"ranks": (4,)}, "1 ranks; allowed: 2"),
        ({"ranks": (64, 64)}, r"numbers in a slice of core 2 .* 8192; allowed: 1 to 4096"),
        ({"first_row": 5}, "first_row of a tensor train 5; allowed: 0"),
        ({"row_count": -1}, "row_count -1"),
    ],
)
def test_wrong_factors_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TensorTrainSpec(**(GOOD | change))


def test_wrong_ranks_and_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank 0; allowed: 1 to 4096"):
        TensorTrainSpec.of_rank(name="t", row_count=100, dim=16, rank=0)
    with pytest.raises(ConfigError, match=r"two tables are called t\.core2"):
        EmbeddingEngine([TensorTrainSpec(**GOOD), ShardSpec(name="t.core2", row_count=1, dim=1)], OptimizerSpec())


def test_a_tensor_train_is_not_in_a_cache() -> None:
    memory = allocate(ShardSpec(name="t", row_count=1, dim=1), OptimizerSpec(), torch.device("cpu"))
    with pytest.raises(ConfigError, match="table t: a tensor train in memory of its user"):
        EmbeddingEngine([TensorTrainSpec(**GOOD)], OptimizerSpec(), memory=[memory])


def test_initial_rows_have_the_deviation_wanted() -> None:
    spec = TensorTrainSpec.of_rank(name="t", row_count=20_000, dim=64, rank=16)
    tables = []
    for seed in (1, 1, 2):
        engine = EmbeddingEngine([spec], OptimizerSpec())
        initialise(spec, cores_of(engine, "t"), 0.01, torch_stream(seed, "initial"))
        tables.append(engine.materialise("t", 0, spec.row_count))
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])
    for table in tables:
        # Elements share slices. Each core has some 10⁴ independent numbers.
        assert abs(float(table.std()) / 0.01 - 1) < 0.05
        assert abs(float(table.mean())) < 0.0005
        # Of products of plain normal factors, 0.055 would be below a hundredth of the deviation. Here 0.008 are, as for
        # a normal distribution, because each element sums many similar terms.
        assert float((table.abs() < 0.0001).float().mean()) < 0.012
    with pytest.raises(ConfigError, match="deviation 0; allowed: above 0"):
        initialise(spec, [], 0, torch_stream(1))


def test_precision_is_that_of_the_cores(seed: int) -> None:
    spec = TensorTrainSpec(name="t", **SHAPES[0], precision=Precision.BF16)
    engine = engine_of(spec, seed=seed)
    assert {core.dtype for core in cores_of(engine, "t")} == {torch.bfloat16}
    wide = engine_of(TensorTrainSpec(name="t", **SHAPES[0]), seed=seed)
    for core, of_wide in zip(cores_of(engine, "t"), cores_of(wide, "t"), strict=True):
        of_wide.copy_(core)
    assert torch.equal(engine.materialise("t", 0, 53), wide.materialise("t", 0, 53))
