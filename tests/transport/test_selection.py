# SPDX-License-Identifier: Apache-2.0
"""The choice of algorithms: what the model knows of plans, what it chooses, and what SENNIT_ALGORITHM changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sennit.transport import algorithms
from sennit.transport.config import Algorithm, Config
from sennit.transport.elements import Dtype, ReduceOp
from sennit.transport.errors import ConfigError
from sennit.transport.plan import Plan, Send
from sennit.transport.selection import NETWORK, SHARED_MEMORY, Costs, Reduction, Selection, work_of
from tests.transport.meeting import Recorder, meet

KIB, MIB = 1 << 10, 1 << 20


def chosen(costs: Costs, world: int, size_bytes: int, reduction: Reduction = Reduction.ALLREDUCE) -> Algorithm:
    selection = Selection(costs=costs)
    return selection.choose(selection.rate(reduction, world=world, size_bytes=size_bytes))


def sends(plan: Plan) -> list[Send]:
    return [step for step in plan.steps if isinstance(step, Send)]


def plan_of(algorithm: Algorithm, reduction: Reduction, world: int, rank: int, elements: int, dtype: Dtype) -> Plan:
    selection = Selection(costs=NETWORK, forced=algorithm)
    if reduction is Reduction.ALLREDUCE:
        return selection.allreduce(world=world, rank=rank, elements=elements, dtype=dtype, op=ReduceOp.SUM)
    counts = [elements // world] * world
    return selection.reduce_scatter(world=world, rank=rank, counts=counts, dtype=dtype, op=ReduceOp.SUM)


@pytest.mark.parametrize("reduction", list(Reduction))
@pytest.mark.parametrize("algorithm", list(Algorithm))
@pytest.mark.parametrize("dtype", [Dtype.F32, Dtype.F16])
@pytest.mark.parametrize("world", [2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_the_model_knows_what_the_busiest_rank_sends(
    world: int, dtype: Dtype, algorithm: Algorithm, reduction: Reduction
) -> None:
    for size_bytes in (world * 128, 48 * KIB, 3 * MIB):
        elements = size_bytes // dtype.item_bytes // world // 32 * 32 * world
        size_bytes = elements * dtype.item_bytes
        ratio = 4 / dtype.item_bytes
        work = work_of(algorithm, reduction, world=world, size_bytes=size_bytes, partial_ratio=ratio)
        if work is None:
            continue
        plans = [plan_of(algorithm, reduction, world, rank, elements, dtype) for rank in range(world)]
        sent_bytes = max(sum(step.size_bytes for step in sends(plan)) for plan in plans)
        peers = max(len({step.peer for step in sends(plan)}) for plan in plans)
        messages = max(len(sends(plan)) for plan in plans)
        if algorithm is not Algorithm.HALVING or world & (world - 1) == 0:
            assert sent_bytes == pytest.approx(work.sent_bytes, rel=0.02)
            assert peers == work.peers
            assert messages == pytest.approx(work.messages, rel=0.35)
        else:
            assert sent_bytes == pytest.approx(work.sent_bytes, rel=0.2)
            assert peers <= work.peers + 1
            assert messages == pytest.approx(work.messages, rel=0.35)


@pytest.mark.parametrize(
    ("costs", "world", "size_bytes", "algorithm"),
    [
        (SHARED_MEMORY, 1, 4 * KIB, Algorithm.DIRECT),
        (SHARED_MEMORY, 2, 32 * KIB, Algorithm.ONE_SHOT),
        (SHARED_MEMORY, 2, 64 * KIB, Algorithm.DIRECT),
        (SHARED_MEMORY, 8, 4 * KIB, Algorithm.ONE_SHOT),
        (SHARED_MEMORY, 8, MIB, Algorithm.DIRECT),
        (NETWORK, 2, 64 * MIB, Algorithm.DIRECT),
        (NETWORK, 4, 256, Algorithm.ONE_SHOT),
        (NETWORK, 8, 256, Algorithm.DISSEMINATION),
        (NETWORK, 8, 16 * KIB, Algorithm.HALVING),
        (NETWORK, 8, 16 * MIB, Algorithm.HALVING),
        (NETWORK, 3, MIB, Algorithm.DIRECT),
        (NETWORK, 5, MIB, Algorithm.DIRECT),
        (NETWORK, 1_024, MIB, Algorithm.HALVING),
    ],
)
def test_what_was_fastest_when_measured_is_chosen(
    costs: Costs, world: int, size_bytes: int, algorithm: Algorithm
) -> None:
    assert chosen(costs, world, size_bytes) is algorithm


def test_a_reduce_scatter_has_two_algorithms() -> None:
    assert set(Selection(costs=NETWORK).rate(Reduction.REDUCE_SCATTER, world=8, size_bytes=MIB)) == {
        Algorithm.DIRECT,
        Algorithm.HALVING,
    }
    assert chosen(NETWORK, 8, MIB, Reduction.REDUCE_SCATTER) is Algorithm.HALVING
    assert chosen(NETWORK, 4, MIB, Reduction.REDUCE_SCATTER) is Algorithm.DIRECT
    assert chosen(SHARED_MEMORY, 8, MIB, Reduction.REDUCE_SCATTER) is Algorithm.DIRECT


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_the_forced_algorithm_runs_where_it_can(algorithm: Algorithm) -> None:
    selection = Selection(costs=SHARED_MEMORY, forced=algorithm)
    fits: dict[Algorithm, Callable[..., Plan]] = {
        Algorithm.ONE_SHOT: lambda **call: algorithms.allreduce(**call, one_shot=True),
        Algorithm.DIRECT: algorithms.allreduce,
        Algorithm.DISSEMINATION: algorithms.allreduce_dissemination,
        Algorithm.HALVING: algorithms.allreduce_halving,
    }
    small: dict[str, Any] = {"world": 4, "rank": 1, "elements": 1_000, "dtype": Dtype.F32, "op": ReduceOp.SUM}
    assert selection.allreduce(**small).encode() == fits[algorithm](**small).encode()
    large = {**small, "elements": MIB}
    expected = algorithms.allreduce_halving if algorithm is Algorithm.HALVING else algorithms.allreduce
    assert selection.allreduce(**large).encode() == expected(**large).encode()


def test_only_algorithms_with_device_plans_are_candidates_there() -> None:
    selection = Selection(costs=NETWORK, forced=Algorithm.HALVING)
    call: dict[str, Any] = {"world": 8, "rank": 0, "elements": MIB, "dtype": Dtype.F32, "op": ReduceOp.SUM}
    found = selection.allreduce(**call, on_device=True)
    assert found.encode() == algorithms.allreduce(**call).encode()


def test_ranks_with_different_algorithms_make_no_group() -> None:
    configs = [Config(), Config(), Config(algorithm=Algorithm.HALVING)]
    for error in meet([Recorder(rank, "a") for rank in range(3)], configs):
        assert isinstance(error, ConfigError)
        assert str(error) == "rank 0 has SENNIT_ALGORITHM=auto, rank 2 has halving; allowed: the same on all ranks"
