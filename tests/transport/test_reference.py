# SPDX-License-Identifier: Apache-2.0
"""The reference finds errors of plans: races, deadlocks, lost loans, and ranks that disagree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sennit.transport import algorithms
from sennit.transport.errors import ArgumentError
from sennit.transport.oracle import reference
from sennit.transport.oracle.reference import PlanFault
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.plan import Operand, Plan, PlanBuilder, Recv, Reduce, Send
from sennit.transport.plans.signature import Kind, signature


def plan(rank: int, add: Callable[[PlanBuilder], None], buffers: tuple[int, ...] = (16,)) -> Plan:
    b = PlanBuilder("hand", world=2, rank=rank, signature=signature(Kind.ALLTOALL), buffer_bytes=buffers)
    add(b)
    return b.build()


def faults(plans: list[Plan], **options: int) -> list[str]:
    """Returns the errors of fifty schedules."""
    found = []
    for seed in range(50):
        buffers = [[np.zeros(n, np.uint8) for n in p.buffer_bytes] for p in plans]
        try:
            reference.run(plans, buffers, seed=seed, **options)  # type: ignore[arg-type]
        except PlanFault as fault:
            found.append(str(fault))
    return found


def test_a_receive_over_an_unsent_range_is_a_race() -> None:
    def careless(b: PlanBuilder) -> None:
        b.send(1 if b._rank == 0 else 0, 0, Operand(0), 8)
        b.recv(1 if b._rank == 0 else 0, 0, 0, 4, 8)

    assert any("race on 4 bytes" in fault for fault in faults([plan(0, careless), plan(1, careless)]))


def test_every_wait_of_an_allreduce_in_place_is_needed() -> None:
    """If any `after` that does not end a loan is dropped, a race or a wrong result shows. So each is needed."""
    world, elements = 3, 96
    plans = [
        algorithms.allreduce(
            world=world, rank=rank, elements=elements, dtype=Dtype.F32, op=ReduceOp.SUM, chunk_bytes=64
        )
        for rank in range(world)
    ]
    inputs = [np.random.default_rng(rank).standard_normal(elements).astype(np.float32) for rank in range(world)]
    expected = (inputs[0] + inputs[1]) + inputs[2]

    def is_right(changed: list[Plan], seed: int) -> bool:
        buffers = [[x.copy()] for x in inputs]
        try:
            reference.run(changed, buffers, seed=seed)
        except PlanFault:
            return False
        return all(np.array_equal(buffer[0], expected) for buffer in buffers)

    assert all(is_right(plans, seed) for seed in range(20))
    for number, step in enumerate(plans[0].steps):
        if isinstance(step, Reduce):
            continue
        for dropped in step.after:
            after = tuple(earlier for earlier in step.after if earlier != dropped)
            steps = list(plans[0].steps)
            steps[number] = step._replace(after=after)
            changed = [plans[0]._replace(steps=tuple(steps)), *plans[1:]]
            assert not all(is_right(changed, seed) for seed in range(60)), f"step {number} need not wait for {dropped}"


def test_crossed_waits_are_a_deadlock_that_names_ranks_and_steps() -> None:
    def hears_first(b: PlanBuilder) -> None:
        peer = 1 - b._rank
        b.send(peer, 0, Operand(0), 4, after=[b.recv(peer, 0, 0, 8, 4)])

    found = faults([plan(0, hears_first), plan(1, hears_first)])
    assert len(found) == 50
    assert "deadlock; rank 0: 2 steps left, waits for [Recv(peer=1" in found[0]


def test_receives_in_another_order_than_sends_deadlock_when_loans_are_few() -> None:
    def in_order(b: PlanBuilder) -> None:
        for slot in (0, 1):
            b.send(1, slot, Operand(0), 4)

    def reversed_order(b: PlanBuilder) -> None:
        loans = [b.loan(0, slot, 4) for slot in (1, 0)]
        b.reduce([Operand(loan, 0, True) for loan in reversed(loans)], 0, 0, 4, dtype=Dtype.F32, op=ReduceOp.SUM)

    plans = [plan(0, in_order), plan(1, reversed_order)]
    assert not faults(plans, loans_per_peer=2, in_order=True)
    assert len(faults(plans, loans_per_peer=1, in_order=True)) == 50


def test_a_message_that_nobody_takes_is_a_deadlock() -> None:
    def speak(b: PlanBuilder) -> None:
        b.send(1, 0, Operand(0), 4)

    assert len(faults([plan(0, speak), plan(1, lambda b: None)])) == 50


def test_buffers_must_be_large_enough_and_contiguous() -> None:
    plans = [algorithms.broadcast(world=1, rank=0, elements=8, item_bytes=1, root=0)]
    with pytest.raises(ArgumentError, match=r"buffers of \(7,\) bytes; needed: \(8,\)"):
        reference.run(plans, [[np.zeros(7, np.uint8)]])
    with pytest.raises(ArgumentError, match="not contiguous"):
        reference.run(plans, [[np.zeros(16, np.uint8)[::2]]])


def test_overlapping_buffers_are_seen_through() -> None:
    """Two buffer numbers over the same memory race like one."""
    memory = np.zeros(16, np.uint8)

    def cross(b: PlanBuilder) -> None:
        peer = 1 - b._rank
        b.send(peer, 0, Operand(0), 8)
        b.recv(peer, 0, 1, 0, 8)

    plans = [plan(rank, cross, (8, 8)) for rank in range(2)]
    found = set()
    for seed in range(50):
        separate = [np.zeros(8, np.uint8), np.zeros(8, np.uint8)]
        try:
            reference.run(plans, [[memory[:8], memory[:8]], separate], seed=seed)
        except PlanFault as fault:
            found.add("race on 8 bytes" in str(fault))
    assert found == {True}


def test_the_same_seed_gives_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    trace: list[tuple[int, int]] = []
    finish = reference._Rank.finish

    def traced(rank: reference._Rank, step: int) -> None:
        trace.append((rank.plan.rank, step))
        finish(rank, step)

    monkeypatch.setattr(reference._Rank, "finish", traced)
    plans = [
        algorithms.allreduce(world=3, rank=rank, elements=90, dtype=Dtype.F32, op=ReduceOp.SUM) for rank in range(3)
    ]
    runs = []
    for seed in (5, 5, 6):
        trace.clear()
        reference.run(plans, [[np.ones(90, np.float32)] for _ in plans], seed=seed)
        runs.append(list(trace))
    assert runs[0] == runs[1] != runs[2]
    assert isinstance(plans[0].steps[0], Send | Recv)
