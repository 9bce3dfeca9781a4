# SPDX-License-Identifier: Apache-2.0
"""Reductions that code between hosts alone against their definition, in any legal order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from sennit.transport import algorithms
from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.errors import ArgumentError, MismatchError
from sennit.transport.oracle import reference
from sennit.transport.plans.arithmetic import fold, narrow, run_program
from sennit.transport.plans.binding import with_counts
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Decode, Encode, Plan, Send
from sennit.transport.plans.tree import Span, balanced, combinations, cover, leaves_of
from tests.extent import examples
from tests.transport.algorithm_runs import SCALAR, Array, check_plans, inputs, noise
from tests.transport.coded_scenarios import coded_and_back, definition
from tests.transport.test_coded_algorithms import OPS, codecs, exchange, plans_of, run, tables

INT8 = Codec(kind=CodecKind.INT8, between_hosts=True)


@st.composite
def layouts(draw: st.DrawFn) -> Hosts:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda found: sum(found) <= 7))
    return Hosts(tuple(Span(low, high) for low, high in pairwise(accumulate(sizes, initial=0))))


def between_hosts(
    codec: Codec, hosts: Hosts, leaves: Sequence[Array], dtype: Dtype, op: ReduceOp, first: int = 0, elements: int = -1
) -> Array:
    """fold(Q(node), ...) over the nodes of all hosts, as bytes of float32; with one host the plain fold.

    The leaves are a range of vectors of `elements`, from element `first` on.
    """
    count = len(leaves)
    elements = leaves[0].size // dtype.item_bytes if elements < 0 else elements
    spans = [leaves_of(rank, hosts.world, count) for rank in range(hosts.world)]
    nodes = [node for low, high in hosts.spans for node in cover(Span(spans[low].low, spans[high - 1].high), count)]
    values = []
    for node in nodes:
        inside = leaves[node.low : node.high]
        total = run_program(
            inside,
            balanced(len(inside)),
            dtype,
            op,
            partial=[False] * len(inside),
            divisor=count,
            scalar=SCALAR,
            gives_partial=True,
        )
        values.append(coded_and_back(codec, total, node.low * elements + first))
    program = combinations(tuple(nodes), count)
    return run_program(values, program, Dtype.F32, op, partial=[True] * len(nodes), divisor=count, scalar=SCALAR)


def rounded(total: Array, dtype: Dtype) -> Array:
    return total if dtype is Dtype.F32 else narrow(total.view(np.float32), dtype)


def compile_all(
    codec: Codec,
    hosts: Hosts,
    elements: int,
    dtype: Dtype = Dtype.F32,
    op: ReduceOp = ReduceOp.SUM,
    *,
    leaves: int | None = None,
    in_place: bool = True,
    chunk_elements: int = 32_768,
) -> list[Plan]:
    return [
        algorithms.allreduce_between_hosts(
            world=hosts.world,
            rank=rank,
            hosts=hosts,
            elements=elements,
            dtype=dtype,
            op=op,
            coding=codec.coding(dtype),
            in_place=in_place,
            chunk_elements=chunk_elements,
            leaves=leaves,
        )
        for rank in range(hosts.world)
    ]


@examples(40)
@given(
    st.data(),
    codecs(),
    layouts(),
    st.one_of(st.none(), st.integers(7, 19)),
    st.integers(0, 700),
    st.sampled_from([Dtype.F32, Dtype.F16, Dtype.BF16]),
    st.sampled_from(OPS),
    st.sampled_from([1, 64, 300, 32_768]),
    st.booleans(),
)
def test_an_allreduce_is_what_the_definition_says(
    data: DataObject,
    codec: Codec,
    hosts: Hosts,
    leaves: int | None,
    elements: int,
    dtype: Dtype,
    op: ReduceOp,
    chunk_elements: int,
    in_place: bool,
) -> None:
    codec = dataclasses.replace(codec, between_hosts=True)
    plans = compile_all(
        codec, hosts, elements, dtype, op, leaves=leaves, in_place=in_place, chunk_elements=chunk_elements
    )
    vectors = inputs(elements, leaves or hosts.world, elements, dtype)
    spans = [leaves_of(rank, hosts.world, len(vectors)) for rank in range(hosts.world)]
    buffers = [[np.concatenate(vectors[span.low : span.high])] for span in spans]
    if leaves is not None or not in_place:
        buffers = [[*given_buffers, noise(elements * dtype.item_bytes)] for given_buffers in buffers]
    check_plans(plans, plans, buffers)
    run(data, plans, buffers, codec)
    if len(hosts.spans) == 1:
        expected = fold(vectors, dtype, op, scalar=SCALAR)
    else:
        total = between_hosts(codec, hosts, vectors, dtype, op)
        expected = rounded(coded_and_back(codec, total, len(vectors) * elements), dtype)
    for posted in buffers:
        np.testing.assert_array_equal(posted[-1], expected)


@examples(50)
@given(
    st.data(),
    codecs(),
    layouts(),
    st.sampled_from([Dtype.F32, Dtype.F16, Dtype.BF16]),
    st.sampled_from(OPS[:-1]),
    st.sampled_from([1, 64, 32_768]),
)
def test_a_reduce_scatter_is_what_the_definition_says(
    data: DataObject, codec: Codec, hosts: Hosts, dtype: Dtype, op: ReduceOp, chunk_elements: int
) -> None:
    codec = dataclasses.replace(codec, between_hosts=True)
    counts = data.draw(st.lists(st.integers(0, 200), min_size=hosts.world, max_size=hosts.world), "counts")
    plans = [
        algorithms.reduce_scatter_between_hosts(
            world=hosts.world,
            rank=rank,
            hosts=hosts,
            counts=counts,
            dtype=dtype,
            op=op,
            coding=codec.coding(dtype),
            chunk_elements=chunk_elements,
        )
        for rank in range(hosts.world)
    ]
    vectors = inputs(sum(counts), hosts.world, sum(counts), dtype)
    buffers = [[vector.copy(), noise(count * dtype.item_bytes)] for vector, count in zip(vectors, counts, strict=True)]
    check_plans(plans, plans, buffers)
    run(data, plans, buffers, codec)
    low = 0
    for (_, output), count in zip(buffers, counts, strict=True):
        part = slice(low * dtype.item_bytes, (low + count) * dtype.item_bytes)
        shares = [vector[part] for vector in vectors]
        if len(hosts.spans) == 1:
            expected = fold(shares, dtype, op, scalar=SCALAR)
        else:
            expected = rounded(between_hosts(codec, hosts, shares, dtype, op, low, sum(counts)), dtype)
        np.testing.assert_array_equal(output, expected)
        low += count


@examples(50)
@given(
    st.data(),
    st.one_of(codecs(), st.just(Codec(kind=CodecKind.LOSSLESS))),
    layouts(),
    st.sampled_from([Dtype.F32, Dtype.F16, Dtype.BF16]),
    st.booleans(),
)
def test_exchanges_are_what_the_definitions_say(
    data: DataObject, codec: Codec, hosts: Hosts, dtype: Dtype, gathers: bool
) -> None:
    codec, item_bytes = dataclasses.replace(codec, between_hosts=True), dtype.item_bytes
    table = data.draw(tables(hosts.world, 200, gathers=gathers), "counts")
    vectors, buffers = exchange(data, codec, table, dtype, gathers=gathers, between=hosts)
    for rank, posted in enumerate(buffers):
        parts, before = [noise(0)], 0
        for peer, own in enumerate(table):
            low = 0 if gathers else sum(own[:rank])
            part = vectors[peer][low * item_bytes : (low + own[rank]) * item_bytes]
            # What an allgather gives is the same for all.
            is_coded = gathers or hosts.of_rank(peer) != hosts.of_rank(rank)
            if is_coded and codec.kind is not CodecKind.LOSSLESS:
                first_index = before if gathers else (peer << 40) + low
                part = rounded(coded_and_back(codec, part, first_index, dtype), dtype)
            parts.append(part)
            before += own[rank]
        np.testing.assert_array_equal(posted[1], np.concatenate(parts))


def test_an_allgather_sends_each_part_to_each_other_host_once() -> None:
    hosts, elements, coding = Hosts.equal(8, 2), 1_000, INT8.exchange_coding(Dtype.F32)
    counts = algorithms.allgather_counts([elements] * 8, Dtype.F32, coding)
    for rank in range(8):
        plan = algorithms.allgather_between_hosts(world=8, rank=rank, hosts=hosts, dtype=Dtype.F32, coding=coding)
        sends = [step for step in with_counts(plan, counts).steps if isinstance(step, Send)]
        far = [step.size_bytes for step in sends if hosts.of_rank(step.peer) != hosts.of_rank(rank)]
        near = [step.size_bytes for step in sends if hosts.of_rank(step.peer) == hosts.of_rank(rank)]
        assert far == [coding.coded_bytes(elements)]
        # The own part and one from the other host.
        assert near == [4 * elements] * 6


@pytest.mark.parametrize("op", [op for op in OPS if op is not ReduceOp.PREMUL_SUM])
def test_with_one_rank_a_host_the_bits_are_those_of_coding_everywhere(op: ReduceOp) -> None:
    codec = Codec(kind=CodecKind.FP8_E4M3, stochastic=True, seed=9, between_hosts=True)
    vectors = inputs(1, 4, 1_000, Dtype.F32)
    buffers = [[vector.copy()] for vector in vectors]
    reference.run(compile_all(codec, Hosts.equal(4, 4), 1_000, op=op), buffers, codec_seed=9, scalar=SCALAR)
    expected = definition(codec, vectors, Dtype.F32, op, SCALAR)
    for (got,) in buffers:
        np.testing.assert_array_equal(got, expected)


def test_ranks_of_a_host_exchange_numbers_as_they_are_and_hosts_send_each_sum_once() -> None:
    hosts, elements = Hosts.equal(8, 2), 1 << 20
    coded_share = INT8.coding(Dtype.F32).coded_bytes(elements // 8)
    plans = compile_all(INT8, hosts, elements)
    for plan in plans:
        home = hosts.of_rank(plan.rank)
        sends = [step for step in plan.steps if isinstance(step, Send)]
        far = sum(step.size_bytes for step in sends if hosts.of_rank(step.peer) != home)
        near = sum(step.size_bytes for step in sends if hosts.of_rank(step.peer) == home)
        # The sum of the host for one owner on the other one, and the own result.
        assert far == 2 * coded_share
        # The own part for three relays of two owners each, and two results for three neighbours.
        assert near == (3 * 2 + 2 * 3) * elements // 8 * 4
        # The own share is folded by two hosts, another one passed on.
        assert sum(step.size_bytes for step in plan.steps if isinstance(step, Encode)) == 3 * elements // 8 * 4
        assert sum(step.size_bytes for step in plan.steps if isinstance(step, Decode)) == 4 * elements // 8 * 4
        # The scratch does not grow with the vector.
        assert plan.scratch_bytes == compile_all(INT8, hosts, 4 * elements)[plan.rank].scratch_bytes < 6_000_000


def test_a_single_host_codes_nothing() -> None:
    for plan in compile_all(INT8, Hosts.equal(3, 1), 1_000):
        assert not [step for step in plan.steps if isinstance(step, Encode | Decode)]


def test_a_rank_that_codes_everywhere_is_refused_and_both_are_named() -> None:
    everywhere = dataclasses.replace(INT8, between_hosts=False)
    plans = [compile_all(INT8, Hosts.equal(2, 2), 1_000)[0], plans_of(everywhere, 2, 1_000)[1]]
    with pytest.raises(MismatchError) as caught:
        reference.run(plans, [[np.zeros(4_000, np.uint8)] for _ in range(2)])
    named = str(caught.value).count("int8 in blocks of 64"), str(caught.value).count("between hosts alone")
    assert named == (2, 1)
    assert "device" not in str(caught.value)


def test_what_does_not_fit_a_loan_is_cut_or_refused() -> None:
    wide = Codec(kind=CodecKind.INT8, block=4095, between_hosts=True)
    for plan in compile_all(wide, Hosts.equal(2, 2), 300_000, leaves=64):
        assert max(step.size_bytes for step in plan.steps if isinstance(step, Send)) <= 131_072
    with pytest.raises(ArgumentError, match=r"blocks of 4095 and \d+ nodes in a message; allowed: \d+ elements"):
        compile_all(wide, Hosts.equal(3, 1), 300_000, leaves=5_461)
    with pytest.raises(ArgumentError, match="chunk_elements 0"):
        compile_all(INT8, Hosts.equal(2, 2), 300_000, chunk_elements=0)
