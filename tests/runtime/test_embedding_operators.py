# SPDX-License-Identifier: Apache-2.0
"""The operator under autograd and torch.compile gives the same results as direct calls of the engine."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.operators import FusedTables
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Pooling, ShardSpec
from sennit.runtime.model.schedule import RateSchedule
from sennit.transport.errors import Unsupported

BLOCKS: dict[str, Any] = {"table_of_block": (0, 1, 0), "bags_of_block": (4, 3, 2), "slice_of_block": (0, 3, 5)}
BAGS = 9


def engine_of(seed: int, optimizer: Optimizer = Optimizer.ADAM) -> EmbeddingEngine:
    specs = [ShardSpec(name="a", row_count=11, dim=8), ShardSpec(name="b", row_count=5, dim=20)]
    engine = EmbeddingEngine(specs, OptimizerSpec(kind=optimizer))
    for spec in specs:
        start = torch.randn(spec.row_count, spec.dim, generator=torch_stream(seed, spec.name))
        engine.weight(spec.name).copy_(start)
    return engine


def lookups(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(1, 4, (BAGS,), generator=generator)
    return lengths, torch.randint(5, (int(lengths.sum()),), generator=generator)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.NONE], ids=lambda pooling: pooling.value)
def test_the_backward_pass_is_the_step_of_the_engine(is_compiled: bool, pooling: Pooling, seed: int) -> None:
    by_hand, fused = engine_of(seed), FusedTables(engine_of(seed), lr=0.1)
    is_weighted = pooling is Pooling.SUM

    def model(lengths: Tensor, values: Tensor, weights: Tensor | None) -> Tensor:
        return fused(lengths, values, weights, **BLOCKS, pooling=pooling).square().sum()  # type: ignore[no-any-return]

    if is_compiled:
        model = torch.compile(model, fullgraph=True, backend="aot_eager")
    generator = torch_stream(seed, "lookups")
    for step in range(3):
        lengths, values = lookups(generator)
        start = torch.randn(len(values), generator=generator)
        weights = nn.Parameter(start) if is_weighted else None
        batch = Batch(**BLOCKS, lengths=lengths, values=values, weights=start if is_weighted else None, pooling=pooling)
        result = by_hand.lookup(batch)
        fused.lr = 0.1 * (step + 1)
        loss = model(lengths, values, weights)
        torch.testing.assert_close(loss.detach(), result.square().sum())
        if weights is not None:
            expected = by_hand.weight_gradient(batch, 2 * result)
        by_hand.update(batch, 2 * result, rate=fused.lr)
        torch.autograd.backward(loss)
        if weights is not None:
            assert weights.grad is not None
            assert torch.equal(weights.grad, expected)
        for name in ("a", "b"):
            assert torch.equal(fused.engine.weight(name), by_hand.weight(name))
    assert fused.engine.step == 3


def test_a_forward_pass_alone_changes_nothing(seed: int) -> None:
    fused = FusedTables(engine_of(seed), lr=0.1)
    before = fused.engine.weight("a").clone()
    with torch.no_grad():
        fused(*lookups(torch_stream(seed, "alone")), **BLOCKS)
    assert torch.equal(fused.engine.weight("a"), before)
    assert fused.engine.step == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_by_what_works(copied: Any, seed: int) -> None:
    with pytest.raises(Unsupported, match=r"a copy of an embedding engine: save weight\(name\) and states\(name\)"):
        copied(FusedTables(engine_of(seed), lr=0.1))


def test_torchs_schedulers_set_the_rate_of_the_backward_pass(seed: int) -> None:
    by_hand, fused = engine_of(seed), FusedTables(engine_of(seed), lr=0.5)
    schedule = RateSchedule(decay="polynomial", warmup_steps=2, decay_end=6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(fused.optimizer, schedule)
    generator = torch_stream(seed, "schedule")
    for step in range(6):
        lengths, values = lookups(generator)
        batch = Batch(**BLOCKS, lengths=lengths, values=values)
        by_hand.update(batch, torch.ones_like(by_hand.lookup(batch)), rate=0.5 * schedule(step))
        torch.autograd.backward(fused(lengths, values, **BLOCKS).sum())
        fused.optimizer.step()
        scheduler.step()
    for name in ("a", "b"):
        assert torch.equal(fused.engine.weight(name), by_hand.weight(name))


def arguments_of(fused: FusedTables, seed: int) -> tuple[Any, ...]:
    lengths, values = lookups(torch_stream(seed, "rules"))
    return (None, lengths, values, [0, 1, 0], [4, 3, 2], [0, 3, 5], "sum", fused.dims, fused.number)


def test_ops_keep_torchs_rules(seed: int) -> None:
    """Runs all of torch's own checks: schema, mutation, shapes, autograd, and the compiler's view."""
    fused = FusedTables(engine_of(seed, Optimizer.ROW_WISE_ADAGRAD), lr=0.1)
    weights, lengths, values, tables, bags, slices, pooling, dims, number = arguments_of(fused, seed)
    start = [tensor.clone() for tensor in fused.memory]
    torch.library.opcheck(
        torch.ops.sennit.embedding_lookup,
        (fused.anchor, fused.memory, weights, lengths, values, tables, bags, slices, pooling, dims, number),
    )
    gradient = torch.randn(sum(dims[table] * count for table, count in zip(tables, bags, strict=True)))
    torch.library.opcheck(
        torch.ops.sennit.embedding_update,
        (
            fused.anchor.detach(),
            gradient,
            fused.memory,
            weights,
            False,
            lengths,
            values,
            tables,
            bags,
            slices,
            pooling,
            number,
        ),
    )
    # The checks ran on copies. The ops change only memory that they were given.
    assert all(torch.equal(one, other) for one, other in zip(start, fused.memory, strict=True))


def test_the_update_says_which_tensors_it_changes() -> None:
    schema = torch.ops.sennit.embedding_update.default._schema
    changed = [argument.name for argument in schema.arguments if argument.is_write]
    assert changed == ["memory"]


# inductor itself uses deprecated parts of torch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.timeout(180)
def test_a_compiled_function_sees_what_it_has_changed(backend: str, seed: int) -> None:
    """One graph looks rows up, takes a step on them, and reads the table, in the order of eager mode."""

    def model(fused: FusedTables, lengths: Tensor, values: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        table = fused.memory[0]
        before = table.sum(1)
        torch.ops.sennit.embedding_update(
            fused.anchor.detach(), gradient, fused.memory, None, False, lengths, values, [0, 1, 0], [4, 3, 2], None,
            "sum", fused.number,
        )  # fmt: skip
        return before, table.sum(1)

    lengths, values = lookups(torch_stream(seed, "order"))
    gradient = torch.randn(4 * 8 + 3 * 20 + 2 * 8, generator=torch_stream(seed, "gradient"))
    eager, compiled = (FusedTables(engine_of(seed), lr=0.1) for _ in range(2))
    expected = model(eager, lengths, values, gradient)
    found = torch.compile(model, fullgraph=True, backend=backend)(compiled, lengths, values, gradient)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(*expected)
    assert all(torch.equal(one, other) for one, other in zip(compiled.memory, eager.memory, strict=True))
