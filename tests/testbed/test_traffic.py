# SPDX-License-Identifier: Apache-2.0
"""Counting what passes an interface by kind: each packet is of one kind, at the ends of the range of ports, too."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

pytest.importorskip("pyroute2", reason="the extra `testbed` is not installed")

from sennit.testbed.topology import namespace
from sennit.testbed.topology.traffic import Kind, PacketCounter, filter_of, interface_bytes

pytestmark = [pytest.mark.root, pytest.mark.needs("netns", "ip")]

PORTS = (5000, 5003)
# The loopback device shows each packet twice: on its way out and in.
SEEN = 2


@pytest.fixture
def netns() -> Iterator[str]:
    name = f"{namespace.unique_prefix(0)}-traffic"
    namespace.create(name)
    try:
        up = ["nsenter", f"--net={namespace.path_of(name)}", "--", "ip", "link", "set", "lo", "up"]
        subprocess.run(up, check=True, timeout=10)
        yield name
    finally:
        namespace.remove(name)


def counted(family: socket.AddressFamily, kind: socket.SocketKind, source: int, destination: int) -> dict[Kind, int]:
    """What one empty datagram, or one refused connection, makes pass the loopback device."""
    address = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    with ExitStack() as stack:
        counters = {kind: stack.enter_context(PacketCounter("lo", filter_of(kind, *PORTS))) for kind in Kind}
        listener = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        listener.bind((address, destination))
        sender = stack.enter_context(socket.socket(family, kind))
        sender.bind((address, source))
        if kind == socket.SOCK_STREAM:
            assert sender.connect_ex((address, destination)) != 0  # nobody listens there
        else:
            sender.sendto(b"", (address, destination))
            listener.recv(1)
        return {kind: counter.read() for kind, counter in counters.items() if counter.read()}


@pytest.mark.parametrize(
    ("source", "destination", "kind"),
    [
        (5000, 5003, Kind.RANK),
        (5003, 5000, Kind.RANK),
        (4999, 5001, Kind.OTHER),
        (5001, 4999, Kind.OTHER),
        (5004, 5001, Kind.OTHER),
        (5001, 5004, Kind.OTHER),
    ],
)
def test_datagrams_of_ranks_have_both_ports_in_their_range(
    netns: str, source: int, destination: int, kind: Kind
) -> None:
    found = namespace.within(netns, counted, socket.AF_INET6, socket.SOCK_DGRAM, source, destination)
    assert found == {kind: SEEN}


def test_other_protocols_are_not_of_ranks(netns: str) -> None:
    assert namespace.within(netns, counted, socket.AF_INET, socket.SOCK_DGRAM, 5000, 5001) == {Kind.OTHER: SEEN}
    # A request and its refusal.
    assert namespace.within(netns, counted, socket.AF_INET6, socket.SOCK_STREAM, 5000, 5001) == {Kind.OTHER: 2 * SEEN}


def test_a_closed_port_is_reported_by_the_network(netns: str) -> None:
    def send() -> dict[Kind, int]:
        with ExitStack() as stack:
            counters = {kind: stack.enter_context(PacketCounter("lo", filter_of(kind, *PORTS))) for kind in Kind}
            sender = stack.enter_context(socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
            sender.bind(("::1", 5000))
            sender.connect(("::1", 5001))
            sender.send(b"")
            with pytest.raises(ConnectionRefusedError):
                sender.recv(1)
            return {kind: counter.read() for kind, counter in counters.items() if counter.read()}

    assert namespace.within(netns, send) == {Kind.RANK: SEEN, Kind.LINK: SEEN}


def test_bytes_of_an_interface_are_those_of_its_packets(netns: str) -> None:
    before = namespace.within(netns, interface_bytes, "lo")
    namespace.within(netns, counted, socket.AF_INET6, socket.SOCK_DGRAM, 5000, 5001)
    ipv6, udp = 40, 8  # the loopback device counts no Ethernet header
    assert namespace.within(netns, interface_bytes, "lo") - before == SEEN * (ipv6 + udp)
    with pytest.raises(KeyError, match="eth99"):
        namespace.within(netns, interface_bytes, "eth99")
