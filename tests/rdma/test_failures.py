# SPDX-License-Identifier: Apache-2.0
"""Failures in the middle of an AllReduce, with verbs and udp: it ends at its deadline, and the error names the rank."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from sennit.testbed.vm import links
from sennit.testbed.vm.guest_command import execute
from sennit.transport.config import TransportKind
from sennit.transport.errors import SennitError

pytestmark = pytest.mark.rdma

Netem = Callable[[int, str], None]
ELEMENTS = 20_003
ROUNDS_BEFORE = 3
ROUNDS = 5
DEADLINE_S = 3.0
COMMAND_TIMEOUT_S = 30.0


def broken(groups: ModuleType, seats: list[Any], folder: Path, break_it: Callable[[], Any]) -> list[str]:
    """Calls `break_it` while two ranks sum arrays. Returns the error of each rank."""
    under_way = threading.Event()

    def sum_until_it_ends(group: Any) -> str:
        array = np.full(ELEMENTS, group.rank + 1, np.int64)
        rounds = 0
        while True:
            try:
                total = group.allreduce(array)
            except SennitError as error:
                return str(error)
            assert (total == 3).all()
            rounds += 1
            if group.rank == 0 and rounds == ROUNDS_BEFORE:
                under_way.set()

    def wait_and_break() -> None:
        assert under_way.wait(COMMAND_TIMEOUT_S)
        break_it()

    breaker = threading.Thread(target=wait_and_break)
    breaker.start()
    try:
        said: list[str] = groups.run(seats, folder, sum_until_it_ends, timeout_s=DEADLINE_S)
    finally:
        under_way.set()
        breaker.join(COMMAND_TIMEOUT_S)
    return said


def assert_each_names_the_other(said: list[str]) -> None:
    for rank, text in enumerate(said):
        assert f"timed out on rank {rank}: not finished within its timeout of {DEADLINE_S:g} s" in text, said
        assert f"no sign of life from rank {1 - rank}" in text, said


def on_the_link(groups: ModuleType, transport: TransportKind) -> list[Any]:
    return [groups.Seat(transport=transport, interface=links.netdev(rank), host=f"host{rank}") for rank in range(2)]


def test_a_network_that_loses_everything_ends_operations_at_their_deadline(
    groups: ModuleType, netem: Netem, tmp_path: Path
) -> None:
    transports = (TransportKind.VERBS, TransportKind.UDP)
    both_are_under_way = threading.Barrier(len(transports) + 1)

    def lose_everything() -> None:
        both_are_under_way.wait(COMMAND_TIMEOUT_S)
        for device in range(2):
            netem(device, "loss 100%")

    def sum_over(transport: TransportKind) -> list[str]:
        folder = tmp_path / transport
        return broken(
            groups, on_the_link(groups, transport), folder, partial(both_are_under_way.wait, COMMAND_TIMEOUT_S)
        )

    with ThreadPoolExecutor(len(transports) + 1) as threads:
        loss = threads.submit(lose_everything)
        for said in threads.map(sum_over, transports):
            assert_each_names_the_other(said)
        loss.result()


def test_an_interface_that_goes_away_ends_operations_at_their_deadline(
    groups: ModuleType, mixed: ModuleType, tmp_path: Path
) -> None:
    seats = [
        groups.Seat(transport=TransportKind.VERBS, interface=mixed.NEAR, host="near"),
        groups.Seat(transport=TransportKind.UDP, interface=mixed.FAR, host="far", namespace=mixed.FAR),
    ]
    # This deletes the cable's other end too.
    assert_each_names_the_other(broken(groups, seats, tmp_path, lambda: execute(f"ip link delete {mixed.NEAR}")))


@pytest.mark.parametrize("settings", ["loss 1%", "duplicate 2%", "delay 2ms reorder 75% 25%", "corrupt 1%"])
def test_bytes_survive_a_bad_network_with_sockets_as_with_devices(
    groups: ModuleType, netem: Netem, settings: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    arrays = rng.integers(-1_000, 1_000, (2, ELEMENTS), np.int64)
    for device in range(2):
        netem(device, settings)

    def sum_often(group: Any) -> dict[str, int]:
        for _ in range(ROUNDS):
            np.testing.assert_array_equal(group.allreduce(arrays[group.rank]), arrays.sum(axis=0))
        return dict(group.counters())

    for counters in groups.run(on_the_link(groups, TransportKind.UDP), tmp_path, sum_often):
        assert counters["data_packets_received"] > ROUNDS


def test_a_reliable_queue_pair_gives_up_after_its_retries(netem: Netem, endpoint: ModuleType) -> None:
    with contextlib.ExitStack() as stack:
        near, far = (
            stack.enter_context(endpoint.Endpoint(device, qp_type="RC", ip_version=6, size_bytes=1024))
            for device in range(2)
        )
        # For rxe 7 means no limit.
        near.connect(far, retries=2)
        far.connect(near)
        far.expect()
        given_up = endpoint.counter(0, "retry_exceeded_err")
        netem(0, "loss 100%")
        near.write(far, 1024, 1)
        assert [done.status for done in near.completions(1)] == ["retry exceeded error"]
        endpoint.until(lambda: endpoint.counter(0, "retry_exceeded_err") == given_up + 1, lambda: "the count of it")
        # The queue pair is in error now: posted requests come back, and nothing is sent.
        near.write(far, 1024, 2)
        assert [done.status for done in near.completions(1)] == ["WR flush error"]
        assert far.idle()
