# SPDX-License-Identifier: Apache-2.0
"""Algorithms that few peers of a rank take part in, against the tree: bit for bit, in any legal order of events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.transport import algorithms
from sennit.transport.errors import ArgumentError
from sennit.transport.plans.elements import Dtype, ReduceOp, reduce_ops
from sennit.transport.plans.plan import Plan, Recv, Send
from tests.extent import examples
from tests.transport.algorithm_runs import (
    Array,
    check_allreduce,
    check_plans,
    check_reduce,
    check_reduce_scatter,
    inputs,
    noise,
    run_in_any_order,
)

KINDS = [(dtype, op) for dtype in Dtype for op in sorted(reduce_ops(dtype))]

worlds = st.integers(2, 9)
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 10_000)
chunk_sizes = st.sampled_from([64, 192, 1_024, 131_072])


def run(draw: st.DataObject, plans: Sequence[Plan], buffers: Sequence[Sequence[Array]]) -> None:
    check_plans(plans, plans, buffers)
    run_in_any_order(draw, plans, buffers)


@examples(50)
@given(st.data(), worlds, st.integers(0, 700), kinds, st.booleans(), chunk_sizes, st.booleans(), seeds)
def test_allreduce(
    data: st.DataObject,
    world: int,
    elements: int,
    kind: tuple[Dtype, ReduceOp],
    in_place: bool,
    chunk_bytes: int,
    by_halving: bool,
    seed: int,
) -> None:
    dtype, op = kind
    common: dict[str, Any] = {"world": world, "elements": elements, "dtype": dtype, "op": op, "in_place": in_place}
    plans = [
        algorithms.allreduce_halving(rank=rank, chunk_bytes=chunk_bytes, **common)
        if by_halving
        else algorithms.allreduce_dissemination(rank=rank, **common)
        for rank in range(world)
    ]
    check_allreduce(run, data, plans, inputs(seed, world, elements, dtype), kind, in_place)


@examples(40)
@given(
    st.data(), worlds, st.lists(st.integers(0, 200), min_size=9, max_size=9), kinds,
    st.sampled_from(["one", "list", "aliased"]), chunk_sizes, seeds,
)  # fmt: skip
def test_reduce_scatter(
    data: st.DataObject,
    world: int,
    counts: list[int],
    kind: tuple[Dtype, ReduceOp],
    form: str,
    chunk_bytes: int,
    seed: int,
) -> None:
    dtype, op = kind
    counts = counts[:world]
    plans = [
        algorithms.reduce_scatter_halving(
            world=world, rank=rank, counts=counts, dtype=dtype, op=op,
            list_input=form == "list", chunk_bytes=chunk_bytes,
        )
        for rank in range(world)
    ]  # fmt: skip
    check_reduce_scatter(run, data, plans, inputs(seed, world, sum(counts), dtype), kind, counts, form)


@examples(40)
@given(st.data(), worlds, st.integers(0, 700), kinds, st.booleans(), chunk_sizes, seeds)
def test_reduce(
    data: st.DataObject,
    world: int,
    elements: int,
    kind: tuple[Dtype, ReduceOp],
    in_place: bool,
    chunk_bytes: int,
    seed: int,
) -> None:
    dtype, op = kind
    root = data.draw(st.integers(0, world - 1), "root")
    plans = [
        algorithms.reduce_tree(
            world=world, rank=rank, elements=elements, dtype=dtype, op=op, root=root,
            in_place=in_place, chunk_bytes=chunk_bytes,
        )
        for rank in range(world)
    ]  # fmt: skip
    check_reduce(run, data, plans, inputs(seed, world, elements, dtype), kind, root, in_place)


@examples(40)
@given(st.data(), st.integers(1, 17), st.sampled_from([1, 3, 8]), seeds)
def test_gather(data: st.DataObject, world: int, item_bytes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = (rng.integers(0, 40, world) * rng.integers(0, 2, world)).tolist()
    root = data.draw(st.integers(0, world - 1), "root")
    parts = [rng.integers(0, 256, count * item_bytes, np.uint8) for count in counts]
    gathered = noise(sum(counts) * item_bytes)
    plans = [
        algorithms.gather_tree(world=world, rank=rank, counts=counts, item_bytes=item_bytes, root=root)
        for rank in range(world)
    ]
    run(data, plans, [[part, gathered] if rank == root else [part] for rank, part in enumerate(parts)])
    np.testing.assert_array_equal(gathered, np.concatenate(parts))


def peers(plan: Plan) -> set[int]:
    return {step.peer for step in plan.steps if isinstance(step, Send | Recv)}


def sent_bytes(plan: Plan) -> int:
    return sum(step.size_bytes for step in plan.steps if isinstance(step, Send))


@pytest.mark.parametrize("world", [2, 4, 8, 64])
def test_a_rank_has_log2_peers_and_sends_what_it_must(world: int) -> None:
    rounds = world.bit_length() - 1
    elements = 1 << 16
    for rank in (0, world - 1):
        common: dict[str, Any] = {"world": world, "rank": rank, "dtype": Dtype.F32, "op": ReduceOp.SUM}
        halving = algorithms.allreduce_halving(elements=elements, **common)
        assert len(peers(halving)) == rounds
        assert sent_bytes(halving) == 2 * (world - 1) * elements * 4 // world
        small = algorithms.allreduce_halving(elements=world * 16, **common)
        assert sum(isinstance(step, Send) for step in small.steps) == 2 * rounds
        spread = algorithms.allreduce_dissemination(elements=4, **common)
        assert sum(isinstance(step, Send) for step in spread.steps) == rounds
        scatter = algorithms.reduce_scatter_halving(counts=[elements // world] * world, **common)
        assert len(peers(scatter)) == rounds
        assert sent_bytes(scatter) == (world - 1) * elements * 4 // world
    at_root = algorithms.reduce_tree(world=world, rank=0, elements=10, dtype=Dtype.F32, op=ReduceOp.SUM, root=0)
    assert sum(isinstance(step, Recv) for step in at_root.steps) == rounds
    collected = algorithms.gather_tree(world=world, rank=0, counts=[1] * world, item_bytes=4, root=0)
    assert sum(isinstance(step, Recv) for step in collected.steps) == rounds


def test_one_rank_is_refused() -> None:
    calls: list[Callable[[], Plan]] = [
        lambda: algorithms.allreduce_halving(world=1, rank=0, elements=1, dtype=Dtype.F32, op=ReduceOp.SUM),
        lambda: algorithms.allreduce_dissemination(world=1, rank=0, elements=1, dtype=Dtype.F32, op=ReduceOp.SUM),
        lambda: algorithms.reduce_scatter_halving(world=1, rank=0, counts=[1], dtype=Dtype.F32, op=ReduceOp.SUM),
        lambda: algorithms.reduce_tree(world=1, rank=0, elements=1, dtype=Dtype.F32, op=ReduceOp.SUM, root=0),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match="world 1; allowed: 2 or more"):
            call()
