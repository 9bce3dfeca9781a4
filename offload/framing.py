# SPDX-License-Identifier: Apache-2.0
"""Frames around a datagram (IEEE 802.3 and 802.1Q, RFC 8200, RFC 791, RFC 768), to run a program without a network."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

ETHERTYPE_IPV4: Final = 0x0800
ETHERTYPE_IPV6: Final = 0x86DD
IPV4_BYTES: Final = 4
IPPROTO_UDP: Final = 17
_UDP_BYTES: Final = 8
_IPV4_HEADER_BYTES: Final = 20
_DO_NOT_FRAGMENT: Final = 0x4000
_SENDER_PORT: Final = 49152


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """Source and destination: hardware addresses of 6 bytes, and IPv6 addresses of 16 bytes or IPv4 addresses of 4."""

    source_hardware: bytes = bytes(6)
    hardware: bytes = bytes(6)
    source: bytes = bytes(15) + b"\x01"
    address: bytes = bytes(15) + b"\x01"


LOOPBACK: Final = Ends()


def frame(
    datagram: bytes,
    udp_port: int,
    ends: Ends = LOOPBACK,
    *,
    with_checksum: bool = False,
    vlan_tags: Sequence[tuple[int, int]] = (),
    source_port: int = _SENDER_PORT,
) -> bytes:
    """Ethernet, IP and UDP around a datagram.

    Without a checksum it is left at 0, as on a link whose device computes it. `vlan_tags`, outermost first: the tag's
    type (0x8100, or 0x88A8 of a service provider) and its 16 bits of priority and VLAN.
    """
    size = _UDP_BYTES + len(datagram)
    tags = b"".join(struct.pack(">HH", kind, control) for kind, control in vlan_tags)
    is_ipv4 = len(ends.address) == IPV4_BYTES
    ether = ends.hardware + ends.source_hardware + tags
    ether += struct.pack(">H", ETHERTYPE_IPV4 if is_ipv4 else ETHERTYPE_IPV6)
    if is_ipv4:
        head = struct.pack(">BBHHHBB", 0x45, 0, _IPV4_HEADER_BYTES + size, 0, _DO_NOT_FRAGMENT, 64, IPPROTO_UDP)
        places = ends.source + ends.address
        ip = head + struct.pack(">H", checksum(head + bytes(2) + places)) + places
    else:
        ip = struct.pack(">IHBB", 6 << 28, size, IPPROTO_UDP, 64) + ends.source + ends.address
    udp = struct.pack(">HHH", source_port, udp_port, size)
    found = 0
    if with_checksum:
        pseudo = ends.source + ends.address + struct.pack(">HH" if is_ipv4 else ">II", size, IPPROTO_UDP)
        found = checksum(pseudo + udp + bytes(2) + datagram) or 0xFFFF
    return ether + ip + udp + struct.pack(">H", found) + datagram


def checksum(content: bytes) -> int:
    """The checksum of RFC 1071. UDP sends 0xFFFF for a result of 0, which means "none" (RFC 768)."""
    total = int(np.frombuffer(content + bytes(len(content) % 2), dtype=">u2").sum(dtype=np.uint64))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
