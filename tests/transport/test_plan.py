# SPDX-License-Identifier: Apache-2.0
"""Plans: the error of each broken rule of docs/reference/plans.md, and the binary form byte by byte."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.transport import _core
from sennit.transport._core import describe_signature
from sennit.transport.algorithms import allreduce, alltoall, barrier, broadcast, recv
from sennit.transport.errors import ArgumentError
from sennit.transport.plans.binding import with_counts
from sennit.transport.plans.elements import Dtype, ReduceOp, reduce_ops
from sennit.transport.plans.plan import (
    ANY_PEER,
    MAX_LOAN_BYTES,
    SLOT_LIMIT,
    Copy,
    Operand,
    Plan,
    PlanBuilder,
    Recv,
    Send,
)
from sennit.transport.plans.plan_codec import HEADER, OPERAND, STEP, check, decode, encode
from sennit.transport.plans.signature import Kind, signature


def builder(*buffers: int, rank: int = 0, kind: Kind = Kind.ALLREDUCE) -> PlanBuilder:
    return PlanBuilder(
        "sample", world=3, rank=rank, signature=signature(kind), buffer_bytes=buffers or (64,), scratch_bytes=32
    )


def fold_into_buffer(b: PlanBuilder, *operands: Operand, size_bytes: int = 8, offset: int = 0) -> int:
    return b.reduce(operands, 0, offset, size_bytes, dtype=Dtype.F32, op=ReduceOp.SUM)


def fold_by(b: PlanBuilder, program: tuple[int, ...]) -> int:
    return b.reduce([Operand(0), Operand(0, 8)], 0, 16, 8, dtype=Dtype.F32, op=ReduceOp.SUM, program=program)


def breaks(*steps: Callable[[PlanBuilder], object]) -> PlanBuilder:
    b = builder()
    for step in steps:
        step(b)
    return b


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (breaks(lambda b: b.send(0, 0, Operand(0), 4)), "step 0 has peer 0"),
        (breaks(lambda b: b.send(3, 0, Operand(0), 4)), "step 0 has peer 3"),
        (breaks(lambda b: b.recv(ANY_PEER, 0, 0, 0, 4)), "receives from any peer, but the plan is no send/recv"),
        (breaks(lambda b: b.send(1, SLOT_LIMIT, Operand(0), 4)), "step 0 has slot 1048575"),
        (breaks(*[lambda b: b.send(1, 5, Operand(0), 4)] * 2), "slot 5 is used twice with peer 1"),
        (breaks(*[lambda b: b.recv(1, 5, 0, 0, 4)] * 2), "slot 5 is used twice with peer 1"),
        (breaks(lambda b: b.send(1, 0, Operand(0, 61), 4)), "reaches byte 65 of buffer 0, which has 64 bytes"),
        (breaks(lambda b: b.send(1, 0, Operand(2), 4)), "step 0 names buffer 2"),
        (breaks(lambda b: b.recv(1, 0, 1, 30, 4)), "reaches beyond the scratch"),
        (breaks(lambda b: b.recv(1, 0, 0, -1, 4)), "step 0 has offset -1"),
        (breaks(lambda b: b.recv(1, 0, 0, 0, -4)), "step 0 has size_bytes -4"),
        (breaks(lambda b: b.send(1, 0, Operand(0, -4), 4)), "Operand.*offset=-4.*allowed: an index and an offset"),
        (breaks(lambda b: b.loan(1, 0, MAX_LOAN_BYTES + 1)), "step 0 is a loan of 131073 bytes"),
        (breaks(lambda b: b.loan(1, 0, 0)), "step 0 is a loan of 0 bytes"),
        (breaks(lambda b: b.loan(1, 0, 8)), "nobody reads the loan of step 0"),
        (breaks(lambda b: b.send(1, 0, Operand(0), 4, after=[0])), "wait for one another in a circle"),
        (breaks(lambda b: b.send(1, 0, Operand(0), 4, after=[1])), "waits for step 1; allowed: 0..0"),
        (breaks(lambda b: b.loan(1, 0, 8), lambda b: b.send(2, 0, Operand(0, 0, True), 8)), "step 1 sends a loan"),
        (
            breaks(lambda b: b.loan(1, 0, 8), *[lambda b: b.copy(Operand(0, 0, True), 0, 0, 8)] * 2),
            "a loan is read by two steps",
        ),
        (
            breaks(lambda b: b.recv(1, 0, 0, 0, 8), lambda b: b.copy(Operand(0, 0, True), 0, 0, 8)),
            "step 1 reads a step that is no loan",
        ),
        (
            breaks(lambda b: b.loan(1, 0, 8), lambda b: b.copy(Operand(0, 4, True), 0, 0, 8)),
            "step 1 reads beyond a loan",
        ),
        (breaks(lambda b: fold_into_buffer(b)), "step 0 must have operands"),
        (breaks(lambda b: fold_into_buffer(b, Operand(0), size_bytes=6)), "step 0 reduces part of an element"),
        (breaks(lambda b: fold_into_buffer(b, Operand(0, 4))), "step 0 writes over part of an operand"),
        (breaks(lambda b: fold_by(b, (0, 2))), "step 0 combines 3 values after operand 1; there are 2"),
        (breaks(lambda b: fold_by(b, (0, 0))), "step 0 leaves 2 values; needed: 1"),
        (breaks(lambda b: fold_by(b, (1,))), r"step 0 has program \(1,\); allowed: 2 numbers of 0..255"),
        (breaks(lambda b: fold_by(b, (0, 256))), r"step 0 has program \(0, 256\); allowed: 2 numbers of 0..255"),
        (
            breaks(lambda b: b.reduce([Operand(0, 0, False, True)], 0, 0, 8, dtype=Dtype.F16, op=ReduceOp.SUM)),
            "step 0 writes over part of an operand",
        ),
    ],
)
def test_rules(plan: PlanBuilder, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check(plan.build())


def test_loans_are_awaited_even_in_plans_built_by_hand() -> None:
    b = builder()
    b.copy(Operand(b.loan(1, 0, 8), 0, True), 0, 0, 8)
    plan = b.build()
    hasty = plan.steps[1]._replace(after=())
    with pytest.raises(ArgumentError, match="without waiting for it"):
        check(plan._replace(steps=(plan.steps[0], hasty)))
    with pytest.raises(ArgumentError, match="rank 3 of 3"):
        check(plan._replace(rank=3))
    with pytest.raises(ArgumentError, match="the tree has no leaves"):
        check(plan._replace(leaves=0))


def test_binary_form_byte_by_byte() -> None:
    b = builder(16, rank=1)
    sent = b.send(2, 7, Operand(0, 8), 8)
    loan = b.loan(0, 9, 8)
    b.reduce([Operand(0, 8), Operand(loan, 0, True)], 0, 8, 8, dtype=Dtype.F64, op=ReduceOp.MAX, after=[sent])
    b.copy(Operand(0, 0), 1, 4, 8)
    b.reduce([Operand(0, 4, is_partial=True)], 1, 0, 8, dtype=Dtype.BF16, op=ReduceOp.SUM, gives_partial=True)
    data = encode(b.build()._replace(leaves=40))
    assert (HEADER.size, STEP.itemsize, OPERAND.itemsize) == (64, 48, 16)
    none = 0
    steps = [
        # kind dtype op flags  peer slot operands(first, count) edges(first, count) buffer offset size
        (0, 0, 0, 0, 2, 7, 0, 1, 0, 1, none, none, 8),
        (1, 0, 0, 1, 0, 9, 1, 0, 1, 1, none, none, 8),
        (3, 8, 4, 0, 0, 0, 1, 2, 2, 0, 0, 8, 8),
        (2, 0, 0, 0, 0, 0, 3, 1, 2, 0, 1, 4, 8),
        (3, 6, 0, 2, 0, 0, 4, 1, 2, 0, 1, 0, 8),
    ]
    operands = [(0, 0, 8), (0, 0, 8), (1 << 16 | 1, 1, 0), (0, 0, 0), (1 << 8, 0, 4)]
    expected = b"".join(
        [
            struct.pack("<IHHIIQIIIIQIIII", 0x31504E53, 2, 1, 3, 1, 1 << 56, 5, 5, 2, 6, 32, 0, 0, 40, 0),
            *(struct.pack("<4B7I2Q", *step) for step in steps),
            *(struct.pack("<IIQ", *operand) for operand in operands),
            struct.pack("<2I", 2, 2),
            b"sample",
        ]
    )
    assert data == expected


@pytest.mark.parametrize(
    "plan",
    [
        allreduce(world=3, rank=1, elements=100_000, dtype=Dtype.BF16, op=ReduceOp.AVG),
        alltoall(world=3, rank=0, item_bytes=4),
        alltoall(world=3, rank=1, item_bytes=2, list_output=True),
        with_counts(alltoall(world=3, rank=0, item_bytes=4), [1, 0, 5, 1, 2, 3]),
        broadcast(world=5, rank=3, elements=10 << 20, item_bytes=1, root=2),
        barrier(world=7, rank=2),
        recv(world=2, rank=0, peer=ANY_PEER, item_bytes=8),
    ],
    ids=lambda plan: plan.name,
)
def test_decode_gives_the_plan_back(plan: Plan) -> None:
    assert decode(encode(plan)) == plan


def test_decode_refuses_what_is_no_plan() -> None:
    data = encode(barrier(world=2, rank=0))
    for length in range(len(data)):
        with pytest.raises(ArgumentError):
            decode(data[:length])
    with pytest.raises(ArgumentError, match="version 3"):
        decode(data[:4] + b"\x03" + data[5:])
    with pytest.raises(ArgumentError, match="kind 9"):
        decode(data[:64] + b"\x09" + data[65:])


def test_a_fold_may_write_over_the_whole_of_an_operand() -> None:
    check(breaks(lambda b: fold_into_buffer(b, Operand(0), Operand(0, 8))).build())


def test_a_plan_of_one_hundred_thousand_steps_encodes() -> None:
    b = builder(64)
    last = b.recv(1, 0, 0, 0, 8)
    for slot in range(100_000):
        last = b.send(1, slot, Operand(0, 8), 8, after=[last])
    data = encode(b.build())
    assert len(data) == 64 + 100_001 * 48 + 100_000 * 16 + 100_000 * 4 + len("sample")


def test_builder_reports_scratch_and_sorts_waits() -> None:
    b = builder()
    first, second = b.recv(1, 0, 0, 0, 4), b.recv(2, 0, 0, 8, 4)
    b.send(1, 0, Operand(0), 4, after=[second, first, second])
    plan = b.build()
    assert plan.scratch == 1
    assert plan.steps == (Recv(1, 0, 4, 0), Recv(2, 0, 4, 0, 8), Send(1, 0, Operand(0), 4, (0, 1)))
    assert isinstance(Copy(Operand(0), 0, 0, 1), Copy)


@given(
    kind=st.sampled_from(list(Kind)),
    code=st.integers(0, 255),
    op=st.integers(0, 255),
    root=st.integers(0, 1 << 20),
    elements=st.integers(0, 1 << 40),
)
def test_signature_keeps_fields_apart(kind: Kind, code: int, op: int, root: int, elements: int) -> None:
    value = signature(kind, type_code=code, op=op, root=root, elements=elements)
    assert value < 1 << 64
    first = (root >> 8 & 0xF) << 4 | kind
    assert struct.pack(">Q", value) == struct.pack(">BBBBI", first, code, op, root & 0xFF, elements & 0xFFFFFFFF)


def test_signatures_in_words() -> None:
    value = signature(Kind.ALLREDUCE, type_code=Dtype.F32, op=ReduceOp.SUM, elements=1024)
    assert describe_signature(value) == "allreduce of float32 (sum), 1024 elements"
    assert describe_signature(signature(Kind.BROADCAST, type_code=0x97, root=3)) == "broadcast of bytes, root 3"
    assert describe_signature(signature(Kind.GATHER, type_code=7, root=4_095)) == "gather of float32, root 4095"
    assert len({signature(Kind.BROADCAST, root=root) for root in range(4_096)}) == 4_096
    assert describe_signature(signature(Kind.BARRIER)) == "barrier"
    assert describe_signature(0xFE << 56) == "unknown operation of uint8"


def test_kinds_are_those_of_the_core() -> None:
    words = {Kind.P2P: "send/recv"}
    for kind in Kind:
        assert describe_signature(signature(kind)).split(" of ")[0] == words.get(kind, kind.name.lower())
    assert describe_signature(signature(Kind.BARRIER) + (1 << 56)).startswith("unknown operation")


def test_reductions_are_those_of_the_core() -> None:
    core = ctypes.CDLL(str(Path(_core.__file__).with_name("libsennit_core.so")))
    for dtype in range(256):
        for op in range(256):
            expected = dtype in list(Dtype) and op in list(ReduceOp) and op in reduce_ops(Dtype(dtype))
            assert bool(core.sennit_reduce_is_defined(dtype, op)) == expected, (dtype, op)
