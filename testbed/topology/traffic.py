# SPDX-License-Identifier: Apache-2.0
"""What passes an interface: its counters of bytes, and packets of one kind, counted by a filter in the kernel."""

from __future__ import annotations

import ctypes
import socket
import struct
from enum import StrEnum
from pathlib import Path
from typing import Final

from sennit.closing import Closing
from sennit.testbed.packet_socket import packet_socket

ETH_P_ALL: Final = 3
ETH_P_ARP: Final = 0x0806
ETH_P_IPV6: Final = 0x86DD
# asm-generic/socket.h, linux/if_packet.h
SO_ATTACH_FILTER: Final = 26
SOL_PACKET: Final = 263
PACKET_STATISTICS: Final = 6
_STATISTICS: Final = struct.Struct("=II")  # packets that passed the filter, and of these: dropped
_INSTRUCTION: Final = struct.Struct("=HBBI")
_PROGRAM: Final = struct.Struct("@HP")
# linux/filter.h: load a half word or a byte, jump if equal, at least or above, return.
_LDH, _LDB, _JEQ, _JGE, _JGT, _RET = 0x28, 0x30, 0x15, 0x35, 0x25, 0x06
# Ethernet (14 bytes), IPv6 (40) without extension headers, UDP.
_TYPE_AT, _NEXT_HEADER_AT, _SOURCE_AT, _DESTINATION_AT = 12, 20, 54, 56
# So much of a packet waits in the socket, which nobody reads.
_SNAP_BYTES: Final = 64


class Kind(StrEnum):
    """What a packet belongs to."""

    RANK = "rank_packets"
    """UDP over IPv6 between ports of ranks."""
    LINK = "link_packets"
    """The network's own: ARP and ICMPv6, which looks for neighbours and groups, and reports closed ports."""
    OTHER = "other_packets"


def filter_of(kind: Kind, first_port: int, last_port: int) -> bytes:
    """A classic BPF program that passes packets of this kind; ranks have the ports `first_port` to `last_port`."""
    # Code, value, where to go if it holds and if not; None is the next instruction.
    tests: list[tuple[int, int, Kind | None, Kind | None]] = [
        (_LDH, _TYPE_AT, None, None),
        (_JEQ, ETH_P_ARP, Kind.LINK, None),
        (_JEQ, ETH_P_IPV6, None, Kind.OTHER),
        (_LDB, _NEXT_HEADER_AT, None, None),
        (_JEQ, socket.IPPROTO_ICMPV6, Kind.LINK, None),
        (_JEQ, socket.IPPROTO_HOPOPTS, Kind.LINK, None),  # reports of groups have a router alert
        (_JEQ, socket.IPPROTO_UDP, None, Kind.OTHER),
        (_LDH, _SOURCE_AT, None, None),
        (_JGE, first_port, None, Kind.OTHER),
        (_JGT, last_port, Kind.OTHER, None),
        (_LDH, _DESTINATION_AT, None, None),
        (_JGE, first_port, None, Kind.OTHER),
        (_JGT, last_port, Kind.OTHER, Kind.RANK),
    ]
    ends = list(Kind)
    program = b""
    for index, (code, value, *targets) in enumerate(tests):
        jumps = [0 if target is None else len(tests) - index - 1 + ends.index(target) for target in targets]
        program += _INSTRUCTION.pack(code, *jumps, value)
    return program + b"".join(_INSTRUCTION.pack(_RET, 0, 0, _SNAP_BYTES * (end is kind)) for end in ends)


class PacketCounter(Closing):
    """Counts packets in and out of an interface of this network namespace that a filter passes. Needs CAP_NET_RAW."""

    def __init__(self, interface: str, program: bytes) -> None:
        self._count = 0
        self._socket = packet_socket(0)  # bound below, so that none comes unfiltered
        try:
            code = ctypes.create_string_buffer(program, len(program))
            attached = _PROGRAM.pack(len(program) // _INSTRUCTION.size, ctypes.addressof(code))
            self._socket.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, attached)
            self._socket.bind((interface, ETH_P_ALL))
        except BaseException:
            self._socket.close()
            raise

    def read(self) -> int:
        """Packets since the beginning."""
        passed, _ = _STATISTICS.unpack(self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, _STATISTICS.size))
        self._count += passed  # the kernel begins anew with each reading
        return self._count

    def close(self) -> None:
        self._socket.close()


def all_interface_bytes() -> dict[str, tuple[int, int]]:
    """Bytes that each interface of this network namespace has received and sent, by its driver's counters."""
    found = {}
    for line in Path("/proc/thread-self/net/dev").read_text(encoding="utf-8").splitlines():
        name, colon, counters = line.partition(":")
        if colon:
            received, *_, sent = (int(field) for field in counters.split()[:9])
            found[name.strip()] = received, sent
    return found


def interface_bytes(interface: str) -> int:
    """Bytes that this interface has sent and received. Raises KeyError if there is none of this name."""
    return sum(all_interface_bytes()[interface])
