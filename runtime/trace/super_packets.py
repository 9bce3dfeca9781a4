# SPDX-License-Identifier: Apache-2.0
"""Cuts a packet that the stack carries as one into those of the wire (UDP segmentation offload), as a device would.

Every segment gets its own lengths, IPv4 identification and checksums, as Linux's `__udp_gso_segment` sets them. Its
ICRC is then correct, because it was computed for the packets on the wire.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from sennit.offload.framing import checksum

ETHERNET_BYTES: Final = 14
IPV4_MIN_BYTES: Final = 20
IPV6_BYTES: Final = 40
UDP_BYTES: Final = 8
_PROTOCOL_UDP: Final = 17
_IPV4_TYPE: Final = 0x0800


def wire_packets(frame: bytes, segment_bytes: int) -> Iterator[bytes]:
    """The Ethernet frames on the wire. `segment_bytes`: UDP payload of each; 0: the frame is a single packet.

    Fills in a checksum that the stack left to the device. A frame without whole headers stays as it is.
    """
    if len(frame) < ETHERNET_BYTES + 1:
        yield frame
        return
    is_ipv4 = struct.unpack_from("!H", frame, ETHERNET_BYTES - 2)[0] == _IPV4_TYPE
    ip_bytes = (frame[ETHERNET_BYTES] & 0xF) * 4 if is_ipv4 else IPV6_BYTES
    udp_at = ETHERNET_BYTES + ip_bytes
    payload_at = udp_at + UDP_BYTES
    if len(frame) < payload_at or ip_bytes < IPV4_MIN_BYTES:
        yield frame
        return
    payload = frame[payload_at:]
    addresses = frame[ETHERNET_BYTES + (12 if is_ipv4 else 8) : ETHERNET_BYTES + (20 if is_ipv4 else 40)]
    if segment_bytes == 0 or len(payload) <= segment_bytes:
        pseudo = addresses + struct.pack("!II", _PROTOCOL_UDP, UDP_BYTES + len(payload))
        (sent,) = struct.unpack_from("!H", frame, udp_at + 6)
        # CHECKSUM_PARTIAL of Linux: the sum over the fields that the device does not know.
        is_left = sent == ~checksum(pseudo) & 0xFFFF
        yield _with_checksum(bytearray(frame[:payload_at]), udp_at, pseudo, payload) if is_left else frame
        return
    for number, begin in enumerate(range(0, len(payload), segment_bytes)):
        piece = payload[begin : begin + segment_bytes]
        head = bytearray(frame[:payload_at])
        udp_bytes = UDP_BYTES + len(piece)
        if is_ipv4:
            (first,) = struct.unpack_from("!H", head, ETHERNET_BYTES + 4)
            struct.pack_into("!HH", head, ETHERNET_BYTES + 2, ip_bytes + udp_bytes, (first + number) & 0xFFFF)
            struct.pack_into("!H", head, ETHERNET_BYTES + 10, 0)
            struct.pack_into("!H", head, ETHERNET_BYTES + 10, checksum(bytes(head[ETHERNET_BYTES:udp_at])))
        else:
            struct.pack_into("!H", head, ETHERNET_BYTES + 4, udp_bytes)
        struct.pack_into("!H", head, udp_at + 4, udp_bytes)
        yield _with_checksum(head, udp_at, addresses + struct.pack("!II", _PROTOCOL_UDP, udp_bytes), piece)


def _with_checksum(head: bytearray, udp_at: int, pseudo: bytes, payload: bytes) -> bytes:
    struct.pack_into("!H", head, udp_at + 6, 0)
    # (0 would mean "no checksum", RFC 768.)
    struct.pack_into("!H", head, udp_at + 6, checksum(pseudo + bytes(head[udp_at:]) + payload) or 0xFFFF)
    return bytes(head) + payload
