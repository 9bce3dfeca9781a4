# SPDX-License-Identifier: Apache-2.0
"""The reasons why RDMA ports cannot be used, each with what to do. Real devices are in tests/rdma."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from pathlib import Path

import pytest

from sennit.transport.errors import Unsupported
from sennit.transport.meeting import devices
from sennit.transport.meeting.devices import DevicePort, Gid

GOOD = DevicePort(
    device="rxe0",
    number=1,
    state="active",
    is_ethernet=True,
    mtu_bytes=4096,
    gids=(Gid(index=1, address=ipaddress.IPv4Address("10.0.0.1"), interface="eth0"),),
    partitions=(0x7FFF,),
)
IPV6 = Gid(index=2, address=ipaddress.IPv6Address("fd00::1"), interface="eth0")


def test_a_good_port_has_no_problem() -> None:
    assert devices.port_problems(GOOD) == []
    assert devices.pair_problems(GOOD, replace(GOOD, device="rxe1")) == []


@pytest.mark.parametrize(
    ("port", "what", "remedy"),
    [
        (replace(GOOD, state="down"), "port 1 of rxe0 is down", "ip link set eth0 up"),
        (replace(GOOD, gids=()), "has no GID of RoCE version 2", "an address"),
        (replace(GOOD, is_ethernet=False), "is InfiniBand", "Ethernet"),
        (replace(GOOD, partitions=(0x1,)), "is in partitions 0x0001", "default partition"),
    ],
)
def test_a_port_that_cannot_be_used_is_named(port: DevicePort, what: str, remedy: str) -> None:
    (problem,) = devices.port_problems(port)
    assert what in problem.what
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("far", "what"),
    [
        (replace(GOOD, mtu_bytes=1024), "4096 bytes on rxe0 and of 1024"),
        (replace(GOOD, partitions=(0x1, 0x2)), "share no partition: 0x7fff and 0x0001, 0x0002"),
        (replace(GOOD, gids=(IPV6,)), "no common IP version"),
    ],
)
def test_ports_that_do_not_fit_are_named(far: DevicePort, what: str) -> None:
    (problem,) = devices.pair_problems(GOOD, replace(far, device="mlx5_0"))
    assert what in problem.what
    assert "mlx5_0" in problem.what
    assert problem.remedy


@pytest.mark.parametrize(("capabilities", "count"), [("0000000000000000", 1), ("0000000000004000", 0)])
def test_too_little_locked_memory_is_named(
    little_locked_memory: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capabilities: str, count: int
) -> None:
    status = tmp_path / "status"
    status.write_text(f"CapPrm:\t0000000000000000\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(devices, "PROCESS_STATUS", status)
    problems = devices.machine_problems(tmp_path / "none", tmp_path / "none")
    assert len(problems) == count
    for problem in problems:
        assert "at most 64 KiB of memory may be locked" in problem.what
        assert "ulimit -l" in problem.remedy


def test_soft_roce_without_its_checksum_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "LOCKED_MEMORY_MIN_BYTES", 0)
    crypto, modules = tmp_path / "crypto", tmp_path / "module"
    crypto.write_text("name         : crc32c\ndriver       : crc32c-generic\n")
    assert devices.machine_problems(crypto, modules) == []
    (modules / "rdma_rxe").mkdir(parents=True)
    (problem,) = devices.machine_problems(crypto, modules)
    assert "no crc32" in problem.what
    assert "modprobe crc32_generic" in problem.remedy
    crypto.write_text("name         : crc32\ndriver       : crc32-generic\n")
    assert devices.machine_problems(crypto, modules) == []


def test_counters_are_numbers_by_the_drivers_names(tmp_path: Path) -> None:
    folder = tmp_path / "rxe0/ports/1/hw_counters"
    folder.mkdir(parents=True)
    (folder / "sent_pkts").write_text("12\n")
    (folder / "lifespan").write_text("10\n")
    assert devices.read_counters(GOOD, tmp_path) == {"sent_pkts": 12}
    assert devices.read_counters(replace(GOOD, device="none"), tmp_path) == {}


def test_missing_pyverbs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyverbs.device", None)
    with pytest.raises(Unsupported, match="install it for this Python"):
        devices.read_devices()
