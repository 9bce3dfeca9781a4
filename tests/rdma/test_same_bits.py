# SPDX-License-Identifier: Apache-2.0
"""A collective has the same bits over shared memory, sockets, a RoCE device, and a device mixed with a socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sennit.testbed.vm import links
from sennit.transport.algorithms import allreduce, alltoall
from sennit.transport.communicator import Communicator
from sennit.transport.config import TransportKind
from sennit.transport.oracle import reference
from sennit.transport.plans.arithmetic import narrow
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.plan import Plan

pytestmark = pytest.mark.rdma

Bytes = npt.NDArray[np.uint8]
# Odd sizes: one round, and two rounds with many chunks.
SUMS = ((Dtype.F32, 1_001), (Dtype.F32, 70_003), (Dtype.BF16, 33_333), (Dtype.F16, 33_331))
ROWS_MAX = 20_000
# Sizes of a term. fp16 can hold LARGE. Next to LARGE, fp32 keeps only hundredths.
LARGE, SMALL = 60_000, 1e-3
WORLDS = (2, 3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One collective: each rank's plan and buffers. Buffers are copied before they are used."""

    name: str
    plan: Callable[[int], Plan]
    buffers: Sequence[Sequence[Bytes]]
    counts: Sequence[Sequence[int]]


def terms(rng: np.random.Generator, world: int, dtype: Dtype, elements: int) -> list[Bytes]:
    """Returns one vector for each rank, whose sum depends on the order.

    Two large terms cancel if they are added first, or they swallow a small term.
    """
    large = rng.uniform(-LARGE, LARGE, elements)
    vectors = [large, np.where(rng.random(elements) < 0.5, -large, rng.uniform(-LARGE, LARGE, elements))]
    vectors += [rng.standard_normal(elements) * SMALL for _ in range(2, world)]
    return [narrow(vector.astype(np.float32), dtype) for vector in vectors]


def sum_of(rng: np.random.Generator, world: int, dtype: Dtype, elements: int) -> Case:
    def plan(rank: int) -> Plan:
        return allreduce(world=world, rank=rank, elements=elements, dtype=dtype, op=ReduceOp.SUM)

    buffers = [[vector] for vector in terms(rng, world, dtype, elements)]
    return Case(name=f"sum of {elements} {dtype.name}", plan=plan, buffers=buffers, counts=[()] * world)


def shuffle(rng: np.random.Generator, world: int) -> Case:
    counts = rng.integers(0, ROWS_MAX, (world, world)) * rng.integers(0, 2, (world, world))
    counts[0, world - 1], counts[world - 1, 0] = ROWS_MAX, 1

    def plan(rank: int) -> Plan:
        return alltoall(world=world, rank=rank, item_bytes=4, type_code=Dtype.F32)

    buffers = [
        [rng.integers(0, 256, int(row.sum()) * 4, np.uint8), np.zeros(int(column.sum()) * 4, np.uint8)]
        for row, column in zip(counts, counts.T, strict=True)
    ]
    by_rank = [[*counts[rank].tolist(), *counts[:, rank].tolist()] for rank in range(world)]
    return Case(name="alltoall", plan=plan, buffers=buffers, counts=by_rank)


def copies(case: Case, rank: int) -> list[Bytes]:
    return [buffer.copy() for buffer in case.buffers[rank]]


def seats(groups: ModuleType, mixed: Any, transport: str, world: int) -> list[Any]:
    if transport == "shm":
        return [groups.Seat(transport=TransportKind.SHM, interface="lo", host="one")] * world
    if transport == "udp":
        return [groups.Seat(transport=TransportKind.UDP, interface="lo", host=f"{rank}") for rank in range(world)]
    devices = [links.netdev(rank % 2) if transport == "verbs" else mixed.NEAR for rank in range(world)]
    made = [
        groups.Seat(transport=TransportKind.VERBS, interface=device, host=f"{rank}")
        for rank, device in enumerate(devices)
    ]
    if transport == "mixed":
        made[-1] = groups.Seat(transport=TransportKind.UDP, interface=mixed.FAR, host="far", namespace=mixed.FAR)
    return made


@pytest.fixture(scope="module", params=WORLDS)
def agreed(request: pytest.FixtureRequest) -> tuple[list[Case], list[list[list[Bytes]]]]:
    """The cases and their results by the NumPy interpreter of plans: by case, rank and buffer."""
    world = int(request.param)
    rng = np.random.default_rng(world)
    cases = [*(sum_of(rng, world, dtype, elements) for dtype, elements in SUMS), shuffle(rng, world)]
    results = []
    for case in cases:
        buffers = [copies(case, rank) for rank in range(world)]
        reference.run([case.plan(rank) for rank in range(world)], buffers, counts=case.counts)
        results.append(buffers)
    return cases, results


def test_the_order_of_a_sum_matters_here() -> None:
    # Otherwise any order would give the same bits.
    rng = np.random.default_rng(0)
    for dtype, elements in SUMS:
        case = sum_of(rng, 3, dtype, elements)
        backwards = Case(name="", plan=case.plan, buffers=case.buffers[::-1], counts=case.counts)
        results = []
        for one in (case, backwards):
            buffers = [copies(one, rank) for rank in range(3)]
            reference.run([one.plan(rank) for rank in range(3)], buffers)
            results.append(buffers[0][0])
        assert (results[0] != results[1]).any(), case.name


@pytest.mark.parametrize("transport", ["shm", "udp", "verbs", "mixed"])
def test_bits_are_those_of_the_reference(
    transport: str, agreed: Any, groups: ModuleType, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    cases, expected = agreed
    world = len(cases[0].buffers)
    mixed = request.getfixturevalue("mixed") if transport == "mixed" else None

    def work(group: Communicator) -> tuple[tuple[str, ...], list[list[Bytes]]]:
        results = []
        for case in cases:
            buffers = copies(case, group.rank)
            counts = case.counts[group.rank]
            group.post(case.name, partial(case.plan, group.rank), buffers, counts=counts).wait()
            results.append(buffers)
        return group.routes, results

    found = groups.run(seats(groups, mixed, transport, world), tmp_path, work)
    for rank, (routes, results) in enumerate(found):
        own = "udp" if transport == "mixed" and rank == world - 1 else "verbs" if transport == "mixed" else transport
        assert set(routes) == {"self", own}
        for case, buffers, wanted in zip(cases, results, expected, strict=True):
            for buffer, bits in zip(buffers, wanted[rank], strict=True):
                np.testing.assert_array_equal(buffer, bits, err_msg=f"{case.name}, rank {rank}")
