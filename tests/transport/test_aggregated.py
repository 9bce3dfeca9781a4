# SPDX-License-Identifier: Apache-2.0
"""Groups with an aggregator: the bits of the canonical tree, also if it loses packets, dies or never was there."""

from __future__ import annotations

import functools
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit.commands.explain import explain
from sennit.transport import algorithms
from sennit.transport.aggregator import MEMORY_MIN_BYTES, Aggregator
from sennit.transport.choice.calibration import Calibration
from sennit.transport.choice.costs import Collective
from sennit.transport.choice.selection import Selection
from sennit.transport.communicator import Communicator
from sennit.transport.config import Algorithm
from sennit.transport.errors import ArgumentError, ConfigError
from sennit.transport.meeting.aggregation import address_of
from sennit.transport.oracle.reference import Interpreter
from sennit.transport.plans.arithmetic import fold
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.hosts import Hosts
from tests.aggregation_flood import COUNTED, Flood
from tests.transport.collective_scenarios import Case, check_fold, random_bits, run_plan
from tests.transport.processes import Group, play, run_ranks

CALLS = ((Dtype.F32, ReduceOp.SUM), (Dtype.F32, ReduceOp.AVG), (Dtype.I32, ReduceOp.AVG), (Dtype.BF16, ReduceOp.SUM))
# Of a vector: one block that is not full, some blocks, and more than a window.
ELEMENTS = (4_099, 40_000, 200_003)


@contextmanager
def running(port: int = 0) -> Iterator[Aggregator]:
    aggregator = Aggregator(["127.0.0.1"], port=port, memory_bytes=4 * MEMORY_MIN_BYTES)
    ends = threading.Event()

    def serve() -> None:
        while not ends.is_set():
            aggregator.run(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield aggregator
    finally:
        ends.set()
        thread.join()


class Road:
    """Carries datagrams between ranks and an aggregator, and does to them what `treat` says: how many copies go on."""

    def __init__(self, port: int, treat: Callable[[bytes], int]) -> None:
        self.seen = 0
        self._to, self._treat = ("127.0.0.1", port), treat
        self._inner: dict[Any, socket.socket] = {}
        self._outer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._outer.bind(("127.0.0.1", 0))
        self.port: int = self._outer.getsockname()[1]
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._carry)

    def __enter__(self) -> Road:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        for each in (self._outer, *self._inner.values()):
            each.close()

    def _carry(self) -> None:
        while not self._ends.is_set():
            ready, _, _ = select.select([self._outer, *self._inner.values()], [], [], 0.02)
            for each in ready:
                data, sender = each.recvfrom(2_048)
                self.seen += 1
                if each is self._outer and sender not in self._inner:
                    self._inner[sender] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                    self._inner[sender].connect(self._to)
                for _ in range(self._treat(data)):
                    if each is self._outer:
                        self._inner[sender].send(data)
                    else:
                        rank = next(rank for rank, inner in self._inner.items() if inner is each)
                        self._outer.sendto(data, rank)


def sums(group: Communicator, seed: int) -> None:
    """Vectors of each type, in place and not, some under way at once."""
    case = Case(group, seed)
    for dtype, op in CALLS:
        for elements in ELEMENTS:
            rows = random_bits(case.rng, case.world, elements, dtype)
            call: dict[str, Any] = {"world": case.world, "rank": case.rank, "elements": elements}
            call |= {"dtype": dtype, "op": op}
            expected = fold(rows, dtype, op)
            result = run_plan(group, algorithms.allreduce_aggregated(**call), rows[case.rank].copy())
            np.testing.assert_array_equal(result, expected, err_msg=f"{op.name} {dtype.name} {elements}")
            plan = algorithms.allreduce_aggregated(**call, in_place=False)
            result = run_plan(group, plan, rows[case.rank], np.zeros_like(expected))
            np.testing.assert_array_equal(result, expected, err_msg=f"{op.name} {dtype.name} {elements}, not in place")
    for elements in ELEMENTS:
        arrays = case.arrays([(elements,)] * case.world, np.float32)
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            check_fold(group.allreduce(arrays[case.rank], op), arrays, Dtype.F32, op)
    arrays = case.arrays([(40_000,)] * (2 * case.world), np.float32)
    own = np.stack(arrays[2 * case.rank : 2 * case.rank + 2])
    check_fold(group.allreduce(own, leaves=len(arrays)), arrays, Dtype.F32, ReduceOp.SUM)


