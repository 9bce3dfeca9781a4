# SPDX-License-Identifier: Apache-2.0
"""Plans on device memory: bounded scratch, few copies, and only necessary waits.

test_plan_algorithms.py checks their results, in any order and with rings of any size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sennit.transport import algorithms
from sennit.transport._core import describe_signature
from sennit.transport.errors import ArgumentError, MismatchError
from sennit.transport.oracle import reference
from sennit.transport.oracle.reference import PlanFault
from sennit.transport.plans.binding import with_counts
from sennit.transport.plans.device_plan import RING_BYTES, SEGMENT_BYTES, cut_messages, for_device
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.plan import Copy, Operand, Plan, PlanBuilder
from sennit.transport.plans.plan_codec import check
from sennit.transport.plans.signature import Kind, signature
from tests.extent import briefly

MIB = 1 << 20


def make_allreduce(world: int, rank: int, size_bytes: int) -> Plan:
    return algorithms.allreduce(
        world=world, rank=rank, elements=size_bytes // 4, dtype=Dtype.F32, op=ReduceOp.SUM, one_shot=True
    )


def make_chunked(world: int, rank: int, size_bytes: int) -> Plan:
    return algorithms.allreduce(
        world=world, rank=rank, elements=size_bytes // 4, dtype=Dtype.F32, op=ReduceOp.SUM,
        chunk_bytes=1_024,
    )  # fmt: skip


def make_cut(world: int, rank: int, size_bytes: int) -> Plan:
    return algorithms.broadcast(world=world, rank=rank, elements=size_bytes, item_bytes=1, root=0, segment_bytes=1_024)


def make_alltoall(world: int, rank: int, size_bytes: int) -> Plan:
    counts = [size_bytes // world] * 2 * world
    return cut_messages(with_counts(algorithms.alltoall(world=world, rank=rank, item_bytes=1), counts))


def make_broadcast(world: int, rank: int, size_bytes: int) -> Plan:
    return algorithms.broadcast(
        world=world, rank=rank, elements=size_bytes, item_bytes=1, root=0, segment_bytes=SEGMENT_BYTES
    )


@pytest.mark.parametrize("world", [2, 3, 16])
@pytest.mark.parametrize("make", [make_allreduce, make_alltoall, make_broadcast])
def test_scratch_is_bounded(make: Callable[[int, int, int], Plan], world: int) -> None:
    for rank in {0, 1, world - 1}:
        plan = for_device(make(world, rank, 64 * MIB))
        assert plan.scratch_bytes <= 3 * RING_BYTES
        largest = max(step.size_bytes for step in between(plan))
        assert largest <= MIB


def between(plan: Plan) -> list[Copy]:
    """The copies between device and host."""
    copies = [step for step in plan.steps if isinstance(step, Copy)]
    return [step for step in copies if plan.scratch in (step.buffer, step.source.index)]


def copies(plan: Plan) -> tuple[int, int]:
    """Returns how many copies come from the device, and how many go to it."""
    loads = sum(step.buffer == plan.scratch for step in between(plan))
    return loads, len(between(plan)) - loads


def test_small_calls_take_one_copy_each_way() -> None:
    assert copies(for_device(make_allreduce(8, 3, 8_192))) == (1, 1)
    assert copies(for_device(make_alltoall(8, 3, 8_192))) == (2, 2)  # One copy on each side of the rank's own part.
    assert copies(for_device(make_broadcast(8, 0, 8_192))) == (1, 0)
    assert copies(for_device(make_broadcast(8, 3, 8_192))) == (0, 1)


def test_a_message_between_two_ranks_is_not_cut() -> None:
    made = with_counts(algorithms.send(world=2, rank=0, peer=1, item_bytes=1), [32 * MIB])
    plan = for_device(made)
    assert [type(step).__name__ for step in plan.steps] == ["Copy", "Send"]
    assert plan.scratch_bytes == 32 * MIB
    assert plan.signature == made.signature


def test_the_signature_says_on_device() -> None:
    made = make_allreduce(2, 0, 4_096)
    plan = for_device(made)
    assert plan.signature != made.signature
    assert describe_signature(made.signature) == "allreduce of float32 (sum), 1024 elements"
    assert describe_signature(plan.signature) == "allreduce of float32 on a device (sum), 1024 elements"


@pytest.mark.parametrize("make", [make_chunked, make_cut])
def test_waits_for_scratch_are_needed(make: Callable[[int, int, int], Plan]) -> None:
    """Without the waits of the copies into scratch, the reference finds races or wrong bytes."""
    world = 3
    plans = [for_device(make(world, rank, 24_576), ring_bytes=4_096) for rank in range(world)]

    def is_right(tried: list[Plan], seed: int) -> bool:
        buffers = [[np.full(24_576 // 4, rank + 1, np.float32)] for rank in range(world)]
        try:
            reference.run(tried, buffers, seed=seed)
        except PlanFault:
            return False
        total = 6.0 if make is make_chunked else 1.0
        return all((buffer[0] == total).all() for buffer in buffers)

    careless = [
        plan._replace(
            steps=tuple(
                step._replace(after=()) if isinstance(step, Copy) and step.buffer == plan.scratch else step
                for step in plan.steps
            )
        )
        for plan in plans
    ]
    assert all(is_right(plans, seed) for seed in range(5))
    assert not all(is_right(careless, seed) for seed in range(10))


def test_ranks_that_expect_another_number_of_segments_find_out() -> None:
    def plan(rank: int, sent: list[int], received: list[int]) -> Plan:
        fixed = with_counts(algorithms.alltoall(world=2, rank=rank, item_bytes=1), [*sent, *received])
        return for_device(cut_messages(fixed, 64))

    plans = [plan(0, [0, 192], [0, 0]), plan(1, [0, 0], [128, 0])]
    buffers = [[np.zeros(n, np.uint8) for n in p.buffer_bytes] for p in plans]
    with pytest.raises(MismatchError):
        reference.run(plans, buffers)


def test_what_the_pass_refuses() -> None:
    made = make_allreduce(2, 0, 4_096)
    with pytest.raises(ArgumentError, match="to device memory: it is there already"):
        for_device(for_device(made))
    with pytest.raises(ArgumentError, match="takes counts"):
        for_device(algorithms.alltoall(world=2, rank=0, item_bytes=1))
    with pytest.raises(ArgumentError, match="cannot be cut: it waits for other steps, or is no first message"):
        cut_messages(make_chunked(2, 0, 4_096))
    builder = PlanBuilder("hand", world=2, rank=0, signature=signature(Kind.ALLTOALL), buffer_bytes=[16])
    builder.recv(1, 0, 0, 0, 8)
    builder.recv(1, 1, 0, 4, 8)
    with pytest.raises(ArgumentError, match="written twice"):
        for_device(builder.build())
    builder = PlanBuilder("hand", world=2, rank=0, signature=signature(Kind.ALLTOALL), buffer_bytes=[16])
    builder.send(1, 0, Operand(0, 4), 8, after=(builder.recv(1, 0, 0, 0, 8),))
    with pytest.raises(ArgumentError, match="reads a part of what earlier steps wrote"):
        for_device(builder.build())


def test_only_copies_touch_device_memory() -> None:
    builder = PlanBuilder("hand", world=2, rank=0, signature=signature(Kind.ALLTOALL), buffer_bytes=[16])
    builder.send(1, 0, Operand(0), 8)
    with pytest.raises(ArgumentError, match="touches device memory"):
        check(builder.build()._replace(on_device=True))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("world", "loans"), briefly([(8, 1), (8, 3), (16, 1)], [(8, 1), (8, 3)]))
def test_a_ring_too_small_for_all_shares_does_not_stop_a_fold(world: int, loans: int, seed: int) -> None:
    elements = world * 32
    plans = [
        for_device(
            algorithms.allreduce(
                world=world, rank=rank, elements=elements, dtype=Dtype.I64, op=ReduceOp.SUM, in_place=False,
                chunk_bytes=64,
            ),
            ring_bytes=world * 64 // 2,
        )
        for rank in range(world)
    ]  # fmt: skip
    given = np.arange(elements, dtype=np.int64).view(np.uint8)
    buffers = [[given.copy(), np.zeros_like(given)] for _ in range(world)]
    reference.run(plans, buffers, seed=seed, loans_per_peer=loans, in_order=True)
    for _, result in buffers:
        np.testing.assert_array_equal(result.view(np.int64), world * np.arange(elements))
