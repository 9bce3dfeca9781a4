# SPDX-License-Identifier: Apache-2.0
"""Which addresses of RDMA devices become rails, the errors if none can, and what two ranks must share."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import replace
from pathlib import Path

import pytest

from sennit.transport.errors import ConfigError, DeviceError, MismatchError, Unsupported
from sennit.transport.meeting import devices, rdma_rails
from sennit.transport.meeting.devices import DevicePort, Gid, Problem
from sennit.transport.meeting.rdma_rails import check_pair, choose_rdma_rails, find_rdma_rails


def port(device: str, *gids: tuple[str, str], number: int = 1, state: str = "active") -> DevicePort:
    return DevicePort(
        device=device,
        number=number,
        state=state,
        is_ethernet=True,
        mtu_bytes=4096,
        gids=tuple(
            Gid(index=index, address=ipaddress.ip_address(address), interface=interface)
            for index, (address, interface) in enumerate(gids)
        ),
        partitions=(0x7FFF,),
    )


LINK_LOCAL, V4, V6 = ("fe80::1", "eth0"), ("10.0.0.1", "eth0"), ("fd00::1", "eth0")
FIRST = port("rxe0", LINK_LOCAL, V4, V6)
OTHER = port("rxe1", ("fd00:1::1", "eth1"))
SECOND = port("rxe0", ("10.0.1.1", "eth2"), number=2)
DOWN = replace(FIRST, state="down")


@pytest.mark.parametrize(
    ("ports", "wanted", "addresses"),
    [
        ([FIRST, OTHER], [], ["fd00::1"]),
        ([port("rxe0", LINK_LOCAL, V4)], [], ["10.0.0.1"]),
        ([FIRST, SECOND, OTHER], [], ["fd00::1", "10.0.1.1"]),
        ([FIRST, OTHER], ["eth1"], ["fd00:1::1"]),
        ([FIRST, SECOND], ["eth2", "eth0"], ["10.0.1.1", "fd00::1"]),
        ([FIRST, OTHER], ["eth0", "eth1"], ["fd00::1", "fd00:1::1"]),
        ([DOWN, OTHER], [], ["fd00:1::1"]),
    ],
)
def test_the_rails_are_those_named_or_those_of_one_device(
    ports: list[DevicePort], wanted: list[str], addresses: list[str]
) -> None:
    assert [rail.address for rail in choose_rdma_rails(ports, wanted)] == addresses


@pytest.mark.parametrize(
    ("ports", "wanted", "error", "message"),
    [
        ([port("rxe0", LINK_LOCAL)], [], Unsupported, "all addresses of RDMA devices are link-local"),
        ([DOWN], [], Unsupported, r"port 1 of rxe0 is down \(ip link set eth0 up"),
        ([port("rxe0")], [], Unsupported, "port 1 of rxe0 has no GID of RoCE version 2 .*give its interface an addr"),
        ([replace(FIRST, partitions=(1,))], [], Unsupported, "is in partitions 0x0001.*default partition"),
        ([replace(FIRST, is_ethernet=False)], [], Unsupported, "is InfiniBand"),
        ([FIRST], ["eth7"], ConfigError, "interface 'eth7' has no address that an RDMA device serves; there are: rxe0"),
        ([DOWN, OTHER], ["eth0"], ConfigError, "interface 'eth0': port 1 of rxe0 is down .*ip link set eth0 up"),
    ],
)
def test_without_a_rail_the_error_says_why_and_what_to_do(
    ports: list[DevicePort], wanted: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        choose_rdma_rails(ports, wanted)


def test_a_device_that_this_process_may_not_open_is_named() -> None:
    refused = Problem(what="mlx5_0 cannot be opened: Permission denied", remedy="give this user /dev/infiniband")
    with pytest.raises(Unsupported, match=r"mlx5_0 cannot be opened: Permission denied \(give this user"):
        choose_rdma_rails([], [], [refused])
    with pytest.raises(Unsupported, match="port 1 of rxe0 is down; mlx5_0 cannot be opened"):
        choose_rdma_rails([DOWN], [], [refused])


def test_too_little_locked_memory_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, little_locked_memory: int
) -> None:
    (tmp_path / "status").write_text("CapEff:\t0000000000000000\n")
    monkeypatch.setattr(devices, "PROCESS_STATUS", tmp_path / "status")
    monkeypatch.setattr(rdma_rails, "read_ports", lambda: ([FIRST], []))
    with pytest.raises(Unsupported, match=f"at most {little_locked_memory >> 10} KiB of memory may be locked.*ulimit"):
        find_rdma_rails()


def test_rails_of_two_ranks_are_compared_in_pairs() -> None:
    near = [rail.as_record() for rail in choose_rdma_rails([FIRST, SECOND], ["eth2", "eth0"])]
    far = [{**record, "device": "mlx5_0"} for record in near]
    check_pair(near, far, 3)
    check_pair(near, [], 3)  # The peer is a rank with sockets.
    # IPv6 pairs with IPv6, in any order.
    check_pair(near, far[::-1], 3)
    small = [far[0], {**far[1], "mtu_bytes": 1024}]
    with pytest.warns(RuntimeWarning, match="rank 3: packets of 4096 bytes on rxe0 fd00::1 and of 1024 on mlx5_0 fd00"):
        check_pair(near, small, 3)
    with pytest.raises(MismatchError, match=r"rank 3: .*share no partition: 0x7fff and 0x0001 \(join both"):
        check_pair(near, [{**far[0], "partitions": [1]}], 3)


def test_why_there_is_no_device_is_said(tmp_path: Path) -> None:
    (problem,) = devices.absence_problems(tmp_path)
    assert "has no module rdma_rxe" in problem.what
    assert "linux-modules-extra" in problem.remedy
    folder = tmp_path / "lib/modules" / os.uname().release
    folder.mkdir(parents=True)
    (folder / "modules.dep").write_text(
        "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.xz: kernel/net/udp_tunnel.ko.xz\n"
    )
    (problem,) = devices.absence_problems(tmp_path)
    assert (problem.what, "modprobe rdma_rxe" in problem.remedy) == ("no RDMA device", True)
    (tmp_path / "sys/module/rdma_rxe").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/crypto").write_text("name         : crc32c\n")
    assert "no crc32" in devices.absence_problems(tmp_path)[0].what
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (problem,) = devices.absence_problems(tmp_path)
    assert "mlx5_0: this process cannot open /dev/infiniband/uverbs*" in problem.what
    node = tmp_path / "dev/infiniband/uverbs0"
    node.parent.mkdir(parents=True)
    node.touch()
    assert devices.absence_problems(tmp_path) == []


def test_a_machine_without_devices_says_what_it_lacks() -> None:
    core = pytest.importorskip("sennit.transport._core", reason="the native core is not built")
    try:
        ports, lack = core.rdma_ports(), "no RDMA device"
    except DeviceError:
        ports, lack = [], "install libibverbs"
    if ports:
        pytest.skip("this machine has RDMA devices")
    with pytest.raises((Unsupported, DeviceError), match=lack):
        find_rdma_rails()