def aggregated(group: Communicator, seed: int) -> None:
    sums(group, seed)
    counters = group.counters()
    assert counters["blocks_summed"] > 1_000
    assert counters["aggregator_failed"] == 0
    assert counters["blocks_given_up"] == 0


def failing(group: Communicator, seed: int) -> None:
    """Operations until the aggregator has failed, and then some."""
    case = Case(group, seed)
    after = 0
    while after < 4:
        arrays = case.arrays([(300_000,)] * case.world, np.float32)
        check_fold(group.allreduce(arrays[case.rank]), arrays, Dtype.F32, ReduceOp.SUM)
        failed = group.allreduce(np.array([group.counters()["aggregator_failed"]]), ReduceOp.MIN)
        after += int(failed[0] != 0)


def some_sums(group: Communicator, seed: int) -> None:
    case = Case(group, seed)
    for _ in range(5):
        arrays = case.arrays([(40_000,)] * case.world, np.float32)
        check_fold(group.allreduce(arrays[case.rank]), arrays, Dtype.F32, ReduceOp.SUM)


def alone(group: Communicator, seed: int) -> None:
    sums_by_hosts(group, seed)
    assert any("no aggregator" in note for note in group.notes)


def sums_by_hosts(group: Communicator, seed: int) -> None:
    case = Case(group, seed)
    arrays = case.arrays([(30_000,)] * case.world, np.float32)
    check_fold(group.allreduce(arrays[case.rank]), arrays, Dtype.F32, ReduceOp.SUM)
    with pytest.raises(ArgumentError, match="the plan asks an aggregator, but the group has none"):
        run_plan(
            group,
            algorithms.allreduce_aggregated(
                world=case.world, rank=case.rank, elements=8, dtype=Dtype.F32, op=ReduceOp.SUM
            ),
            np.zeros(8, np.float32),
        )


def variables(port: int) -> list[dict[str, str]]:
    return [{"SENNIT_AGGREGATOR": f"127.0.0.1:{port}", "SENNIT_ALGORITHM": "aggregate"}]


@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_those_of_the_tree(world: int, tmp_path: Path) -> None:
    with running() as aggregator:
        run_ranks([aggregated], world, "udp", tmp_path, seed=world, variables=variables(aggregator.port))
        # All have left.
        assert not aggregator.jobs()


def test_lost_and_repeated_packets_change_no_bit(tmp_path: Path) -> None:
    draw = random.Random(5)
    with (
        running() as aggregator,
        Road(aggregator.port, lambda _: draw.choices([0, 1, 2], [5, 90, 5])[0]) as road,
    ):
        run_ranks([aggregated], 3, "udp", tmp_path, seed=3, variables=variables(road.port))
        assert road.seen > 10_000


def test_hostile_packets_change_no_bit(tmp_path: Path) -> None:
    with running() as aggregator, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.connect(("127.0.0.1", aggregator.port))
        # The first job of an aggregator has the number 64.
        # More would drown the sums of a busy machine, and then ranks sum themselves.
        with Flood(stranger, 64, pause_s=0.002) as flood:
            run_ranks([some_sums], 2, "udp", tmp_path, seed=4, variables=variables(aggregator.port))
        counted = aggregator.counters()
    refused = [counted[name] for name in COUNTED]
    assert min(refused) > 100
    # None of them was taken for a leaf.
    assert sum(refused) <= flood.sent
    assert counted["stored"] == counted["completed"] > 100


