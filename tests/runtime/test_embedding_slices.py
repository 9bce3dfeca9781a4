# SPDX-License-Identifier: Apache-2.0
"""Sums by slice of the global batch: the tree of the transport, whoever adds which part of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels import reference
from sennit.runtime.kernels.batch import MAX_SLICES, Batch, RowSums
from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.ids import split_rows
from sennit.runtime.kernels.implementations import IMPLEMENTATIONS, implementation
from sennit.runtime.kernels.layout import ShardMemory
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.reference import sums_by_row
from sennit.runtime.kernels.spec import Bounds, Pooling, Precision, ShardSpec
from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.transport.errors import ArgumentError, Unsupported
from sennit.transport.plans.tree import Span, balanced, combinations, cover
from tests import extent
from tests.extent import briefly
from tests.runtime.embedding_cases import same_bits

SLICES, BAGS, ROWS = 8, 9, 400
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "slices.json").read_text())


@pytest.fixture(params=IMPLEMENTATIONS)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """An implementation that runs here. Triton only in its interpreter, which computes with NumPy."""
    try:
        device = implementation(request.param).device_type
    except Unsupported as reason:
        pytest.skip(str(reason))
    if device != "cpu":
        pytest.skip("the GPU runs the test table")
    with np.errstate(all="ignore"):
        yield request.param


def folded(values: dict[int, Tensor], leaves: int) -> Tensor:
    """The tree of the transport over all leaves, of which some are missing, as its program says. None is -0."""
    stack: list[Tensor] = []
    for leaf, count in enumerate(balanced(leaves)):
        stack.append(values.get(leaf, torch.zeros(())))
        for _ in range(count):
            right = stack.pop()
            stack[-1] = stack[-1] + right
    (result,) = stack
    return result


@pytest.mark.parametrize("present", [(0,), (5,), (0, 1, 2), (1, 2), (0, 3, 4, 5, 6), (1, 2, 3, 11, 12), (*range(13),)])
def test_a_rows_sum_is_the_tree_of_the_transport_over_its_slices(present: tuple[int, ...], seed: int) -> None:
    """Each slice has chunks of its own. Numbers are such that a sum depends on its order."""
    generator = torch_stream(seed, "tree", *present)
    slices, gradients, values = [], [], {}
    for number in present:
        length = int(torch.randint(1, 80, (), generator=generator))
        each = torch.randn(length, 3, generator=generator) * 1000
        chunks = {}
        for at in range(0, length, 32):
            total = torch.zeros(3)
            for gradient in each[at : at + 32]:
                total = total + gradient
            chunks[at // 32] = total
        values[number] = folded(chunks, len(chunks))
        slices += [number] * length
        gradients.append(each)
    rows, sums = sums_by_row(torch.full((len(slices),), 9), torch.tensor(slices), torch.cat(gradients))
    assert rows.tolist() == [9]
    for leaves in (13, 16, 50):
        assert same_bits(sums[0], folded(values, leaves))


@pytest.mark.parametrize("case", VECTORS["sums"], ids=lambda case: case["why"])
def test_golden_sums(name: str, case: dict[str, list[float]]) -> None:
    engine = EmbeddingEngine(
        [ShardSpec(name="t", row_count=1, dim=1)], OptimizerSpec(kind=Optimizer.SGD), implementation_name=name
    )
    batch = Batch(
        table_of_block=(0,) * len(case["slices"]),
        bags_of_block=(1,) * len(case["slices"]),
        lengths=torch.ones(len(case["slices"]), dtype=torch.int32),
        values=torch.zeros(len(case["slices"]), dtype=torch.int64),
        slice_of_block=tuple(int(number) for number in case["slices"]),
    )
    gradient = torch.tensor(case["gradients"], dtype=torch.float32)
    (found,) = engine.sum_rows(batch, gradient)
    assert found.sums.tolist() == [[case["sum"]]]
    engine.update(batch, gradient, rate=-1.0)
    assert engine.weight("t").tolist() == [[case["sum"]]]


@pytest.mark.parametrize("case", VECTORS["bags"], ids=lambda case: case["why"])
def test_golden_bags_of_row_shards(name: str, case: dict[str, Any]) -> None:
    """Each shard is a table. Its part of the bag is summed there, and the parts in the tree."""
    borders, lengths = case["borders"], torch.tensor([len(case["ids"])])
    shards = [
        ShardSpec(name=f"shard {number}", row_count=high - low, dim=1, first_row=low)
        for number, (low, high) in enumerate(pairwise(borders))
    ]
    engine = EmbeddingEngine(shards, OptimizerSpec(), implementation_name=name)
    for shard, rows in zip(shards, torch.split(torch.tensor(case["rows"]), [s.row_count for s in shards]), strict=True):
        engine.weight(shard.name)[:, 0] = rows
    ids = torch.tensor(case["ids"], dtype=torch.int64)
    of_shards, values = split_rows(lengths, ids, borders)
    weights = None
    if case["weights"] is not None:
        parts = [(ids >= low) & (ids < high) for low, high in pairwise(borders)]
        weights = torch.cat([torch.tensor(case["weights"], dtype=torch.float32)[part] for part in parts])
    batch = Batch(
        table_of_block=tuple(range(len(shards))), bags_of_block=(1,) * len(shards), lengths=of_shards.flatten(),
        values=values, weights=weights,
    )  # fmt: skip
    found = folded(dict(enumerate(engine.lookup(batch))), len(shards))
    assert found.item() == case["sum"]
    if case["mean"] is not None:
        assert (found / lengths.clamp(min=1).to(torch.float32)).item() == case["mean"]


def weighted_mean(case: dict[str, Any]) -> tuple[Batch, Tensor]:
    batch = Batch(
        table_of_block=(0,),
        bags_of_block=(1,),
        lengths=torch.tensor([len(case["ids"])]),
        values=torch.tensor(case["ids"]),
        weights=torch.tensor(case["weights"], dtype=torch.float32),
        pooling=Pooling.MEAN,
    )
    return batch, torch.tensor([case["gradient"]], dtype=torch.float32)


@pytest.mark.parametrize("case", VECTORS["weighted_means"], ids=lambda case: case["why"])
def test_golden_weighted_means(name: str, case: dict[str, Any]) -> None:
    spec, (batch, gradient) = ShardSpec(name="t", row_count=len(case["rows"]), dim=1), weighted_mean(case)
    engine = EmbeddingEngine([spec], OptimizerSpec(kind=Optimizer.SGD), implementation_name=name)
    engine.weight("t")[:, 0] = torch.tensor(case["rows"])
    assert engine.lookup(batch).tolist() == [case["mean"]]
    assert engine.weight_gradient(batch, gradient).tolist() == case["of_weights"]
    (found,) = engine.sum_rows(batch, gradient)
    engine.update(batch, gradient, rate=1.0)
    assert engine.weight("t")[:, 0].tolist() == case["after"]
    assert [case["rows"][row] - float(total) for row, total in zip(found.rows, found.sums, strict=True)] == [
        case["after"][row] for row in found.rows
    ]


@pytest.mark.parametrize("case", VECTORS["weighted_means"], ids=lambda case: case["why"])
def test_the_reference_has_weighted_means_of_its_own(case: dict[str, Any]) -> None:
    """An engine makes them from weighted sums, whatever the implementation."""
    spec, (batch, gradient) = ShardSpec(name="t", row_count=len(case["rows"]), dim=1), weighted_mean(case)
    table = ShardMemory(spec=spec, weight=torch.tensor(case["rows"], dtype=torch.float32).unsqueeze(1), states={})
    assert reference.lookup([table], batch).tolist() == [case["mean"]]
    assert reference.weight_gradient([table], batch, gradient).tolist() == case["of_weights"]
    (found,) = reference.sum_rows([table], batch, gradient)
    after = table.weight[found.rows] - found.sums
    assert after.flatten().tolist() == [case["after"][row] for row in found.rows]


def engine_of(name: str, kind: Optimizer, precision: Precision, seed: int) -> EmbeddingEngine:
    specs = [
        ShardSpec(name="a", row_count=ROWS, dim=16, precision=precision),
        ShardSpec(name="b", row_count=7, dim=20, precision=precision),
    ]
    engine = EmbeddingEngine(specs, OptimizerSpec(kind=kind), implementation_name=name, seed=7)
    for spec in specs:
        engine.weight(spec.name).copy_(torch.randn(spec.row_count, spec.dim, generator=torch_stream(seed, spec.name)))
    return engine


def zipf_batch(slices: range, seed: int, pooling: Pooling, weighted: bool) -> tuple[Batch, Tensor]:
    """Some slices of one global batch, and their gradient. Few rows have most lookups."""
    lengths, values, weights, gradients = [], [], [], []
    for number in slices:
        for table, rows in enumerate((ROWS, 7)):
            generator = torch_stream(seed, "slice", number, table)
            own = torch.randint(20, (BAGS,), generator=generator)
            count = int(own.sum())
            lengths.append(own)
            ids = torch.rand(count, generator=generator, dtype=torch.float64) ** 8 * rows
            values.append(ids.to(torch.int64))
            weights.append(torch.randn(count, generator=generator))
            vectors = count if pooling is Pooling.NONE else BAGS
            gradients.append(torch.randn(vectors * (16, 20)[table], generator=generator))
    batch = Batch(
        table_of_block=(0, 1) * len(slices),
        bags_of_block=(BAGS,) * (2 * len(slices)),
        lengths=torch.cat(lengths),
        values=torch.cat(values),
        weights=torch.cat(weights) if weighted else None,
        pooling=pooling,
        slice_of_block=tuple(number for number in slices for _ in range(2)),
    )
    return batch, torch.cat(gradients)


def of_owner(nodes: list[tuple[Span, list[RowSums]]]) -> tuple[Batch, Tensor]:
    """What the owner of all rows does with the sums of nodes, which came from several ranks."""
    parts = [(span.low, sums) for span, found in nodes for sums in found]
    return Batch(
        table_of_block=tuple(sums.table for _, sums in parts),
        bags_of_block=tuple(len(sums.rows) for _, sums in parts),
        lengths=torch.ones(sum(len(sums.rows) for _, sums in parts), dtype=torch.int32),
        values=torch.cat([sums.rows for _, sums in parts]),
        pooling=Pooling.NONE,
        slice_of_block=tuple(low for low, _ in parts),
    ), torch.cat([sums.sums.flatten() for _, sums in parts])


RANKS = {"halves": (0, 4, 8), "thirds": (0, 3, 5, 8), "one": (0, 8), "slices": tuple(range(9))}
SHAPES = {
    "sum": (Pooling.SUM, False), "weighted": (Pooling.SUM, True), "mean": (Pooling.MEAN, False),
    "weighted mean": (Pooling.MEAN, True), "sequence": (Pooling.NONE, False),
}  # fmt: skip
KINDS = [(kind, Precision.FP32, "sum") for kind in Optimizer]
KINDS += [(Optimizer.ROW_WISE_ADAGRAD, precision, shape) for precision in Precision for shape in SHAPES]

# Triton's interpreter is slow, and neither optimizers nor precisions have anything to do with slices.
FOR_TRITON = [(Optimizer.ROW_WISE_ADAGRAD, Precision.FP32, shape) for shape in SHAPES]
FOR_TRITON.append((Optimizer.LAMB, Precision.FP32, "sum"))
RUNS = [
    (name, *kind, ranks)
    for name in IMPLEMENTATIONS
    for kind in KINDS
    for ranks in RANKS
    if name != "triton" or (ranks == "thirds" and kind in FOR_TRITON)
]
BRIEFLY = [
    run
    for run in RUNS
    if (run[3] == "weighted mean" if run[0] == "triton" else run[4] == "thirds" or run[1:4] == KINDS[0])
]


@pytest.mark.parametrize(("name", "kind", "precision", "shape", "ranks"), briefly(RUNS, BRIEFLY), indirect=["name"])
def test_sums_that_ranks_made_give_the_bits_of_one_update(
    name: str, kind: Optimizer, precision: Precision, shape: str, ranks: str, seed: int
) -> None:
    pooling, weighted = SHAPES[shape]
    whole, parts = engine_of("native", kind, precision, seed), engine_of(name, kind, precision, seed)
    # The interpreter takes seconds for a step. What a second one does to states, the table of cases tells.
    for step in range(1 if name == "triton" and not extent.is_long else 2):
        batch, gradient = zipf_batch(range(SLICES), seed + step, pooling, weighted)
        whole.update(batch, gradient, rate=0.1)
        nodes = []
        for low, high in pairwise(RANKS[ranks]):
            for node in cover(Span(low, high), SLICES):
                own = zipf_batch(range(*node), seed + step, pooling, weighted)
                nodes.append((node, parts.sum_rows(*own)))
        assert combinations(tuple(node for node, _ in nodes), SLICES)
        parts.update(*of_owner(nodes), rate=0.1)
    for table in ("a", "b"):
        assert same_bits(parts.weight(table), whole.weight(table))
        for state, tensor in whole.states(table).items():
            assert same_bits(parts.states(table)[state], tensor)


def test_the_sum_depends_on_the_slices(seed: int) -> None:
    """So the tests above would see it if slices were ignored."""
    batch, gradient = zipf_batch(range(SLICES), seed, Pooling.SUM, weighted=False)
    engine = engine_of("native", Optimizer.SGD, Precision.FP32, seed)
    sums = engine.sum_rows(batch, gradient)
    without = engine.sum_rows(dataclasses.replace(batch, slice_of_block=None), gradient)
    assert all(torch.equal(one.rows, other.rows) for one, other in zip(sums, without, strict=True))
    assert not any(torch.equal(one.sums, other.sums) for one, other in zip(sums, without, strict=True))
    # One slice, whatever its number, is none.
    one = engine.sum_rows(dataclasses.replace(batch, slice_of_block=(5,) * 16), gradient)
    assert all(same_bits(one.sums, other.sums) for one, other in zip(one, without, strict=True))


@pytest.mark.parametrize("name", briefly(IMPLEMENTATIONS, set(IMPLEMENTATIONS) - {"triton"}), indirect=True)
def test_sums_that_are_not_finite_are_kept(name: str, seed: int) -> None:
    """The owner skips such a row, as one update does."""
    batch, gradient = zipf_batch(range(SLICES), seed, Pooling.SUM, weighted=False)
    gradient[: 16 * BAGS] = float("inf")
    whole = engine_of("native", Optimizer.SGD, Precision.FP32, seed)
    parts = engine_of(name, Optimizer.SGD, Precision.FP32, seed)
    with pytest.raises(GradientError) as error:
        whole.update(batch, gradient, rate=0.1)
    sums = parts.sum_rows(batch, gradient)
    with pytest.raises(GradientError) as again:
        parts.update(*of_owner([(Span(0, 8), sums)]), rate=0.1)
    assert str(error.value) == str(again.value)
    assert same_bits(parts.weight("a"), whole.weight("a"))
    assert parts.rows_skipped == whole.rows_skipped != {}


def test_sums_of_nothing(name: str) -> None:
    engine = EmbeddingEngine(
        [ShardSpec(name="t", row_count=3, dim=4)], OptimizerSpec(), implementation_name=name, bounds=Bounds.IGNORE
    )
    empty = torch.zeros(0, dtype=torch.int64)
    for batch in (
        Batch(table_of_block=(), bags_of_block=(), lengths=empty, values=empty, slice_of_block=()),
        Batch(
            table_of_block=(0, 0), bags_of_block=(1, 1), lengths=torch.tensor([1, 2]), values=torch.tensor([-1, 3, 9]),
            slice_of_block=(0, 3),
        ),
    ):  # fmt: skip
        gradient = torch.ones(4 * len(batch.lengths))
        assert engine.sum_rows(batch, gradient) == []
        engine.update(batch, gradient, rate=1.0)
        assert not engine.weight("t").any()


@pytest.mark.parametrize(
    ("tables", "slices", "text"),
    [
        ((0, 0), (0,), "1 slices of 2 blocks"),
        ((0, 0), (1, 0), "block 1 of table 0 is in slice 0; allowed: 1"),
        ((0, 1, 0), (2, 5, 1), "block 2 of table 0 is in slice 1; allowed: 2"),
        ((0,), (-1,), "slice -1; allowed: 0"),
        ((0,), (MAX_SLICES,), "slice 65536; allowed: 0 .* to 65535"),
    ],
)
def test_wrong_slices_are_refused(tables: tuple[int, ...], slices: tuple[int, ...], text: str) -> None:
    lengths = torch.zeros(len(tables), dtype=torch.int32)
    with pytest.raises(ArgumentError, match=text):
        Batch(
            table_of_block=tables, bags_of_block=(1,) * len(tables), lengths=lengths, values=lengths[:0],
            slice_of_block=slices,
        )  # fmt: skip


def test_rows_of_a_tensor_train_have_no_sums() -> None:
    spec = TensorTrainSpec.of_rank(name="train", row_count=100, dim=16, rank=4)
    engine = EmbeddingEngine([spec], OptimizerSpec())
    batch = Batch(
        table_of_block=(0,),
        bags_of_block=(1,),
        lengths=torch.tensor([1]),
        values=torch.tensor([7]),
    )
    with pytest.raises(Unsupported, match="table train is a tensor train"):
        engine.sum_rows(batch, torch.ones(16))
