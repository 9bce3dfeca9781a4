# SPDX-License-Identifier: Apache-2.0
"""Allreduce over leaves: one digest for the same leaves, whatever the world."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.transport import algorithms
from sennit.transport._core import describe_signature
from sennit.transport.algorithms.leaves import Leaves
from sennit.transport.config import Algorithm
from sennit.transport.errors import ArgumentError, MismatchError
from sennit.transport.oracle import reference
from sennit.transport.plans.arithmetic import fold, run_program
from sennit.transport.plans.elements import Dtype, ReduceOp, reduce_ops
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Plan, Send
from sennit.transport.plans.plan_codec import decode, encode
from sennit.transport.plans.tree import balanced, given_spans, leaves_of
from tests import extent
from tests.extent import briefly, examples
from tests.transport.algorithm_runs import check_pair_order, inputs

Array = npt.NDArray[Any]

SCALAR = 0.75
KINDS = [(dtype, op) for dtype in Dtype for op in sorted(reduce_ops(dtype))]
# Of each type one operation, and of each operation one type.
EACH_ONCE = {*{kind[0]: kind for kind in KINDS}.values(), *{kind[1]: kind for kind in KINDS}.values()}
# Two ranks or more. Direct and hierarchical are one function, which takes the hosts.
APART = (Algorithm.ONE_SHOT, Algorithm.DISSEMINATION, Algorithm.HALVING)


def plans_of(
    world: int,
    leaves: int,
    elements: int,
    dtype: Dtype,
    op: ReduceOp,
    chunk_bytes: int,
    *,
    hosts: Hosts | None = None,
    algorithm: Algorithm | None = None,
    partial: bool = False,
) -> list[Plan]:
    call: dict[str, Any] = {"world": world, "leaves": leaves, "elements": elements, "dtype": dtype, "op": op}
    compile_plan: Callable[..., Plan] = functools.partial(algorithms.allreduce, chunk_bytes=chunk_bytes, hosts=hosts)
    match algorithm:
        case Algorithm.ONE_SHOT:
            compile_plan = functools.partial(algorithms.allreduce, one_shot=True)
        case Algorithm.DISSEMINATION:
            compile_plan = algorithms.allreduce_dissemination
        case Algorithm.HALVING:
            compile_plan = functools.partial(algorithms.allreduce_halving, chunk_bytes=chunk_bytes)
    return [compile_plan(rank=rank, partial=partial, **call) for rank in range(world)]


def drawn(data: st.DataObject, world: int) -> dict[str, Any]:
    """An algorithm, and hosts if it takes these."""
    algorithm = data.draw(st.sampled_from([None, *(APART if world > 1 else ())]), "algorithm")
    hosts = Hosts.equal(world, data.draw(st.integers(1, world), "hosts")) if algorithm is None else None
    return {"algorithm": algorithm, "hosts": hosts}


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


@pytest.mark.parametrize(("dtype", "op"), briefly(KINDS, EACH_ONCE), ids=lambda kind: kind.name)
def test_worlds_of_any_size_give_the_same_bits(dtype: Dtype, op: ReduceOp) -> None:
    leaves = inputs(100 * dtype + op, 8, 90, dtype)
    expected = fold(leaves, dtype, op, scalar=SCALAR)
    for world in (1, 2, 3, 4, 5, 8) if extent.is_long else (1, 3, 8):
        for count in {1, min(2, world), (world + 1) // 2, world}:
            hosts = Hosts.equal(world, count)
            for result in run(plans_of(world, 8, 90, dtype, op, 128, hosts=hosts), leaves, seed=world):
                np.testing.assert_array_equal(result, expected, err_msg=f"{hosts}")
        for algorithm in APART if world > 1 else ():
            for result in run(plans_of(world, 8, 90, dtype, op, 128, algorithm=algorithm), leaves, seed=world):
                np.testing.assert_array_equal(result, expected, err_msg=f"{algorithm} {world}")


@examples(25)
@given(st.data(), st.integers(1, 7), st.integers(0, 200), st.sampled_from(KINDS), st.sampled_from([64, 131_072]))
def test_partial_sums_in_place_of_leaves(
    data: st.DataObject, world: int, elements: int, kind: tuple[Dtype, ReduceOp], chunk_bytes: int
) -> None:
    dtype, op = kind
    count = data.draw(st.integers(world, 3 * world + 5), "leaves")
    form = drawn(data, world)
    if op is ReduceOp.PREMUL_SUM:
        with pytest.raises(ArgumentError, match="PREMUL_SUM of partial sums; allowed: SUM"):
            plans_of(world, count, elements, dtype, op, chunk_bytes, partial=True, **form)
        return
    leaves = inputs(data.draw(st.integers(0, 1_000), "seed"), count, elements, dtype)
    plans = plans_of(world, count, elements, dtype, op, chunk_bytes, partial=True, **form)
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


@examples(40)
@given(st.data(), st.integers(1, 7), st.integers(0, 300), st.sampled_from(KINDS), st.sampled_from([64, 192, 131_072]))
def test_any_leaves_in_any_order_of_events(
    data: st.DataObject, world: int, elements: int, kind: tuple[Dtype, ReduceOp], chunk_bytes: int
) -> None:
    dtype, op = kind
    count = data.draw(st.integers(world, 3 * world + 5), "leaves")
    leaves = inputs(data.draw(st.integers(0, 1_000), "seed"), count, elements, dtype)
    plans = plans_of(world, count, elements, dtype, op, chunk_bytes, **drawn(data, world))
    check_pair_order(plans)
    for plan in plans:
        assert decode(encode(plan)).steps == plan.steps
    results = run(
        plans,
        leaves,
        seed=data.draw(st.integers(0, 1_000), "schedule"),
        loans_per_peer=data.draw(st.integers(1, 4), "loans"),
        in_order=data.draw(st.booleans(), "in_order"),
    )
    for result in results:
        np.testing.assert_array_equal(result, fold(leaves, dtype, op, scalar=SCALAR))


@pytest.mark.parametrize("chunk_bytes", [384, 576, 1_088])
@pytest.mark.parametrize(("world", "count"), [(8, 13), (9, 31), (16, 27)])
def test_rounds_may_cut_messages_of_many_shares_differently(world: int, count: int, chunk_bytes: int) -> None:
    leaves = inputs(count, count, 16 * world, Dtype.F32)
    plans = plans_of(world, count, 16 * world, Dtype.F32, ReduceOp.SUM, chunk_bytes, algorithm=Algorithm.HALVING)
    for result in run(plans, leaves, seed=chunk_bytes):
        np.testing.assert_array_equal(result, fold(leaves, Dtype.F32, ReduceOp.SUM))


def test_sixteen_bit_sums_are_rounded_once_however_they_are_spread() -> None:
    """1 + 3 * 2**-11 is 1 + 2**-9 in fp16. With rounded partial sums, 1 + 2**-11 would be 1."""
    small = np.array([2.0**-11], np.float16)
    leaves = [x.view(np.uint8) for x in (np.array([1.0], np.float16), small, small, small)]
    for world in (1, 2, 3, 4):
        for algorithm in (None, *APART) if world > 1 else (None,):
            for result in run(plans_of(world, 4, 1, Dtype.F16, ReduceOp.SUM, 64, algorithm=algorithm), leaves):
                assert result.view(np.float16).tolist() == [1.0 + 2.0**-9]


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("algorithm", [None, *APART])
def test_nan_and_signed_zeros_are_those_of_the_tree(algorithm: Algorithm | None, op: ReduceOp) -> None:
    """NaN wins, the first one stays, and of equal values the last: all three show in which order leaves were met."""
    rng = np.random.default_rng(op)
    values = np.array([-np.inf, -1.0, -0.0, 0.0, 1.0, np.nan], np.float32)
    leaves = [rng.choice(values, 200).view(np.uint32) for _ in range(11)]
    for number, leaf in enumerate(leaves):
        # So that each leaf's NaN is its own.
        leaf[np.isnan(leaf.view(np.float32))] = 0x7FC0_0000 + number
    rows = [leaf.view(np.uint8) for leaf in leaves]
    expected = fold(rows, Dtype.F32, op)
    backwards = fold(rows[::-1], Dtype.F32, op)
    assert (expected != backwards).any()
    for world in (2, 3, 5, 6, 11):
        for result in run(plans_of(world, 11, 200, Dtype.F32, op, 128, algorithm=algorithm), rows, seed=world):
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("algorithm", [None, *APART])
def test_fewer_leaves_than_ranks_are_refused(algorithm: Algorithm | None) -> None:
    with pytest.raises(ArgumentError, match="2 leaves for 3 ranks; allowed: 3 or more"):
        plans_of(3, 2, 10, Dtype.F32, ReduceOp.SUM, 64, algorithm=algorithm)


@pytest.mark.parametrize(("world", "count", "sums"), [(4, 16, 1), (6, 12, 1), (3, 8, 2), (4, 13, 3), (2, 13, 2)])
def test_halving_passes_on_one_sum_where_ranks_give_nodes(world: int, count: int, sums: int) -> None:
    """Else a message has the sums of several nodes, and is as many times larger."""
    assert max(Leaves(world, count).widths()) == sums
    if world in (2, 4):
        plans = plans_of(world, count, 64, Dtype.F32, ReduceOp.SUM, 131_072, algorithm=Algorithm.HALVING)
        assert max(s.size_bytes for plan in plans for s in plan.steps if isinstance(s, Send)) == sums * 32 * 4


@pytest.mark.parametrize("algorithm", [None, *APART])
@pytest.mark.parametrize(("mine", "theirs"), [(4, 5), (4, 4 + 255), (4, 8)])
def test_ranks_that_disagree_about_leaves_find_out(mine: int, theirs: int, algorithm: Algorithm | None) -> None:
    plans = [
        plans_of(2, leaves, 64, Dtype.F32, ReduceOp.SUM, 128, algorithm=algorithm)[rank]
        for rank, leaves in enumerate((mine, theirs))
    ]
    buffers = [[np.zeros(size, np.uint8) for size in plan.buffer_bytes] for plan in plans]
    with pytest.raises(MismatchError, match=r"allreduce of leaves of float32 \(sum\)"):
        reference.run(plans, buffers)
    plain = algorithms.allreduce(world=2, rank=0, elements=64, dtype=Dtype.F32, op=ReduceOp.SUM)
    assert describe_signature(plain.signature) == "allreduce of float32 (sum), 64 elements"
    assert describe_signature(plans[0].signature) == "allreduce of leaves of float32 (sum), 256 elements"
