# SPDX-License-Identifier: Apache-2.0
"""Which addresses the udp port takes, on simulated machines and on this one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sennit.transport.errors import ConfigError
from sennit.transport.meeting import rails

LOOPBACK = rails.Interface(name="lo", is_up=True, is_loopback=True, ipv6=("::1",), ipv4=("127.0.0.1",))
FIRST = rails.Interface(name="eth0", is_up=True, is_loopback=False, ipv6=("2001:db8::5",), ipv4=("192.0.2.5",))
SECOND = rails.Interface(name="eth1", is_up=True, is_loopback=False, ipv4=("198.51.100.5",))
DOWN = rails.Interface(name="eth2", is_up=False, is_loopback=False, ipv4=("203.0.113.5",))
BARE = rails.Interface(name="eth3", is_up=True, is_loopback=False)
MACHINE = [LOOPBACK, FIRST, SECOND, DOWN, BARE]


def addresses(found: list[rails.Rail]) -> list[str]:
    return [rail.address for rail in found]


def test_default_is_the_interface_of_the_default_route_over_ipv6() -> None:
    assert addresses(rails.choose_rails(MACHINE, (), ["eth0"])) == ["2001:db8::5"]
    assert addresses(rails.choose_rails(MACHINE, (), ["eth1", "eth0"])) == ["2001:db8::5", "198.51.100.5"]


def test_without_a_default_route_all_that_are_up_are_rails_and_loopback_is_the_last_resort() -> None:
    assert addresses(rails.choose_rails(MACHINE, (), [])) == ["2001:db8::5", "198.51.100.5"]
    assert addresses(rails.choose_rails([LOOPBACK, DOWN, BARE], (), ["eth2"])) == ["::1"]


def test_an_interface_with_both_families_offers_both() -> None:
    first, second = rails.choose_rails(MACHINE, (), [])
    assert first.other_family_address == "192.0.2.5"
    assert second.other_family_address == ""
    assert rails.choose_rails(MACHINE, ["lo"], [])[0].other_family_address == ""


def test_named_interfaces_are_taken_in_their_order() -> None:
    assert addresses(rails.choose_rails(MACHINE, ["eth1", "lo"], ["eth0"])) == ["198.51.100.5", "::1"]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("eth9", r"'eth9' does not exist; there are: lo \(::1\), eth0 \(2001:db8::5\), .*eth2 \(203.0.113.5, down\)"),
        ("eth2", "is down"),
        ("eth3", "no IPv4 or IPv6 address"),
    ],
)
def test_an_interface_that_cannot_be_used_is_named(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        rails.choose_rails(MACHINE, [name], [])


def test_a_machine_without_addresses_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no interface is up .*eth3 \(no address\)"):
        rails.choose_rails([BARE], (), [])


def test_the_kernel_tables_are_read(tmp_path: Path) -> None:
    zeros = "0" * 32
    (tmp_path / "ipv6_route").write_text(
        f"{zeros} 00 {zeros} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eth0\n"
        f"{zeros} 00 {zeros} 00 {zeros} ffffffff 00000001 00000000 00200200       lo\n"
        f"20010db8000000000000000000000000 40 {zeros} 00 {zeros} 00000100 00000001 00000000 00000001     eth1\n"
    )
    (tmp_path / "route").write_text(
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth1\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth1\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    (tmp_path / "if_inet6").write_text(
        "fe800000000000000000000000000001 01 40 20 80       lo\n"
        "20010db8000000000000000000000009 01 40 00 01       lo\n"
        "20010db8000000000000000000000005 01 40 00 00       lo\n"
        "20010db8000000000000000000000007 01 40 00 40       lo\n"
    )
    assert rails.read_default_routes(tmp_path) == ["eth0", "eth1"]
    loopback = next(interface for interface in rails.read_interfaces(tmp_path) if interface.name == "lo")
    # Neither link-local nor tentative addresses. Temporary ones come last.
    assert loopback.ipv6 == ("2001:db8::5", "2001:db8::9")
    assert rails.read_default_routes(tmp_path / "absent") == []


def test_the_rails_of_this_machine_can_be_bound() -> None:
    for rail in [*rails.find_rails(), *rails.find_rails(["lo"])]:
        family = socket.AF_INET6 if ":" in rail.address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((rail.address, 0))