def test_an_aggregator_that_falls_silent_costs_time_alone(tmp_path: Path) -> None:
    seen = 0

    def treat(_: bytes) -> int:
        nonlocal seen
        seen += 1
        return int(seen < 3_000)

    with running() as aggregator, Road(aggregator.port, treat) as road:
        run_ranks([failing], 3, "udp", tmp_path, seed=3, variables=variables(road.port))


def test_an_aggregator_that_ends_is_done_without(tmp_path: Path) -> None:
    """Its host then answers that nobody listens."""
    aggregators = [Aggregator(["127.0.0.1"], port=0, memory_bytes=4 * MEMORY_MIN_BYTES)]
    scenario = functools.partial(play, [failing], 3)
    with Group(scenario, "aaa", tmp_path, transport="udp", variables=variables(aggregators[0].port)) as group:
        while sum(aggregators[0].counters().values()) < 3_000:
            assert all(process.is_alive() for process in group.processes.values())
            aggregators[0].run(0.002)
        aggregators.clear()
        group.finish()


def test_without_an_aggregator_ranks_sum_themselves(tmp_path: Path) -> None:
    run_ranks([alone], 2, "udp", tmp_path, seed=2, variables=variables(9))


def test_all_ranks_name_an_aggregator_or_none(tmp_path: Path) -> None:
    given = [*variables(9), {"SENNIT_ALGORITHM": "aggregate"}]
    with pytest.raises(AssertionError, match="rank 1 has no SENNIT_AGGREGATOR; allowed: one on all ranks, or none"):
        run_ranks([alone], 2, "udp", tmp_path, seed=2, variables=given)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.0.2.1", ("192.0.2.1", 4793)),
        ("192.0.2.1:99", ("192.0.2.1", 99)),
        ("[2001:db8::1]:99", ("2001:db8::1", 99)),
        ("2001:db8::1", ("2001:db8::1", 4793)),
        ("localhost:7", None),
    ],
)
def test_addresses(text: str, address: tuple[str, int] | None) -> None:
    found = address_of(text)
    assert found == address or (address is None and found[0] in ("127.0.0.1", "::1") and found[1] == 7)


@pytest.mark.parametrize("text", ["192.0.2.1:0", "192.0.2.1:x", "[::1]:70000", "no host:1"])
def test_wrong_addresses_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed: ADDRESS, ADDRESS:PORT or"):
        address_of(text)


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("counted", [True, False])
def test_plans_in_any_order_of_events(world: int, in_place: bool, counted: bool) -> None:
    rng = np.random.default_rng(world)
    for seed, (dtype, op) in enumerate(CALLS):
        elements = 300
        rows = random_bits(rng, world, elements, dtype)
        plans = [
            algorithms.allreduce_aggregated(
                world=world,
                rank=rank,
                elements=elements + 40 * counted,
                dtype=dtype,
                op=op,
                in_place=in_place,
                counted=counted,
                chunk_bytes=256,
            )
            for rank in range(world)
        ]
        expected = fold(rows, dtype, op)
        for failing_ranks in ((), (0,), (world - 1,), tuple(range(world))):
            buffers = [[row.copy()] if in_place else [row.copy(), np.zeros_like(row)] for row in rows]
            Interpreter(
                plans,
                buffers,
                counts=[[elements]] * world if counted else None,
                seed=seed,
                without_aggregator=failing_ranks,
            ).run()
            for given in buffers:
                np.testing.assert_array_equal(given[-1], expected)


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize(("world", "leaves"), [(3, 3), (2, 8), (3, 6), (4, 16)])
def test_ranks_give_the_sums_of_their_leaves(world: int, leaves: int, partial: bool) -> None:
    rng = np.random.default_rng(leaves)
    for seed, (dtype, op) in enumerate(call for call in CALLS if call[0] is not Dtype.BF16):
        elements = 300
        rows = random_bits(rng, leaves, elements, dtype)
        call: dict[str, Any] = {"world": world, "elements": elements, "dtype": dtype, "op": op}
        call |= {"leaves": leaves, "partial": partial}
        plans = [algorithms.allreduce_aggregated(**call, rank=rank, chunk_bytes=256) for rank in range(world)]
        forced = Selection(hosts=Hosts.equal(world, world), forced=Algorithm.AGGREGATE, has_aggregator=True)
        assert forced.allreduce(**{**call, "elements": 1 << 20}, rank=0).name == plans[0].name
        each = leaves // world
        given = [list(rows[rank * each : (rank + 1) * each]) for rank in range(world)]
        if partial:
            given = [[fold(of_rank, dtype, ReduceOp.SUM)] for of_rank in given]
        expected = fold(rows, dtype, op)
        for failing_ranks in ((), (world - 1,)):
            buffers = [[np.concatenate(of_rank), np.zeros_like(expected)] for of_rank in given]
            Interpreter(plans, buffers, seed=seed, without_aggregator=failing_ranks).run()
            for _, result in buffers:
                np.testing.assert_array_equal(result, expected)


