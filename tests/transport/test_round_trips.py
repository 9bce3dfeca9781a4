# SPDX-License-Identifier: Apache-2.0
"""Round trips: the allreduce that uses them, in any legal order, and what their plans may not do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from sennit.transport import algorithms
from sennit.transport.errors import ArgumentError, MismatchError
from sennit.transport.oracle import reference
from sennit.transport.oracle.reference import PlanFault
from sennit.transport.plans.arithmetic import fold
from sennit.transport.plans.device_plan import for_device
from sennit.transport.plans.elements import Dtype, ReduceOp, reduce_ops
from sennit.transport.plans.plan import MAX_LOAN_BYTES, Operand, Plan, PlanBuilder, Recv, Reduce, Send
from sennit.transport.plans.plan_codec import FLAG_LOAN, FLAG_ROUND_TRIP, HEADER, STEP, check, decode, encode
from sennit.transport.plans.signature import ROUND_TRIPS, Kind, on_device, signature
from tests.extent import examples
from tests.transport.algorithm_runs import Array, check_allreduce, check_plans, inputs, run_in_any_order


def compiled(
    world: int, elements: int, dtype: Dtype = Dtype.F32, op: ReduceOp = ReduceOp.SUM, *, chunk_bytes: int = 131_072
) -> list[Plan]:
    return [
        algorithms.allreduce_round_trip(
            world=world, rank=rank, elements=elements, dtype=dtype, op=op, chunk_bytes=chunk_bytes
        )
        for rank in range(world)
    ]


def lent(plan: Plan) -> list[int]:
    return [number for number, step in enumerate(plan.steps) if isinstance(step, Send) and step.comes_back]


@examples(75)
@given(
    st.data(),
    st.integers(1, 9),
    st.integers(0, 700),
    st.sampled_from([(dtype, op) for dtype in Dtype for op in sorted(reduce_ops(dtype))]),
    st.sampled_from([64, 192, 1_024, 131_072]),
    st.integers(0, 2**32 - 1),
)
def test_allreduce_by_round_trips(
    data: DataObject,
    world: int,
    elements: int,
    kind: tuple[Dtype, ReduceOp],
    chunk_bytes: int,
    seed: int,
) -> None:
    plans = compiled(world, elements, *kind, chunk_bytes=chunk_bytes)
    given_arrays = inputs(seed, world, elements, kind[0])
    check_plans(plans, plans, [[x] for x in given_arrays])
    check_allreduce(run_in_any_order, data, plans, given_arrays, kind, in_place=True)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_share_goes_once_and_comes_back_once(world: int) -> None:
    plans = compiled(world, 300_007)
    for plan in plans:
        assert len(lent(plan)) == sum(isinstance(step, Send) for step in plan.steps)
        loans = [step for step in plan.steps if isinstance(step, Recv)]
        assert all(loan.buffer is None and loan.comes_back for loan in loans)
        assert all(step.comes_back for step in plan.steps if isinstance(step, Reduce))
        # A step that waits for a lent send waits for the peer's fold, which may wait for this rank.
        assert not any(set(step.after) & set(lent(plan)) for step in plan.steps)
    sent = sum(step.size_bytes for plan in plans for step in plan.steps if isinstance(step, Send))
    assert sent == (world - 1) * 300_007 * 4


def right_or_fault(plans: list[Plan], given_arrays: list[Array], seed: int) -> str:
    """Returns the fault of one schedule, "wrong", or nothing."""
    expected = fold(given_arrays, Dtype.F32, ReduceOp.SUM)
    buffers = [[x.copy()] for x in given_arrays]
    try:
        reference.run(plans, buffers, seed=seed)
    except PlanFault as fault:
        return str(fault)
    return "" if all(np.array_equal(posted[0], expected) for posted in buffers) else "wrong"


def with_step(plan: Plan, number: int, after: tuple[int, ...], *, writes: bool) -> Plan:
    """Adds a copy that reads the range that a send lent, or writes it."""
    send = plan.steps[number]
    assert isinstance(send, Send)
    builder = PlanBuilder(
        plan.name, world=plan.world, rank=plan.rank, signature=plan.signature, buffer_bytes=plan.buffer_bytes,
        scratch_bytes=send.size_bytes, leaves=plan.leaves,
    )  # fmt: skip
    for step in plan.steps:
        builder._add(step)
    here, there = (send.source.index, send.source.offset), (len(plan.buffer_bytes), 0)
    source, target = (there, here) if writes else (here, there)
    builder.copy(Operand(*source), *target, send.size_bytes, after=after)
    return builder.build()


@pytest.mark.parametrize("writes", [False, True])
def test_a_step_that_uses_a_lent_range_is_a_race(writes: bool) -> None:
    world = 3
    plans = compiled(world, 96, chunk_bytes=64)
    given_arrays = inputs(1, world, 96, Dtype.F32)
    assert not any(right_or_fault(plans, given_arrays, seed) for seed in range(20))
    for number in lent(plans[0]):
        earlier = tuple(range(number))  # Without them it mostly runs before the range is lent.
        hasty = [with_step(plans[0], number, earlier, writes=writes), *plans[1:]]
        found = {right_or_fault(hasty, given_arrays, seed) for seed in range(60)}
        assert any("race on 64 bytes" in fault for fault in found), (number, found)
        patient = [with_step(plans[0], number, (number,), writes=False), *plans[1:]]
        assert not any(right_or_fault(patient, given_arrays, seed) for seed in range(20))


def test_a_message_that_waits_for_a_round_trip_can_be_what_the_fold_waits_for() -> None:
    def build(rank: int, add: Callable[[PlanBuilder], None]) -> Plan:
        builder = PlanBuilder("hand", world=2, rank=rank, signature=signature(Kind.ALLREDUCE), buffer_bytes=[16])
        add(builder)
        return builder.build()

    def lends(b: PlanBuilder) -> None:
        out = b.send(1, 0, Operand(0), 8, comes_back=True)
        b.send(1, 1, Operand(0, 8), 8, after=[out])

    def folds(b: PlanBuilder) -> None:
        loan = b.loan(0, 0, 8, comes_back=True)
        second = b.recv(0, 1, 0, 8, 8)
        b.reduce([Operand(0), Operand(loan, is_view=True)], 0, 0, 8, dtype=Dtype.F32, op=ReduceOp.SUM,
                 after=[second], comes_back=True)  # fmt: skip

    with pytest.raises(PlanFault, match=r"deadlock; rank 0: 2 steps left, waits for .*rank 1: 2 steps left"):
        reference.run([build(0, lends), build(1, folds)], [[np.zeros(16, np.uint8)] for _ in range(2)])


@pytest.mark.parametrize("elements", [0, 1, 2, 1_000, 300_007])
def test_a_rank_that_runs_direct_is_told_apart(elements: int) -> None:
    plans = compiled(2, elements)
    plans[1] = algorithms.allreduce(world=2, rank=1, elements=elements, dtype=Dtype.F32, op=ReduceOp.SUM)
    assert plans[0].signature == plans[1].signature | ROUND_TRIPS == plans[1].signature + (1 << 46)
    buffers = [[np.zeros(elements, np.float32)] for _ in range(2)]
    with pytest.raises(MismatchError, match="allreduce by round trips of float32") as caught:
        reference.run(plans, buffers)
    assert "allreduce of float32" in str(caught.value)


def test_one_side_alone_cannot_make_a_round_trip() -> None:
    plans = compiled(2, 100)
    trips = [step for step in plans[1].steps if isinstance(step, Send | Recv | Reduce)]
    assert len(trips) == len(plans[1].steps)
    stays = [step._replace(comes_back=False) for step in trips]
    plans[1] = plans[1]._replace(steps=tuple(stays))
    with pytest.raises(MismatchError, match="by round trips"):
        reference.run(plans, [[np.zeros(100, np.float32)] for _ in range(2)])


@pytest.mark.parametrize("world", [1, 2, 5])
def test_the_flag_survives_the_binary_form(world: int) -> None:
    for plan in compiled(world, 70_001, Dtype.BF16):
        data = encode(plan)
        assert decode(data) == plan
        rows = np.frombuffer(data, STEP, len(plan.steps), HEADER.size)
        for step, row in zip(plan.steps, rows, strict=True):
            loan = FLAG_LOAN if isinstance(step, Recv) else 0
            trip = FLAG_ROUND_TRIP if isinstance(step, Send | Recv | Reduce) and world > 1 else 0
            assert row["flags"] == loan | trip == loan + 4 * bool(trip)


def build(add: Callable[[PlanBuilder], object], *, kind: Kind = Kind.ALLREDUCE, device: bool = False) -> Plan:
    value = on_device(signature(kind)) if device else signature(kind)
    builder = PlanBuilder("hand", world=3, rank=0, signature=value, buffer_bytes=[1 << 20])
    add(builder)
    return builder.build()._replace(on_device=device)


def fold_of(b: PlanBuilder, loan: int, size_bytes: int, *, comes_back: bool, gives_partial: bool = False) -> int:
    operands = [Operand(0), Operand(loan, is_view=True)]
    return b.reduce(operands, 0, 0, size_bytes, dtype=Dtype.F32, op=ReduceOp.SUM, comes_back=comes_back,
                    gives_partial=gives_partial)  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (build(lambda b: b.send(1, 0, Operand(0), 0, comes_back=True)), r"round trip of 0 bytes; allowed: 1\.\.131072"),
        (build(lambda b: b.send(1, 0, Operand(0), MAX_LOAN_BYTES + 1, comes_back=True)), "round trip of 131073 bytes"),
        (build(lambda b: b.send(1, 0, Operand(0), 8, comes_back=True), kind=Kind.P2P), "or a send/recv must not"),
        (
            build(lambda b: b.send(1, 0, Operand(1), 8, comes_back=True), device=True),
            "a plan on device, a counted size that may be empty or a send/recv must not",
        ),
        (build(lambda b: b._add(Recv(1, 0, 8, 0, 0, (), True))), "only a send, a loan and a reduction to final"),
        (
            build(lambda b: fold_of(b, b.loan(1, 0, 8, comes_back=True), 8, comes_back=False)),
            "and the loan that it reads must both make the round trip, or neither",
        ),
        (
            build(lambda b: fold_of(b, b.loan(1, 0, 8), 8, comes_back=True)),
            "and the loan that it reads must both make the round trip, or neither",
        ),
        (
            build(lambda b: b.copy(Operand(b.loan(1, 0, 8, comes_back=True), is_view=True), 0, 0, 8)),
            "and the loan that it reads must both make the round trip, or neither",
        ),
        (
            build(lambda b: fold_of(b, b.loan(1, 0, 16, comes_back=True), 8, comes_back=True)),
            "sends back another size than it was lent",
        ),
        (
            build(lambda b: fold_of(b, b.loan(1, 0, 8, comes_back=True), 8, comes_back=True, gives_partial=True)),
            "only a send, a loan and a reduction to final results",
        ),
    ],
)  # fmt: skip
def test_broken_rules_are_named(plan: Plan, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check(plan)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"chunk_bytes": 1 << 20}, "chunk_bytes 1048576; allowed"),
        ({"dtype": Dtype.C64, "op": ReduceOp.MAX}, "MAX is not defined for C64"),
    ],
)
def test_bad_arguments_name_value_and_range(changed: dict[str, object], message: str) -> None:
    call: dict[str, object] = {"world": 4, "rank": 0, "elements": 4, "dtype": Dtype.F32, "op": ReduceOp.SUM}
    with pytest.raises(ArgumentError, match=message):
        algorithms.allreduce_round_trip(**call | changed)  # type: ignore[arg-type]


def test_round_trips_have_no_plan_on_device() -> None:
    with pytest.raises(ArgumentError):
        for_device(compiled(2, 1_000)[0])
