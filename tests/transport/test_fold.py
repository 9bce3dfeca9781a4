# SPDX-License-Identifier: Apache-2.0
"""Reductions by hosts, against the tree: bit for bit, for any layout of hosts, in any legal order of events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.transport import algorithms
from sennit.transport.algorithms.ranges import DEFAULT_CHUNK_BYTES
from sennit.transport.plans.elements import Dtype, ReduceOp, reduce_ops
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Plan, Send
from sennit.transport.plans.tree import Span
from tests.extent import examples
from tests.transport.algorithm_runs import (
    Array,
    check_allreduce,
    check_plans,
    check_reduce_scatter,
    inputs,
    run_in_any_order,
)

KINDS = [(dtype, op) for dtype in Dtype for op in sorted(reduce_ops(dtype))]
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 10_000)
chunk_sizes = st.sampled_from([64, 192, 1_024, 131_072])
layouts = st.lists(st.integers(1, 4), min_size=2, max_size=4)


def hosts_of(sizes: Sequence[int]) -> Hosts:
    return Hosts(tuple(Span(low, high) for low, high in pairwise(accumulate(sizes, initial=0))))


def run(draw: st.DataObject, plans: Sequence[Plan], buffers: Sequence[Sequence[Array]]) -> None:
    check_plans(plans, plans, buffers)
    run_in_any_order(draw, plans, buffers)


@examples(15)
@given(st.data(), layouts, st.integers(0, 900), kinds, st.booleans(), chunk_sizes, seeds)
def test_allreduce(
    data: st.DataObject,
    sizes: list[int],
    elements: int,
    kind: tuple[Dtype, ReduceOp],
    in_place: bool,
    chunk_bytes: int,
    seed: int,
) -> None:
    dtype, op = kind
    hosts, world = hosts_of(sizes), sum(sizes)
    plans = [
        algorithms.allreduce(
            world=world, rank=rank, elements=elements, dtype=dtype, op=op, in_place=in_place,
            chunk_bytes=chunk_bytes, hosts=hosts,
        )
        for rank in range(world)
    ]  # fmt: skip
    check_allreduce(run, data, plans, inputs(seed, world, elements, dtype), kind, in_place)


@examples(20)
@given(
    st.data(), layouts, st.lists(st.integers(0, 200), min_size=16, max_size=16), kinds,
    st.sampled_from(["one", "list", "aliased"]), chunk_sizes, seeds,
)  # fmt: skip
def test_reduce_scatter(
    data: st.DataObject,
    sizes: list[int],
    counts: list[int],
    kind: tuple[Dtype, ReduceOp],
    form: str,
    chunk_bytes: int,
    seed: int,
) -> None:
    dtype, op = kind
    hosts, world = hosts_of(sizes), sum(sizes)
    counts = counts[:world]
    plans = [
        algorithms.reduce_scatter(
            world=world, rank=rank, counts=counts, dtype=dtype, op=op,
            list_input=form == "list", chunk_bytes=chunk_bytes, hosts=hosts,
        )
        for rank in range(world)
    ]  # fmt: skip
    check_reduce_scatter(run, data, plans, inputs(seed, world, sum(counts), dtype), kind, counts, form)


def bytes_between(plans: Sequence[Plan], hosts: Hosts) -> int:
    """What the first host sends to others."""
    here = hosts.spans[0]
    return sum(
        step.size_bytes
        for plan in plans[: here.high]
        for step in plan.steps
        if isinstance(step, Send) and step.peer >= here.high
    )


@pytest.mark.parametrize(("count", "ranks_each"), [(2, 4), (4, 4), (2, 8), (3, 2)])
def test_a_host_sends_its_vector_once_to_other_hosts(count: int, ranks_each: int) -> None:
    world, elements = count * ranks_each, 96 * 1_024
    hosts = Hosts.equal(world, count)
    call: dict[str, Any] = {"world": world, "elements": elements, "dtype": Dtype.F32, "op": ReduceOp.SUM}
    by_hosts = [algorithms.allreduce(rank=rank, hosts=hosts, **call) for rank in range(world)]
    direct = [algorithms.allreduce(rank=rank, **call) for rank in range(world)]
    # Patarasu and Yuan's minimum, with hosts for ranks.
    assert bytes_between(by_hosts, hosts) == 2 * (count - 1) * elements * 4 // count
    assert bytes_between(direct, hosts) == ranks_each * bytes_between(by_hosts, hosts)


def test_partial_sums_on_their_way_take_little_memory() -> None:
    hosts = Hosts.equal(8, 2)
    plan = algorithms.allreduce(world=8, rank=0, elements=64 << 20, dtype=Dtype.F16, op=ReduceOp.SUM, hosts=hosts)
    assert plan.scratch_bytes == 16 * DEFAULT_CHUNK_BYTES


def test_ranks_of_a_host_follow_one_another() -> None:
    assert Hosts.of(["a", "a", "b", "c", "c"]) == hosts_of([2, 1, 2])
    assert Hosts.of(["a", "b", "a", "b"]) is None
    assert [hosts_of(sizes).ranks_each for sizes in ([4], [2, 2], [1, 1, 1], [3, 1])] == [4, 2, 1, None]
    hosts = hosts_of([2, 3])
    assert [hosts.relay(0, rank) for rank in range(5)] == [0, 1, 0, 1, 0]
    assert [hosts.relay(1, rank) for rank in range(5)] == [2, 3, 2, 3, 4]
    assert [Hosts.equal(8, count).near_levels() for count in (1, 2, 4, 8)] == [3, 2, 1, 0]
    assert hosts_of([3, 3]).near_levels() == 0
