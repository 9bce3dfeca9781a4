# SPDX-License-Identifier: Apache-2.0
"""Allreduce over leaves: one digest for the same leaves, whatever the world."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.transport import algorithms, reference
from sennit.transport._core import describe_signature
from sennit.transport.arithmetic import fold, run_program
from sennit.transport.elements import Dtype, ReduceOp, reduce_ops
from sennit.transport.errors import ArgumentError, MismatchError
from sennit.transport.hosts import Hosts
from sennit.transport.plan import Plan
from sennit.transport.plan_codec import decode
from sennit.transport.tree import balanced, given_spans, leaves_of
from tests.transport.algorithm_runs import check_pair_order, inputs

Array = npt.NDArray[Any]

SCALAR = 0.75
KINDS = [(dtype, op) for dtype in Dtype for op in sorted(reduce_ops(dtype))]


def plans_of(
    world: int, leaves: int, elements: int, dtype: Dtype, op: ReduceOp, chunk_bytes: int, hosts: Hosts | None = None
) -> list[Plan]:
    return [
        algorithms.allreduce(
            world=world,
            rank=rank,
            leaves=leaves,
            elements=elements,
            dtype=dtype,
            op=op,
            chunk_bytes=chunk_bytes,
            hosts=hosts,
        )
        for rank in range(world)
    ]


def run(plans: list[Plan], leaves: list[Array], **options: Any) -> list[Array]:
    """Every rank's result; the inputs stay as they are."""
    world = len(plans)
    inputs = [np.concatenate(leaves[slice(*leaves_of(rank, world, len(leaves)))]) for rank in range(world)]
    outputs = [np.full(leaves[0].size, 0xA5, np.uint8) for _ in plans]
    kept = [x.copy() for x in inputs]
    reference.run(plans, list(zip(inputs, outputs, strict=True)), scalar=SCALAR, **options)
    for data, before in zip(inputs, kept, strict=True):
        np.testing.assert_array_equal(data, before)
    return outputs


@pytest.mark.parametrize(("dtype", "op"), KINDS, ids=lambda kind: kind.name)
def test_worlds_of_any_size_give_the_same_bits(dtype: Dtype, op: ReduceOp) -> None:
    leaves = inputs(100 * dtype + op, 8, 90, dtype)
    expected = fold(leaves, dtype, op, scalar=SCALAR)
    for world in (1, 2, 3, 4, 5, 8):
        for count in {1, min(2, world), (world + 1) // 2, world}:
            hosts = Hosts.equal(world, count)
            for result in run(plans_of(world, 8, 90, dtype, op, 128, hosts), leaves, seed=world):
                np.testing.assert_array_equal(result, expected, err_msg=f"{hosts}")


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 7), st.integers(0, 200), st.sampled_from(KINDS), st.sampled_from([64, 131_072]))
def test_partial_sums_in_place_of_leaves(
    data: st.DataObject, world: int, elements: int, kind: tuple[Dtype, ReduceOp], chunk_bytes: int
) -> None:
    dtype, op = kind
    count = data.draw(st.integers(world, 3 * world + 5), "leaves")
    hosts = Hosts.equal(world, data.draw(st.integers(1, world), "hosts"))
    call: dict[str, Any] = {"world": world, "elements": elements, "dtype": dtype, "op": op, "leaves": count}
    if op is ReduceOp.PREMUL_SUM:
        with pytest.raises(ArgumentError, match="PREMUL_SUM of partial sums; allowed: SUM"):
            algorithms.allreduce(rank=0, partial=True, **call)
        return
    leaves = inputs(data.draw(st.integers(0, 1_000), "seed"), count, elements, dtype)
    plans = [
        algorithms.allreduce(rank=rank, hosts=hosts, chunk_bytes=chunk_bytes, partial=True, **call)
        for rank in range(world)
    ]
    check_pair_order(plans)
    buffers = []
    for rank in range(world):
        nodes = [leaves[slice(*node)] for node in given_spans(rank, world, count, partial=True)]
        sums = [
            run_program(
                node,
                balanced(len(node)),
                dtype,
                op,
                partial=[False] * len(node),
                divisor=count,
                scalar=1.0,
                gives_partial=True,
            )
            for node in nodes
        ]
        buffers.append([np.concatenate(sums), np.full(leaves[0].size, 0xA5, np.uint8)])
    seed = data.draw(st.integers(0, 1_000), "schedule")
    reference.run(plans, buffers, seed=seed, loans_per_peer=data.draw(st.integers(1, 4), "loans"))
    for _, result in buffers:
        np.testing.assert_array_equal(result, fold(leaves, dtype, op))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 7), st.integers(0, 300), st.sampled_from(KINDS), st.sampled_from([64, 192, 131_072]))
def test_any_leaves_in_any_order_of_events(
    data: st.DataObject, world: int, elements: int, kind: tuple[Dtype, ReduceOp], chunk_bytes: int
) -> None:
    dtype, op = kind
    count = data.draw(st.integers(world, 3 * world + 5), "leaves")
    leaves = inputs(data.draw(st.integers(0, 1_000), "seed"), count, elements, dtype)
    hosts = Hosts.equal(world, data.draw(st.integers(1, world), "hosts"))
    plans = plans_of(world, count, elements, dtype, op, chunk_bytes, hosts)
    check_pair_order(plans)
    for plan in plans:
        assert decode(plan.encode()).steps == plan.steps
    results = run(
        plans,
        leaves,
        seed=data.draw(st.integers(0, 1_000), "schedule"),
        loans_per_peer=data.draw(st.integers(1, 4), "loans"),
        in_order=data.draw(st.booleans(), "in_order"),
    )
    for result in results:
        np.testing.assert_array_equal(result, fold(leaves, dtype, op, scalar=SCALAR))


def test_sixteen_bit_sums_are_rounded_once_however_they_are_spread() -> None:
    """1 + 3 * 2**-11 is 1 + 2**-9 in fp16. With rounded partial sums, 1 + 2**-11 would be 1."""
    small = np.array([2.0**-11], np.float16)
    leaves = [x.view(np.uint8) for x in (np.array([1.0], np.float16), small, small, small)]
    for world in (1, 2, 3, 4):
        for result in run(plans_of(world, 4, 1, Dtype.F16, ReduceOp.SUM, 64), leaves):
            assert result.view(np.float16).tolist() == [1.0 + 2.0**-9]


def test_fewer_leaves_than_ranks_are_refused() -> None:
    with pytest.raises(ArgumentError, match="2 leaves for 3 ranks; allowed: 3 or more"):
        plans_of(3, 2, 10, Dtype.F32, ReduceOp.SUM, 64)


@pytest.mark.parametrize(("mine", "theirs"), [(4, 5), (4, 4 + 255), (4, 8)])
def test_ranks_that_disagree_about_leaves_find_out(mine: int, theirs: int) -> None:
    plans = [plans_of(2, leaves, 64, Dtype.F32, ReduceOp.SUM, 128)[rank] for rank, leaves in enumerate((mine, theirs))]
    buffers = [[np.zeros(size, np.uint8) for size in plan.buffer_bytes] for plan in plans]
    with pytest.raises(MismatchError, match=r"allreduce of leaves of float32 \(sum\)"):
        reference.run(plans, buffers)
    plain = algorithms.allreduce(world=2, rank=0, elements=64, dtype=Dtype.F32, op=ReduceOp.SUM)
    assert describe_signature(plain.signature) == "allreduce of float32 (sum), 64 elements"
    assert describe_signature(plans[0].signature) == "allreduce of leaves of float32 (sum), 256 elements"