def test_what_an_aggregator_cannot_sum_is_refused() -> None:
    call: dict[str, Any] = {"world": 2, "rank": 0, "elements": 8, "dtype": Dtype.F32, "op": ReduceOp.SUM}
    mean = {"op": ReduceOp.AVG, "dtype": Dtype.BF16}
    for other in ({"op": ReduceOp.MAX}, mean, {"dtype": Dtype.F64}, {"world": 65}, {"leaves": 6}):
        with pytest.raises(ArgumentError, match=r"an aggregator sums F32, I32, BF16 of 2\.\.64 ranks, one leaf each"):
            algorithms.allreduce_aggregated(**{**call, **other})


def explained(*, gbit: float = 0.2, world: int = 4, **call: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"collective": Collective.ALLREDUCE, "size_bytes": 16 << 20, "hosts": world} | call
    return explain(
        ranks=world,
        forced=None,
        calibration=Calibration(),
        bytes_per_s=gbit * 1e9 / 8,
        has_aggregator=True,
        **given,
    )


def choice(**call: Any) -> str:
    return str(explained(**call)["chosen"])


@pytest.mark.parametrize(
    ("call", "why_not"),
    [
        ({}, ""),
        ({"collective": Collective.REDUCE_SCATTER}, "an aggregator would get the whole vector of a rank, 16 MiB"),
        ({"collective": Collective.ALLGATHER}, "an aggregator sums, and allgather does not"),
        ({"dtype": Dtype.F64}, "an aggregator sums float32, bfloat16, int32"),
        ({"world": 65}, "an aggregator sums for 2 to 64 ranks"),
        ({"leaves": 8}, ""),
        ({"leaves": 12}, "an aggregator sums one leaf of each rank, or of float32"),
        ({"leaves": 8, "dtype": Dtype.BF16}, "an aggregator sums one leaf of each rank, or of float32"),
        ({"size_bytes": 4 << 10}, "an aggregator is asked from 16 KiB on"),
        ({"world": 8, "hosts": 4}, "2 ranks of a host would each send their vector to an aggregator, over one link"),
        ({"gbit": 100.0}, "by an aggregator it would take"),
    ],
)
def test_explain_says_why_no_aggregator_sums(call: dict[str, Any], why_not: str) -> None:
    assert explained(**call)["why_no_aggregator"].startswith(why_not)
    assert (choice(**call) == "aggregate") == (not why_not)


def test_the_model_asks_an_aggregator_where_links_are_slow() -> None:
    assert choice(size_bytes=16 << 20, gbit=0.2) == "aggregate"
    assert choice(size_bytes=16 << 20, gbit=0.2, world=8) == "aggregate"
    assert choice(size_bytes=4 << 10, gbit=0.2) != "aggregate"
    assert choice(size_bytes=16 << 20, gbit=0.2, dtype=Dtype.F64) != "aggregate"
    # One core of an aggregator takes less than such links bring.
    assert choice(size_bytes=16 << 20, gbit=1) != "aggregate"
    assert choice(size_bytes=16 << 20, gbit=100) != "aggregate"
