# SPDX-License-Identifier: Apache-2.0
"""Plans that are written without the compilers: each byte is what the compilers give."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from sennit.runtime.backend.process_group import Options, PlanCompiler
from sennit.transport.choice.calibration import Calibration
from sennit.transport.choice.costs import Collective
from sennit.transport.choice.ready_plans import WORLD_MAX, ready_plan, ready_staged_classes
from sennit.transport.choice.selection import Selection
from sennit.transport.meeting.rendezvous import BUILT_IN_LABEL
from sennit.transport.plans.elements import Dtype, ReduceOp, reduce_ops
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.signature import Kind


class Group:
    """What a compiler asks of the member of a group of one host."""

    is_plain = False

    def __init__(self, world: int, rank: int) -> None:
        self.world, self.rank = world, rank
        self.selection = Selection(hosts=Hosts.equal(world, 1))
        self.joined = self.communicator = self
        self.options = Options()


def compiled(world: int, rank: int, **call: Any) -> bytes:
    compiler: Any = PlanCompiler(Group(world, rank))  # type: ignore[arg-type]
    renamed = {**call, "reduce_op": call["op"], "is_send": False, "on_device": False, "counts": ()}
    del renamed["op"]
    plan: bytes = compiler(**renamed)
    return plan


def call_of(kind: Kind, **given: Any) -> dict[str, Any]:
    call: dict[str, Any] = {"type_code": 0, "op": 0, "item_bytes": 1, "root": 0, "separate": False, "in_place": False}
    return {**call, "kind": int(kind), "size_class": 0, **given}


def ranks_of(world: int) -> set[int]:
    return {0, world // 2, world - 1}


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8, 14, 15, 16, 17, 18, 19, 22, 23, 26, 27, 31, 32])
def test_sums_are_those_of_the_compilers(world: int) -> None:
    ready = 0
    for grade, dtype in itertools.product([*range(1, 60), 66, 81, 90, 101], (Dtype.U8, Dtype.BF16, Dtype.F32)):
        rank = (grade * 7 + dtype) % world
        op = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX)[grade % 3]
        call = call_of(
            Kind.ALLREDUCE, type_code=int(dtype), op=int(op), item_bytes=dtype.item_bytes, size_class=1 + grade
        )
        plan = ready_plan(world, rank, **call)
        if plan is not None:
            ready += 1
            assert plan == compiled(world, rank, **call), (grade, dtype, rank)
    # 4 KiB of float32 is grade 42.
    assert ready > 50


def test_large_sums_have_a_ready_plan() -> None:
    for world in range(1, WORLD_MAX + 1):
        for size_class in (1 + 58, 1 + 74):
            call = call_of(Kind.ALLREDUCE, type_code=int(Dtype.F32), item_bytes=4, size_class=size_class)
            assert ready_plan(world, world - 1, **call) is not None


def test_all_operations_that_are_ready_exist_for_their_type() -> None:
    for dtype, op in itertools.product(Dtype, ReduceOp):
        call = call_of(Kind.ALLREDUCE, type_code=int(dtype), op=int(op), item_bytes=dtype.item_bytes, size_class=1 + 70)
        plan = ready_plan(4, 1, **call)
        if plan is not None:
            assert op in reduce_ops(dtype)
            assert plan == compiled(4, 1, **call)


@pytest.mark.parametrize("world", [1, 2, 3, 7, 8, 32])
def test_moves_are_those_of_the_compilers(world: int) -> None:
    for rank in ranks_of(world):
        barrier = call_of(Kind.BARRIER)
        assert ready_plan(world, rank, **barrier) == compiled(world, rank, **barrier)
        for separate, in_place in ((False, False), (False, True), (True, False)):
            call = call_of(Kind.ALLGATHER, type_code=0x86, item_bytes=8, separate=separate, in_place=in_place)
            assert ready_plan(world, rank, **call) == compiled(world, rank, **call)
        for root, size_class in itertools.product(ranks_of(world), (1 + 3, 1 + 42, 1 + 73, 1 + 80)):
            call = call_of(Kind.BROADCAST, type_code=7, item_bytes=4, root=root, size_class=size_class)
            assert ready_plan(world, rank, **call) in (None, compiled(world, rank, **call))
            assert size_class == 4 or ready_plan(world, rank, **call) is not None


def test_the_cost_model_of_a_group_without_a_file_is_the_built_in_one() -> None:
    assert Calibration().label() == BUILT_IN_LABEL


def test_what_is_not_direct_is_what_the_cost_model_says() -> None:
    for world, kind in itertools.product((1, 2, 15, 16, WORLD_MAX), (Kind.ALLGATHER, Kind.REDUCE_SCATTER)):
        selection = Selection(hosts=Hosts.equal(world, 1))
        assert ready_staged_classes(world, kind) == selection.staged_classes(Collective[kind.name])
    assert ready_staged_classes(WORLD_MAX + 1, Kind.ALLGATHER) is None
    assert ready_staged_classes(2, Kind.ALLTOALL) is None
