# SPDX-License-Identifier: Apache-2.0
"""Algorithms that few peers of a rank take part in, against the tree: bit for bit, in any legal order of events."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.transport import algorithms, reference
from sennit.transport.arithmetic import fold, narrow
from sennit.transport.elements import COMPLEXES, FLOATS, Dtype, ReduceOp, reduce_ops
from sennit.transport.errors import ArgumentError
from sennit.transport.plan import Plan, Recv, Send
from sennit.transport.plan_codec import decode

Array = npt.NDArray[Any]

SCALAR = 0.75
KINDS = [(dtype, op) for dtype in Dtype for op in sorted(reduce_ops(dtype))]

worlds = st.integers(2, 9)
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 10_000)
chunk_sizes = st.sampled_from([64, 192, 1_024, 131_072])


def inputs(seed: int, world: int, elements: int, dtype: Dtype) -> list[Array]:
    """Numbers of every size, so that a sum's last bits depend on its order."""
    rng = np.random.default_rng(seed)
    if dtype not in FLOATS | COMPLEXES:
        return [rng.integers(0, 256, elements * dtype.item_bytes, np.uint8) for _ in range(world)]
    part = {Dtype.C32: Dtype.F16, Dtype.C64: Dtype.F32, Dtype.C128: Dtype.F64}.get(dtype, dtype)
    wide = np.float64 if part is Dtype.F64 else np.float32
    parts = elements * dtype.item_bytes // part.item_bytes
    return [narrow((rng.standard_normal(parts) * 2.0 ** rng.integers(-6, 6)).astype(wide), part) for _ in range(world)]


def noise(size_bytes: int) -> Array:
    return np.full(size_bytes, 0xA5, np.uint8)


def run(data: st.DataObject, plans: list[Plan], buffers: list[list[Array]]) -> None:
    """Runs the plans under a random schedule, after they came back from the binary form."""
    for plan in plans:
        assert decode(plan.encode()).steps == plan.steps
    for sender, receiver in itertools.permutations(plans, 2):
        sends = [(s.slot, s.size_bytes) for s in sender.steps if isinstance(s, Send) and s.peer == receiver.rank]
        recvs = [(s.slot, s.size_bytes) for s in receiver.steps if isinstance(s, Recv) and s.peer == sender.rank]
        assert sends == recvs
    reference.run(
        plans,
        buffers,
        seed=data.draw(seeds, "schedule"),
        scalar=SCALAR,
        loans_per_peer=data.draw(st.integers(1, 4), "loans"),
        in_order=data.draw(st.booleans(), "in_order"),
    )


@settings(max_examples=200, deadline=None)
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
    given_inputs = inputs(seed, world, elements, dtype)
    buffers = [[x.copy()] if in_place else [x.copy(), noise(x.size)] for x in given_inputs]
    run(data, plans, buffers)
    for rank in range(world):
        np.testing.assert_array_equal(buffers[rank][-1], fold(given_inputs, dtype, op, scalar=SCALAR))
        if not in_place:
            np.testing.assert_array_equal(buffers[rank][0], given_inputs[rank])


@settings(max_examples=150, deadline=None)
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
    bounds = np.cumsum([0, *counts]) * dtype.item_bytes
    plans = [
        algorithms.reduce_scatter_halving(
            world=world, rank=rank, counts=counts, dtype=dtype, op=op,
            list_input=form == "list", chunk_bytes=chunk_bytes,
        )
        for rank in range(world)
    ]  # fmt: skip
    given_inputs = inputs(seed, world, sum(counts), dtype)
    buffers: list[list[Array]] = []
    for rank, x in enumerate(given_inputs):
        copy = x.copy()
        parts = [copy[low:high] for low, high in itertools.pairwise(bounds)]
        output = parts[rank] if form == "aliased" else noise(counts[rank] * dtype.item_bytes)
        buffers.append([*parts, output] if form == "list" else [copy, output])
    run(data, plans, buffers)
    expected = fold(given_inputs, dtype, op, scalar=SCALAR)
    for rank in range(world):
        np.testing.assert_array_equal(buffers[rank][-1], expected[bounds[rank] : bounds[rank + 1]])


@settings(max_examples=150, deadline=None)
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
    given_inputs = inputs(seed, world, elements, dtype)
    buffers = [
        [x.copy(), noise(x.size)] if rank == root and not in_place else [x.copy()]
        for rank, x in enumerate(given_inputs)
    ]
    run(data, plans, buffers)
    np.testing.assert_array_equal(buffers[root][-1], fold(given_inputs, dtype, op, scalar=SCALAR))
    for rank in set(range(world)) - {root}:
        np.testing.assert_array_equal(buffers[rank][0], given_inputs[rank])


@settings(max_examples=150, deadline=None)
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
