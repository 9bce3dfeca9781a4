# SPDX-License-Identifier: Apache-2.0
"""Collectives with codecs against their definitions, in any legal order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from sennit.transport import algorithms
from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.errors import ArgumentError, MismatchError
from sennit.transport.oracle import reference
from sennit.transport.plans.arithmetic import narrow
from sennit.transport.plans.binding import with_counts
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import MAX_LOAN_BYTES, Plan, Recv, Send
from sennit.transport.plans.plan_codec import check
from sennit.transport.plans.tree import leaves_of
from tests.extent import examples
from tests.transport.algorithm_runs import SCALAR, Array, check_plans, inputs, noise
from tests.transport.coded_scenarios import coded_and_back, definition, scattered

FIXED = [kind for kind in CodecKind if kind is not CodecKind.LOSSLESS]
OPS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.PREMUL_SUM]


@st.composite
def codecs(draw: st.DrawFn) -> Codec:
    kind = draw(st.sampled_from(FIXED))
    has_block = kind in (CodecKind.FP8_E4M3, CodecKind.FP8_E5M2, CodecKind.INT8)
    block = draw(st.sampled_from([1, 3, 16, 33, 64, 4096])) if has_block else None
    stochastic = draw(st.booleans())
    return Codec(kind=kind, block=block, stochastic=stochastic, seed=draw(st.integers(0, 2**64 - 1)))


def plans_of(
    codec: Codec,
    world: int,
    elements: int,
    dtype: Dtype = Dtype.F32,
    op: ReduceOp = ReduceOp.SUM,
    *,
    leaves: int | None = None,
    in_place: bool = True,
    chunk_elements: int = 32_768,
) -> list[Plan]:
    return [
        algorithms.allreduce_coded(
            world=world,
            rank=rank,
            elements=elements,
            dtype=dtype,
            op=op,
            coding=codec.coding(dtype),
            in_place=in_place,
            chunk_elements=chunk_elements,
            leaves=leaves,
        )
        for rank in range(world)
    ]


def run(
    draw: DataObject,
    plans: list[Plan],
    buffers: list[list[Array]],
    codec: Codec,
    counts: list[list[int]] | None = None,
) -> None:
    """Runs the plans under a random schedule. With `counts` it checks them, too."""
    for plan in plans:
        check(plan)
    fixed = plans if counts is None else [with_counts(plan, given) for plan, given in zip(plans, counts, strict=True)]
    check_plans(plans, fixed, buffers)
    reference.run(
        plans,
        buffers,
        counts=counts,
        seed=draw.draw(st.integers(0, 2**32 - 1), "schedule"),
        scalar=SCALAR,
        codec_seed=codec.seed,
        loans_per_peer=draw.draw(st.integers(1, 4), "loans"),
        in_order=draw.draw(st.booleans(), "in_order"),
    )


@examples(40)
@given(
    st.data(),
    codecs(),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(6, 13)),
    st.integers(0, 700),
    st.sampled_from([Dtype.F32, Dtype.F16, Dtype.BF16]),
    st.sampled_from(OPS),
    st.sampled_from([1, 64, 300, 32_768]),
    st.booleans(),
)
def test_it_is_what_the_definition_says(
    data: DataObject,
    codec: Codec,
    world: int,
    leaves: int | None,
    elements: int,
    dtype: Dtype,
    op: ReduceOp,
    chunk_elements: int,
    in_place: bool,
) -> None:
    plans = plans_of(codec, world, elements, dtype, op, leaves=leaves, in_place=in_place, chunk_elements=chunk_elements)
    vectors = inputs(elements, leaves or world, elements, dtype)
    spans = [leaves_of(rank, world, len(vectors)) for rank in range(world)]
    buffers = [[np.concatenate(vectors[span.low : span.high])] for span in spans]
    if leaves is not None or not in_place:
        buffers = [[*given_buffers, noise(elements * dtype.item_bytes)] for given_buffers in buffers]
    run(data, plans, buffers, codec)
    expected = definition(codec, vectors, dtype, op, SCALAR)
    for posted in buffers:
        np.testing.assert_array_equal(posted[-1], expected)


@examples(40)
@given(
    st.data(),
    codecs(),
    st.integers(1, 6),
    st.sampled_from([Dtype.F32, Dtype.F16, Dtype.BF16]),
    st.sampled_from(OPS[:-1]),
    st.sampled_from([1, 64, 32_768]),
)
def test_reduce_scatter_is_what_the_definition_says(
    data: DataObject, codec: Codec, world: int, dtype: Dtype, op: ReduceOp, chunk_elements: int
) -> None:
    counts = data.draw(st.lists(st.integers(0, 200), min_size=world, max_size=world), "counts")
    coding = codec.coding(dtype)
    pieces = algorithms.coded_pieces(counts, coding, chunk_elements)
    plans = [
        algorithms.reduce_scatter_coded(
            world=world,
            rank=rank,
            pieces=pieces,
            dtype=dtype,
            op=op,
            coding=coding,
            chunk_elements=chunk_elements,
        )
        for rank in range(world)
    ]
    posted_counts = [algorithms.reduce_scatter_counts(rank, counts, pieces, dtype, coding) for rank in range(world)]
    vectors = inputs(sum(counts), world, sum(counts), dtype)
    buffers = [[vector.copy(), noise(count * dtype.item_bytes)] for vector, count in zip(vectors, counts, strict=True)]
    run(data, plans, buffers, codec, posted_counts)
    for posted, expected in zip(buffers, scattered(codec, vectors, counts, dtype, op), strict=True):
        np.testing.assert_array_equal(posted[1], expected)


def exchange(
    data: DataObject,
    codec: Codec,
    table: list[list[int]],
    dtype: Dtype,
    *,
    gathers: bool,
    between: Hosts | None = None,
) -> tuple[list[Array], list[list[Array]]]:
    """Runs an alltoall, or an allgather, in which rank r gives `table[r][j]` elements to rank j.

    `between`: the hosts, if only what goes from one to another is coded. Returns what the ranks gave, and their
    buffers.
    """
    world, coding = len(table), codec.exchange_coding(dtype)
    plan: Callable[..., Plan]
    if gathers:
        counts = [own[0] for own in table]
        plan = algorithms.allgather_coded if between is None else algorithms.allgather_between_hosts
        posted_counts = [algorithms.allgather_counts(counts, dtype, coding)] * world
    else:
        plan = algorithms.alltoall_coded if between is None else algorithms.alltoall_between_hosts
        posted_counts = [
            algorithms.alltoall_counts(rank, table[rank], [own[rank] for own in table], dtype, coding)
            for rank in range(world)
        ]
    hosts = {} if between is None else {"hosts": between}
    plans = [plan(world=world, rank=rank, dtype=dtype, coding=coding, **hosts) for rank in range(world)]
    vectors = [inputs(rank, 1, own[0] if gathers else sum(own), dtype)[0] for rank, own in enumerate(table)]
    buffers = [
        [vector.copy(), noise(sum(own[rank] for own in table) * dtype.item_bytes)]
        for rank, vector in enumerate(vectors)
    ]
    run(data, plans, buffers, codec, posted_counts)
    return vectors, buffers


def tables(world: int, largest: int, *, gathers: bool) -> st.SearchStrategy[list[list[int]]]:
    row = st.lists(st.integers(0, largest), min_size=world, max_size=world)
    given = st.lists(row, min_size=world, max_size=world)
    return given.map(lambda table: [[own[0]] * world for own in table]) if gathers else given


@examples(40)
@given(
    st.data(),
    codecs(),
    st.integers(1, 6),
    st.sampled_from([Dtype.F32, Dtype.F16, Dtype.BF16]),
    st.booleans(),
)
def test_exchanges_are_what_the_definitions_say(
    data: DataObject, codec: Codec, world: int, dtype: Dtype, gathers: bool
) -> None:
    table, item_bytes = data.draw(tables(world, 200, gathers=gathers), "counts"), dtype.item_bytes
    vectors, buffers = exchange(data, codec, table, dtype, gathers=gathers)
    for rank, posted in enumerate(buffers):
        parts, before = [noise(0)], 0
        for peer, own in enumerate(table):
            low = 0 if gathers else sum(own[:rank])
            part = vectors[peer][low * item_bytes : (low + own[rank]) * item_bytes]
            decoded = coded_and_back(codec, part, before if gathers else (peer << 40) + low, dtype)
            parts.append(decoded if dtype is Dtype.F32 else narrow(decoded.view(np.float32), dtype))
            before += own[rank]
        np.testing.assert_array_equal(posted[1], np.concatenate(parts))


@examples(10)
@given(
    st.data(),
    st.integers(1, 5),
    st.sampled_from([Dtype.F32, Dtype.F16, Dtype.BF16, Dtype.I32, Dtype.I64]),
    st.booleans(),
)
def test_lossless_exchanges_give_every_bit(data: DataObject, world: int, dtype: Dtype, gathers: bool) -> None:
    table = data.draw(tables(world, 9_000, gathers=gathers), "counts")
    vectors, buffers = exchange(data, Codec(kind=CodecKind.LOSSLESS), table, dtype, gathers=gathers)
    for rank, posted in enumerate(buffers):
        lows = [0 if gathers else sum(own[:rank]) * dtype.item_bytes for own in table]
        parts = [
            vector[low : low + own[rank] * dtype.item_bytes]
            for vector, low, own in zip(vectors, lows, table, strict=True)
        ]
        np.testing.assert_array_equal(posted[1], np.concatenate(parts))


def test_a_rank_with_one_leaf_sends_each_share_coded_and_its_result_to_all() -> None:
    codec, world, elements = Codec(kind=CodecKind.INT8, block=64), 4, 1 << 20
    for plan in plans_of(codec, world, elements):
        sent = sum(step.size_bytes for step in plan.steps if isinstance(step, Send))
        assert sent == 2 * (world - 1) * codec.coded_bytes(elements) // world
        assert max(step.size_bytes for step in plan.steps if isinstance(step, Recv)) <= MAX_LOAN_BYTES
        # The scratch does not grow with the vector.
        assert plan.scratch_bytes == plans_of(codec, world, 4 * elements)[plan.rank].scratch_bytes < 5_000_000


@pytest.mark.parametrize("block", [1, 4095])
def test_chunks_of_any_block_are_no_larger_than_loans(block: int) -> None:
    for plan in plans_of(Codec(kind=CodecKind.INT8, block=block), 2, 300_000, leaves=64):
        assert plan.steps
    for plan in plans_of(Codec(kind=CodecKind.INT8, block=block), 2, 300_000):
        assert max(step.size_bytes for step in plan.steps if isinstance(step, Recv)) <= MAX_LOAN_BYTES


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kind": CodecKind.FP8_E4M3}, ["fp8_e4m3 in blocks of 64", "int8 in blocks of 64"]),
        ({"block": 32}, ["int8 in blocks of 32", "int8 in blocks of 64"]),
        ({"stochastic": True}, ["blocks of 64, rounded by seed 0", "blocks of 64,"]),
    ],
)
def test_ranks_with_other_codecs_are_refused_and_both_are_named(changed: dict[str, object], words: list[str]) -> None:
    fields = {"kind": CodecKind.INT8, "block": 64}
    ours, theirs = Codec(**fields), Codec(**(fields | changed))  # type: ignore[arg-type]
    plans = [plans_of(ours, 2, 1_000)[0], plans_of(theirs, 2, 1_000)[1]]
    with pytest.raises(MismatchError) as caught:
        reference.run(plans, [[np.zeros(4_000, np.uint8)] for _ in range(2)])
    assert all(word in str(caught.value) for word in words)


def test_a_codec_takes_floats_alone_and_sums_take_fixed_sizes() -> None:
    with pytest.raises(ArgumentError, match="INT8: element type 3; allowed: F32, F16, BF16"):
        Codec(kind=CodecKind.INT8).coding(Dtype.I32)
    with pytest.raises(ArgumentError, match="LOSSLESS in a collective that sums"):
        Codec(kind=CodecKind.LOSSLESS).coding(Dtype.F32)
    with pytest.raises(ArgumentError, match="chunk_elements 0"):
        plans_of(Codec(kind=CodecKind.INT8), 2, 100, chunk_elements=0)
    with pytest.raises(ArgumentError, match="2 leaves for 3 ranks"):
        plans_of(Codec(kind=CodecKind.INT8), 3, 100, leaves=2)
