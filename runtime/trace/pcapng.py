# SPDX-License-Identifier: Apache-2.0
"""Writes pcap-ng (draft-ietf-opsawg-pcapng): packets with nanoseconds and direction, and drop counts.

scapy's writer knows neither the resolution of an interface's times nor its statistics.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, Final

from sennit.closing import Closing

LINKTYPE_ETHERNET: Final = 1
INBOUND: Final = 1
"""The first two bits of `epb_flags`, as OUTBOUND."""
OUTBOUND: Final = 2

_SECTION, _INTERFACE, _STATISTICS, _PACKET = 0x0A0D0D0A, 1, 5, 6
_BYTE_ORDER: Final = 0x1A2B3C4D
_UNKNOWN_LENGTH: Final = 0xFFFF_FFFF_FFFF_FFFF
_IF_NAME, _IF_TSRESOL = 2, 9
_EPB_FLAGS: Final = 2
_ISB_IFRECV, _ISB_OSDROP, _SHB_USERAPPL = 4, 7, 4
_NANOSECONDS: Final = bytes([9])


class Writer(Closing):
    """One section with one Ethernet interface."""

    def __init__(self, path: Path, interface: str, application: str) -> None:
        """Raises OSError."""
        self._file: BinaryIO = path.open("wb")
        header = struct.pack("<IHHQ", _BYTE_ORDER, 1, 0, _UNKNOWN_LENGTH)
        self._block(_SECTION, header, [(_SHB_USERAPPL, application.encode())])
        options = [(_IF_NAME, interface.encode()), (_IF_TSRESOL, _NANOSECONDS)]
        self._block(_INTERFACE, struct.pack("<HHI", LINKTYPE_ETHERNET, 0, 0), options)

    def packet(self, time_ns: int, frame: bytes, direction: int) -> None:
        """`time_ns`: since 1970, UTC. `direction`: INBOUND or OUTBOUND."""
        head = struct.pack("<IIIII", 0, time_ns >> 32, time_ns & 0xFFFF_FFFF, len(frame), len(frame))
        self._block(_PACKET, head + _padded(frame), [(_EPB_FLAGS, struct.pack("<I", direction))])

    def statistics(self, time_ns: int, *, received: int, dropped: int) -> None:
        """The interface's packets. `dropped`: received packets that are missing in the file."""
        head = struct.pack("<III", 0, time_ns >> 32, time_ns & 0xFFFF_FFFF)
        options = [(_ISB_IFRECV, struct.pack("<Q", received)), (_ISB_OSDROP, struct.pack("<Q", dropped))]
        self._block(_STATISTICS, head, options)

    def close(self) -> None:
        self._file.close()

    def _block(self, kind: int, body: bytes, options: list[tuple[int, bytes]]) -> None:
        for code, value in options:
            body += struct.pack("<HH", code, len(value)) + _padded(value)
        body += struct.pack("<HH", 0, 0)
        size = struct.pack("<I", 12 + len(body))
        self._file.write(struct.pack("<I", kind) + size + body + size)


def _padded(value: bytes) -> bytes:
    return value + bytes(-len(value) % 4)
