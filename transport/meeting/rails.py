# SPDX-License-Identifier: Apache-2.0
"""Finds the local addresses that the udp port uses, one rail for each interface. Linux only.

The native core reads the interfaces (`csrc/ports/interfaces.hpp`), for this file as for its sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sennit.transport.errors import ConfigError

# The calling thread may be in another network namespace than the main thread, whose namespace /proc/net shows.
PROC_NET = Path("/proc/thread-self/net")

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
        raise ConfigError(
            f"no interface is up with an IPv4 or IPv6 address; there are: {_list(interfaces)}; bring one up "
            "(ip link set lo up), or with all ranks on this host set SENNIT_TRANSPORT=shm"
        )
    return [_rail(interface) for interface in chosen]


def read_interfaces(proc_net: Path = PROC_NET) -> list[Interface]:
    """Returns all interfaces of this network namespace, by index."""
    from sennit.transport import _core

    return [
        Interface(
            name=name,
            is_up=is_up,
            is_loopback=is_loopback,
            ipv6=tuple(address for address in addresses if ":" in address),
            ipv4=tuple(address for address in addresses if ":" not in address),
        )
        for name, is_up, is_loopback, addresses in _core.interfaces(str(proc_net / "if_inet6"))
    ]


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


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # This kernel lacks the address family.
        return []
