# SPDX-License-Identifier: Apache-2.0
"""Addresses and MTU of this host's network interfaces."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path
from typing import Final, NamedTuple

from sennit.errors import ConfigError
from sennit.offload.framing import Ends

# linux/sockios.h
_SIOCGIFADDR: Final = 0x8915
_SIOCGIFHWADDR: Final = 0x8927
_HARDWARE_BYTES: Final = 6
# linux/if_arp.h. A tunnel, such as tun or WireGuard, has packets without a header before that of IP.
_ARPHRD_ETHER: Final = 1
_ARPHRD_LOOPBACK: Final = 772
# linux/if_addr.h
_IFA_F_TEMPORARY: Final = 0x01
_IFA_F_DEPRECATED: Final = 0x20
_IFA_F_TENTATIVE: Final = 0x40


class _Ipv6Address(NamedTuple):
    address: str
    scope: int
    """0 is global."""

    passes: bool
    """It is temporary or deprecated."""


class TargetError(ConfigError):
    """Records cannot be received at this target. The message says why, and what is allowed."""


def interface_index(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        known = ", ".join(found for _, found in socket.if_nameindex())
        raise TargetError(f"there is no interface {name!r}; there are {known}") from None


def interface_address(name: str) -> str:
    """A global IPv6 address of the interface, or else its IPv4 address.

    Of several, one that stays comes before one that is temporary or deprecated (RFC 8981, RFC 4862), and then the
    lowest. The kernel's table has no order that lasts.
    """
    globals_ = [found for found in _ipv6_addresses(name) if found.scope == 0]
    if globals_:
        return min(globals_, key=lambda found: (found.passes, socket.inet_pton(socket.AF_INET6, found.address))).address
    if ipv4 := _ipv4_address(name):
        return ipv4
    raise TargetError(f"interface {name!r} has neither a global IPv6 address nor one of IPv4")


def has_address(name: str, address: str) -> bool:
    """Whether this is one of the interface's global IPv6 addresses, or its IPv4 address."""
    if ":" not in address:
        return address == _ipv4_address(name)
    return any(found.scope == 0 and found.address == address for found in _ipv6_addresses(name))


def ipv6_addresses(name: str) -> list[str]:
    """The interface's IPv6 addresses, also that of its link alone."""
    return [found.address for found in _ipv6_addresses(name)]


def hardware_address(name: str) -> bytes:
    """Raises TargetError unless the interface has frames of Ethernet, which programs look for packets in."""
    found = _ask(name, _SIOCGIFHWADDR)
    (kind,) = struct.unpack_from("H", found, 16)
    if kind not in (_ARPHRD_ETHER, _ARPHRD_LOOPBACK):
        raise TargetError(
            f"interface {name!r} has no frames of Ethernet but packets of kind {kind} (`ip link show {name}`), and XDP "
            "programs would take none of them; allowed: an Ethernet, a virtual one too, or lo"
        )
    return found[18 : 18 + _HARDWARE_BYTES]


def _ipv6_addresses(name: str) -> list[_Ipv6Address]:
    """Those that are in use."""
    interface_index(name)
    found = []
    # Address, index, prefix, scope, flags, name (linux/Documentation/networking/proc_net_*).
    table = Path("/proc/thread-self/net/if_inet6")
    for line in table.read_text(encoding="utf-8").splitlines() if table.exists() else ():
        digits, _, _, scope, flags, device = line.split()
        if device == name and not int(flags, 16) & _IFA_F_TENTATIVE:
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            passes = bool(int(flags, 16) & (_IFA_F_TEMPORARY | _IFA_F_DEPRECATED))
            found.append(_Ipv6Address(address, int(scope, 16), passes))
    return found


def _ipv4_address(name: str) -> str | None:
    try:
        return socket.inet_ntoa(_ask(name, _SIOCGIFADDR)[20:24])
    except OSError:
        return None


def has_fragments(name: str) -> bool:
    """Whether an XDP program should take packets in several pieces there.

    Each driver has a limit of its own for packets in one piece: 3,506 bytes at veth, elsewhere less or more. Below the
    limit such a program takes packets, too.
    """
    from sennit.ebpf.links import ETHERNET_MTU, interface_mtu

    return interface_mtu(name) > ETHERNET_MTU


def _ask(name: str, request: int) -> bytes:
    """Returns `struct ifreq` (linux/if.h) as the kernel fills it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return fcntl.ioctl(any_socket, request, struct.pack("16s24x", name.encode()[:15]))


def own_ends(name: str, address: str | None = None) -> Ends:
    """The destination of packets for this interface: its hardware address, and an address.

    None: the one of `interface_address`. That may be another one a moment later, so whoever has told it to somebody
    says which.
    """
    address = interface_address(name) if address is None else address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    hardware = hardware_address(name)
    packed = socket.inet_pton(family, address)
    return Ends(hardware=hardware, source=packed, address=packed)
