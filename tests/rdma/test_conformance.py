# SPDX-License-Identifier: Apache-2.0
"""One packet, right or wrong, between good ones: the kernel's RoCE and the udp port must treat it alike."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from sennit.testbed.vm import links, runner

pytestmark = pytest.mark.rdma

PACKAGE = "rdma_conformance"
LOOPBACK = {4: ("127.0.0.1", "127.0.0.2"), 6: ("::1", "fd5e:77:0:1::1")}
STRANGER = {4: "10.77.0.99", 6: "fd5e:77:1::99"}
COMMAND_TIMEOUT_S = 30.0
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "conformance.md"


def load(name: str) -> ModuleType:
    """A module of the folder conformance."""
    if PACKAGE not in sys.modules:
        folder = Path(__file__).with_name("conformance")
        spec = importlib.util.spec_from_file_location(
            PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PACKAGE])
    return importlib.import_module(f"{PACKAGE}.{name}")


CASES = load("cases").CASES
PATCHES = os.environ.get(runner.PATCHES_VARIABLE, "").split(":")
every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@pytest.fixture(scope="module")
def strangers() -> Iterator[None]:
    """Adds addresses that belong to no peer."""
    added = [
        (f"{address}/{32 if version == 4 else 128}", device)
        for version in (4, 6)
        for address, device in ((STRANGER[version], links.netdev(0)), (LOOPBACK[version][1], "lo"))
    ]
    for address, device in added:
        ip("addr", "add", address, "dev", device, *(["nodad"] if ":" in address else []))
    yield
    for address, device in added:
        ip("addr", "del", address, "dev", device)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)


# Headers and receives are independent, so not every combination is tested.
@pytest.fixture(scope="module", params=[(4, False), (6, True)], ids=["ipv4, own receives", "ipv6, shared receives"])
def rxe(request: pytest.FixtureRequest, endpoint: ModuleType, strangers: None) -> Iterator[Any]:
    del strangers
    ip_version, shared_queue = request.param
    target = load("rxe_target")
    peer, own = target.addresses(ip_version)
    with (
        load("sockets").Sockets(peer, STRANGER[ip_version], own) as sockets,
        target.RxeTarget(endpoint, sockets, ip_version, shared_queue=shared_queue) as opened,
    ):
        yield opened


@pytest.fixture(scope="module", params=[4, 6], ids=["ipv4", "ipv6"])
def udp(request: pytest.FixtureRequest, halves: ModuleType, strangers: None) -> Iterator[Any]:
    del strangers
    importlib.import_module(f"{halves.__name__}.offer")
    own, other = LOOPBACK[request.param]
    with (
        load("sockets").Sockets(own, other, own) as sockets,
        load("udp_target").UdpTarget(halves, sockets) as opened,
    ):
        yield opened


def payloads_of(rng: np.random.Generator) -> list[bytes]:
    return [rng.bytes(4_096), rng.bytes(4_096), rng.bytes(5)]


def with_other_bytes(aims: list[Any]) -> list[Any]:
    """Returns the same packets with other bytes, which show where a packet was wrongly written."""
    return [replace(aim, payload=bytes(byte ^ 0xFF for byte in aim.payload)) for aim in aims]


def kernel_warnings() -> int:
    log = subprocess.run(["dmesg"], check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S).stdout
    return log.count(b"WARNING:")


def immediate_of(datagram: Any) -> int:
    packets = load("packets")
    (immediate,) = packets.IMMEDIATE.unpack_from(datagram.body, packets.HEADER_BYTES - packets.IMMEDIATE.size)
    return int(immediate)


@every_case
def test_what_a_queue_pair_of_rxe_does(case: Any, rxe: Any, rng: np.random.Generator) -> None:
    fate = case.rxe_with(PATCHES)
    warnings = kernel_warnings() if case.rxe.warns else 0
    payloads = payloads_of(rng)
    aims = rxe.open(payloads, case.first_psn)
    forged = case.forge(with_other_bytes(aims))
    witness = 3 - case.place
    for datagram in (aims[0].datagram(), *forged, aims[witness].datagram()):
        rxe.send(datagram)

    expected = [("success", aims[0].immediate, len(payloads[0]))]
    for datagram in forged:
        if fate.delivered and fate.completes:
            size_bytes = len(datagram.payload) if fate.size_bytes is None else fate.size_bytes
            expected.append(("success", immediate_of(datagram), size_bytes))
        elif fate.error and rxe.shared_queue:
            expected.append((fate.error, 0, 0))
    expected.append(("success", aims[witness].immediate, len(payloads[witness])))
    assert rxe.completions(aims[witness].immediate) == expected

    memory = [payloads[0], rxe.GUARD * len(payloads[1]), rxe.GUARD * len(payloads[2])]
    memory[witness] = payloads[witness]
    if fate.delivered and fate.lands is not None:
        memory[fate.lands] = forged[0].payload
    assert rxe.memory() == b"".join(memory)

    # The next good packet must be accepted.
    rxe.send(aims[case.place].datagram())
    assert rxe.completions(aims[case.place].immediate) == [
        ("success", aims[case.place].immediate, len(payloads[case.place]))
    ]
    memory[case.place] = payloads[case.place]
    assert rxe.memory() == b"".join(memory)
    counted = {"rcvd_pkts": 3 + fate.counted * len(forged)}
    if fate.bad_partition:
        counted["bad_pkey_cntr"] = len(forged)
    assert rxe.close(aims) == counted
    if case.rxe.warns:
        assert kernel_warnings() - warnings == fate.warns * len(forged)


@every_case
def test_what_the_udp_port_does(case: Any, udp: Any, rng: np.random.Generator) -> None:
    payloads = payloads_of(rng)
    aims = udp.open(payloads, case.first_psn)
    forged = case.forge(with_other_bytes(aims))
    packets = [aims[0].datagram(), *forged]
    if not case.udp.delivered:
        packets.append(aims[case.place].datagram())
    for datagram in (*packets, aims[3 - case.place].datagram()):
        udp.send(datagram)
    memory, counted = udp.close(aims)
    if case.udp.delivered:
        payloads[case.place] = forged[0].payload
    assert memory == b"".join(payloads)
    assert counted == ({} if case.udp.delivered else {case.udp.counter: len(forged)})


def test_the_page_has_the_table() -> None:
    assert f"\n{load('page').table()}\n" in PAGE.read_text(), "cd tests/rdma && python -m conformance.page PAGE"


def test_where_they_differ_it_is_said_why() -> None:
    for case in CASES:
        assert (case.rxe.delivered == case.udp.delivered) == (not case.why), case.name
