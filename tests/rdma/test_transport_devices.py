# SPDX-License-Identifier: Apache-2.0
"""`sennit.transport.meeting.devices` on real devices: what it reads, and the problems that it reports."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from sennit.doctor import capabilities
from sennit.testbed.vm import links
from sennit.testbed.vm.guest_command import execute
from sennit.transport.meeting import devices

pytestmark = pytest.mark.rdma

Pair = Callable[..., tuple[Any, Any]]


def test_devices_of_the_link_are_read_and_usable() -> None:
    found = devices.read_devices()
    assert [device.name for device in found] == ["rxe0", "rxe1"]
    for number, device in enumerate(found):
        (port,) = device.ports
        assert (port.state, port.is_ethernet, port.mtu_bytes, port.partitions) == ("active", True, 4096, (0x7FFF,))
        addresses = {str(gid.address) for gid in port.gids if not gid.is_link_local}
        assert addresses == {links.address(number, 4), links.address(number, 6)}
        assert {gid.interface for gid in port.gids} == {links.netdev(number)}
    near, far = devices.usable_ports(found)
    assert devices.pair_problems(near, far) == []
    assert devices.machine_problems() == []


def test_a_port_whose_interface_is_down_is_not_usable(unconnected: str) -> None:
    (cold,) = [device for device in devices.read_devices() if device.name == unconnected]
    problems = devices.port_problems(cold.ports[0])
    assert "port 1 of cold is down" in [problem.what for problem in problems]
    assert unconnected not in [port.device for port in devices.usable_ports([cold])]


def test_interfaces_of_different_mtu_do_not_fit() -> None:
    far_netdev = links.netdev(1)
    execute(f"ip link set {far_netdev} mtu 1500")
    try:
        near, far = (device.ports[0] for device in devices.read_devices())
        assert (near.mtu_bytes, far.mtu_bytes) == (4096, 1024)
        assert "4096 bytes on rxe0 and of 1024 on rxe1" in devices.pair_problems(near, far)[0].what
    finally:
        execute(f"ip link set {far_netdev} mtu {links.MTU_DEFAULT}")


def test_counters_move_with_the_packets(pair: Pair, endpoint: ModuleType) -> None:
    (port,) = devices.read_devices()[0].ports
    before = devices.read_counters(port)["sent_pkts"]
    near, far = pair("UC")
    far.expect(3)
    for number in range(3):
        near.write(far, 4096, number)
    far.completions(3)
    endpoint.until(lambda: devices.read_counters(port)["sent_pkts"] - before == 3, lambda: "3 packets to be counted")


def test_the_doctor_finds_them() -> None:
    found = capabilities.probe("roce")
    assert found.available
    for number in (0, 1):
        assert f"rxe{number}/1 4096 bytes a packet" in found.detail
        assert links.address(number, 6) in found.detail


def test_the_doctor_says_what_to_do_where_no_port_is_usable(unconnected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only = [device for device in devices.read_devices() if device.name == unconnected]
    monkeypatch.setattr(devices, "read_devices", lambda: only)
    found = capabilities.PROBES["roce"]()
    assert not found.available
    assert "port 1 of cold is down" in found.detail
    assert "ip link set" in found.remedy
