# SPDX-License-Identifier: Apache-2.0
"""Finds the local addresses that the udp port uses, one rail for each interface.

Linux and the standard library only.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from sennit.transport.errors import ConfigError

# The calling thread may be in another network namespace than the main thread, whose namespace /proc/net shows.
PROC_NET = Path("/proc/thread-self/net")

# linux/sockios.h, linux/if.h
SIOCGIFADDR = 0x8915
SIOCGIFFLAGS = 0x8913
IFF_UP = 0x1
IFF_LOOPBACK = 0x8
# linux/if_addr.h: flags of temporary, failed, deprecated and unfinished addresses
IFA_F_TEMPORARY = 0x01
IFA_F_UNUSABLE = 0x08 | 0x20 | 0x40
# net/ipv6.h, as in /proc/net/if_inet6
IPV6_ADDR_LINKLOCAL = 0x20
# linux/route.h
RTF_UP = 0x1
RTF_REJECT = 0x200


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface with the addresses that a peer could send to. Link-local addresses are left out."""

    name: str
    is_up: bool
    is_loopback: bool
    ipv6: tuple[str, ...] = ()
    ipv4: tuple[str, ...] = ()

    @property
    def address(self) -> str | None:
        """IPv6 first: its packets have no identification under the ICRC (docs/reference/wire.md)."""
        return next(iter((*self.ipv6, *self.ipv4)), None)


@dataclass(frozen=True, kw_only=True)
class Rail:
    """A local address, and the interface that has it."""

    interface: str
    address: str
    other_family_address: str = ""
    """The interface's IPv4 address beside an IPv6 `address`: for peers that IPv6 does not reach."""


def find_rails(wanted: Sequence[str] = ()) -> list[Rail]:
    """Returns the rails of this machine: those of the named interfaces, or without names, those that reach other
    machines.
    """
    return choose_rails(read_interfaces(), wanted, read_default_routes())


def choose_rails(interfaces: Sequence[Interface], wanted: Sequence[str], default_routes: Sequence[str]) -> list[Rail]:
    """Chooses the named interfaces in the order given; else those of default routes; else any with an address; else
    loopback.
    """
    by_name = {interface.name: interface for interface in interfaces}
    if wanted:
        return [_rail(_named(by_name, name)) for name in wanted]
    usable = [interface for interface in interfaces if interface.is_up and interface.address is not None]
    outward = [interface for interface in usable if not interface.is_loopback]
    chosen = (
        [interface for interface in outward if interface.name in default_routes]
        or outward
        or [interface for interface in usable if interface.is_loopback][:1]
    )
    if not chosen:
        raise ConfigError(f"no interface is up with an IPv4 or IPv6 address; there are: {_list(interfaces)}")
    return [_rail(interface) for interface in chosen]


def read_interfaces(proc_net: Path = PROC_NET) -> list[Interface]:
    """Returns all interfaces of this network namespace, by index."""
    ipv6 = _read_ipv6(proc_net / "if_inet6")
    interfaces = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            flags = _interface_flags(control, name)
            if flags is None:  # The interface is gone since it was listed.
                continue
            ipv4 = _interface_ipv4(control, name)
            interfaces.append(
                Interface(
                    name=name,
                    is_up=bool(flags & IFF_UP),
                    is_loopback=bool(flags & IFF_LOOPBACK),
                    ipv6=tuple(ipv6.get(name, ())),
                    ipv4=() if ipv4 is None or IPv4Address(ipv4).is_link_local else (ipv4,),
                )
            )
    return interfaces


def read_default_routes(proc_net: Path = PROC_NET) -> list[str]:
    """Returns the interfaces of default routes, IPv6 first."""
    names = []
    for line in _lines(proc_net / "ipv6_route"):
        # destination, its prefix length, source, its prefix length, next hop, metric, references, use, flags, device
        fields = line.split()
        flags = int(fields[8], 16)
        if fields[0] == "0" * 32 and fields[1] == "00" and flags & RTF_UP and not flags & RTF_REJECT:
            names.append(fields[9])
    for line in _lines(proc_net / "route")[1:]:
        # device, destination, gateway, flags, references, use, metric, mask, …
        fields = line.split()
        if fields[1] == fields[7] == "0" * 8 and int(fields[3], 16) & RTF_UP:
            names.append(fields[0])
    return list(dict.fromkeys(names))


def _named(by_name: dict[str, Interface], name: str) -> Interface:
    interface = by_name.get(name)
    if interface is None:
        raise ConfigError(f"interface {name!r} does not exist; there are: {_list(list(by_name.values()))}")
    if not interface.is_up:
        raise ConfigError(f"interface {name!r} is down; set it up (ip link set {name} up) or name another")
    if interface.address is None:
        raise ConfigError(
            f"interface {name!r} has no IPv4 or IPv6 address other than link-local ones; there are: "
            f"{_list(list(by_name.values()))}"
        )
    return interface


def _rail(interface: Interface) -> Rail:
    assert interface.address is not None
    has_both = bool(interface.ipv6 and interface.ipv4) and not interface.is_loopback
    return Rail(
        interface=interface.name,
        address=interface.address,
        other_family_address=interface.ipv4[0] if has_both else "",
    )


def _list(interfaces: Sequence[Interface]) -> str:
    words = [
        f"{interface.name} ({interface.address or 'no address'}{'' if interface.is_up else ', down'})"
        for interface in interfaces
    ]
    return ", ".join(words) or "none"


def _read_ipv6(path: Path) -> dict[str, list[str]]:
    stable: dict[str, list[str]] = {}
    temporary: dict[str, list[str]] = {}
    for line in _lines(path):
        # address, interface index, prefix length, scope, flags, device: hexadecimal
        digits, _, _, scope, flag_digits, name = line.split()
        flags = int(flag_digits, 16)
        if int(scope, 16) == IPV6_ADDR_LINKLOCAL or flags & IFA_F_UNUSABLE:
            continue
        kind = temporary if flags & IFA_F_TEMPORARY else stable
        kind.setdefault(name, []).append(str(IPv6Address(int(digits, 16))))
    for name, addresses in temporary.items():
        stable.setdefault(name, []).extend(addresses)
    return stable


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:  # This kernel lacks the address family.
        return []


def _interface_flags(control: socket.socket, name: str) -> int | None:
    answer = _request(control, SIOCGIFFLAGS, name)
    return None if answer is None else int(struct.unpack_from("H", answer, 16)[0])


def _interface_ipv4(control: socket.socket, name: str) -> str | None:
    answer = _request(control, SIOCGIFADDR, name)
    return None if answer is None else socket.inet_ntoa(answer[20:24])


def _request(control: socket.socket, number: int, name: str) -> bytes | None:
    try:
        return fcntl.ioctl(control, number, struct.pack("16s24x", name.encode()))
    except OSError:  # The interface is gone, or has no address of the family.
        return None
