# SPDX-License-Identifier: Apache-2.0
"""What the model says a codec costs is what the plans do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sennit.transport import algorithms
from sennit.transport.algorithms.leaves import Leaves
from sennit.transport.choice.coded_cost import CODED, SPEEDS, CodecSpeed, break_even_byte_s, coded_work
from sennit.transport.choice.costs import Collective
from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.plans.binding import with_counts
from sennit.transport.plans.coding import Coding
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Decode, Encode, Plan, Send

# Shares of one and of several chunks, all of whole blocks.
ELEMENTS = (4 * 64, 4 * 98_304)
CODINGS = [Codec(kind=kind, block=block).coding(Dtype.F32) for kind, block in
           ((CodecKind.BF16, 0), (CodecKind.INT8, 64), (CodecKind.MX4, 32))]  # fmt: skip


def compile_plan(collective: Collective, world: int, elements: int, coding: Coding, leaves: int | None = None) -> Plan:
    """Of rank 0, with its counts."""
    parts, pieces = (elements // world,) * world, algorithms.coded_pieces([elements // world], coding)
    common = {"world": world, "rank": 0, "dtype": Dtype.F32, "coding": coding}
    sums = {**common, "op": ReduceOp.SUM}
    calls: dict[Collective, Callable[[], Plan]] = {
        Collective.ALLREDUCE: lambda: algorithms.allreduce_coded(elements=elements, leaves=leaves, **sums),  # type: ignore[arg-type]
        Collective.REDUCE_SCATTER: lambda: algorithms.reduce_scatter_coded(pieces=pieces, **sums),  # type: ignore[arg-type]
        Collective.ALLGATHER: lambda: algorithms.allgather_coded(**common),  # type: ignore[arg-type]
        Collective.ALLTOALL: lambda: algorithms.alltoall_coded(**common),  # type: ignore[arg-type]
    }
    counts: dict[Collective, Callable[[], list[int]]] = {
        Collective.REDUCE_SCATTER: lambda: algorithms.reduce_scatter_counts(0, parts, pieces, Dtype.F32, coding),
        Collective.ALLGATHER: lambda: algorithms.allgather_counts(parts, Dtype.F32, coding),
        Collective.ALLTOALL: lambda: algorithms.alltoall_counts(0, parts, parts, Dtype.F32, coding),
    }
    plan = calls[collective]()
    return with_counts(plan, counts[collective]()) if collective in counts else plan


@pytest.mark.parametrize("collective", CODED)
@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: coding.kind.name)
def test_the_work_is_that_of_the_plan(collective: Collective, elements: int, coding: Coding) -> None:
    plan = compile_plan(collective, 4, elements, coding)
    found = coded_work(collective, hosts=Hosts.equal(4, 1), elements=elements, coding=coding)
    assert found is not None
    sends = [step for step in plan.steps if isinstance(step, Send)]
    assert found.work.near.sent_bytes == sum(step.size_bytes for step in sends)
    assert found.work.near.messages == len(sends)
    for kind, expected in ((Encode, found.encoded_elements), (Decode, found.decoded_elements)):
        assert sum(step.size_bytes // 4 for step in plan.steps if isinstance(step, kind)) == expected


@pytest.mark.parametrize("collective", CODED)
@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: coding.kind.name)
def test_the_work_between_hosts_is_that_of_the_plan(collective: Collective, elements: int, coding: Coding) -> None:
    hosts, coding = Hosts.equal(4, 2), coding._replace(between_hosts=True)
    moves: dict[str, Any] = {"world": 4, "rank": 0, "hosts": hosts, "dtype": Dtype.F32, "coding": coding}
    parts, sums = [elements // 4] * 4, moves | {"op": ReduceOp.SUM}
    match collective:
        case Collective.ALLREDUCE:
            plan = algorithms.allreduce_between_hosts(elements=elements, **sums)
        case Collective.REDUCE_SCATTER:
            plan = algorithms.reduce_scatter_between_hosts(counts=parts, **sums)
        case Collective.ALLGATHER:
            counts = algorithms.allgather_counts(parts, Dtype.F32, coding)
            plan = with_counts(algorithms.allgather_between_hosts(**moves), counts)
        case _:
            counts = algorithms.alltoall_counts(0, parts, parts, Dtype.F32, coding)
            plan = with_counts(algorithms.alltoall_between_hosts(**moves), counts)
    found = coded_work(collective, hosts=hosts, elements=elements, coding=coding)
    assert found is not None
    for way, is_near in ((found.work.near, True), (found.work.far, False)):
        sends = [step for step in plan.steps if isinstance(step, Send) and (step.peer == 1) == is_near]
        assert (way.sent_bytes, way.messages) == (sum(step.size_bytes for step in sends), len(sends))
    for kind, expected in ((Encode, found.encoded_elements), (Decode, found.decoded_elements)):
        assert sum(step.size_bytes // 4 for step in plan.steps if isinstance(step, kind)) == expected


def test_a_rank_with_several_leaves_sends_sums_and_codes_at_home() -> None:
    (coding, *_), leaves = CODINGS, 8
    plan = compile_plan(Collective.ALLREDUCE, 4, 256, coding, leaves)
    found = coded_work(
        Collective.ALLREDUCE, hosts=Hosts.equal(4, 1), elements=256, coding=coding, leaves=Leaves(4, leaves)
    )
    assert found is not None
    assert found.work.near.sent_bytes == sum(step.size_bytes for step in plan.steps if isinstance(step, Send))
    for kind, expected in ((Encode, found.encoded_elements), (Decode, found.decoded_elements)):
        assert sum(step.size_bytes // 4 for step in plan.steps if isinstance(step, kind)) == expected


def test_with_several_hosts_the_bytes_go_where_the_peers_are() -> None:
    near, far = (
        coded_work(Collective.ALLTOALL, hosts=Hosts.equal(8, hosts), elements=4096, coding=CODINGS[0])
        for hosts in (1, 4)
    )
    assert near is not None
    assert far is not None
    assert (far.work.near.peers, far.work.far.peers) == (1, 6)
    assert far.work.near.sent_bytes + far.work.far.sent_bytes == near.work.near.sent_bytes
    assert (near.work.far.rounds, far.work.far.rounds, far.work.near.rounds) == (0, 1, 0)


@pytest.mark.parametrize("collective", sorted(set(Collective) - set(CODED)))
def test_a_collective_without_codecs_has_no_work(collective: Collective) -> None:
    assert coded_work(collective, hosts=Hosts.equal(4, 1), elements=256, coding=CODINGS[0]) is None


def test_rounding_at_random_has_a_speed_of_its_own() -> None:
    speed = CodecSpeed(encode_element_s=1, encode_stochastic_element_s=10, decode_element_s=100)
    found = coded_work(Collective.ALLTOALL, hosts=Hosts.equal(2, 1), elements=1, coding=CODINGS[1])
    assert found is not None
    nearest, at_random = (
        found.coding_seconds(Codec(kind=CodecKind.INT8, stochastic=stochastic).coding(Dtype.F32), speed)
        for stochastic in (False, True)
    )
    assert (nearest, at_random) == (101, 110)
    assert all(speed.encode_stochastic_element_s > speed.encode_element_s for speed in SPEEDS.values())


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        (lambda byte_s: byte_s - 3e-9, pytest.approx(3e-9)),
        (lambda byte_s: 1.0, None),
        (lambda byte_s: -1.0, None),
    ],
)
def test_a_codec_pays_from_some_link_on(gain: Callable[[float], float], expected: float | None) -> None:
    assert break_even_byte_s(gain) == expected
