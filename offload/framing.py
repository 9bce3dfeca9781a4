# SPDX-License-Identifier: Apache-2.0
"""Ethernet, IPv6 and UDP around a datagram (IEEE 802.3, RFC 8200, RFC 768): to run a program on without a network."""

from __future__ import annotations

import struct
from typing import Final

ETHERTYPE_IPV6: Final = 0x86DD
IPPROTO_UDP: Final = 17
_UDP_BYTES: Final = 8
_LOOPBACK: Final = bytes(15) + b"\x01"
_SENDER_PORT: Final = 49152


def frame(datagram: bytes, udp_port: int) -> bytes:
    """The checksum is left at 0, as on a link whose device computes it."""
    size = _UDP_BYTES + len(datagram)
    ether = bytes(12) + struct.pack(">H", ETHERTYPE_IPV6)
    ip = struct.pack(">IHBB", 6 << 28, size, IPPROTO_UDP, 64) + _LOOPBACK + _LOOPBACK
    return ether + ip + struct.pack(">HHHH", _SENDER_PORT, udp_port, size, 0) + datagram
