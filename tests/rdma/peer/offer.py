# SPDX-License-Identifier: Apache-2.0
"""The offer: what ranks tell each other through rendezvous (docs/reference/wire.md, "Offer")."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass
from typing import Final

MAGIC: Final = 0x31554E53
VERSION: Final = 7
WIRE_REVISION: Final = 4
FLAG_DEVICE: Final = 1
EAGER_SLOTS: Final = 64
# magic, version, wire revision, flags, rank, size, path_count, eager slots, receive window, eager rings, rails
HEADER: Final = struct.Struct("<IIIIIIIIQQI")
# IP version, bits of the subnet (0: unknown), device, interface, port, largest payload, address
RAIL: Final = struct.Struct("<BBBBHI16s")
# rkey of the reader's eager ring, first queue pair
READER: Final = struct.Struct("<II")
QUEUE_PAIRS_LISTED: Final = 1 << 31


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The offer of a rank with a device and one rail to one reader."""

    flags: int
    rank: int
    size: int
    address: str
    port: int
    payload_max: int
    receive_window_bytes: int
    source_ports: tuple[int, ...]
    """One for each path."""
    queue_pairs: tuple[int, ...]
    """For the reader, one for each path."""

    def pack(self) -> bytes:
        return self.pack_for_all() + self.pack_for_reader()

    def pack_for_reader(self) -> bytes:
        first, *others = self.queue_pairs
        return READER.pack(0, QUEUE_PAIRS_LISTED | first) + struct.pack(f"<{len(others)}I", *others)

    def pack_for_all(self) -> bytes:
        paths = len(self.source_ports)
        address = ipaddress.ip_address(self.address)
        parts = [
            HEADER.pack(
                MAGIC,
                VERSION,
                WIRE_REVISION,
                self.flags,
                self.rank,
                self.size,
                paths,
                EAGER_SLOTS,
                self.receive_window_bytes,
                0,
                1,
            ),
            RAIL.pack(address.version, 0, 0, 0, self.port, self.payload_max, address.packed),
            struct.pack(f"<{paths}H", *self.source_ports),
        ]
        return b"".join(parts)

    @classmethod
    def unpack(cls, data: bytes) -> Offer:
        """Raises ValueError unless this is a device's offer of one rail that this peer can serve."""
        magic, version, revision, flags, rank, size, paths, slots, window, _rings, rails = HEADER.unpack_from(data)
        if (magic, version, revision, slots) != (MAGIC, VERSION, WIRE_REVISION, EAGER_SLOTS):
            raise ValueError(f"magic {magic:#x}, version {version}, wire revision {revision}, {slots} eager slots")
        if flags != FLAG_DEVICE or rails != 1:
            raise ValueError(f"flags {flags}, {rails} rails; this peer speaks with a device of one rail, without RC")
        at = HEADER.size
        ip_version, _prefix, _device, _interface, port, payload_max, address = RAIL.unpack_from(data, at)
        at += RAIL.size
        source_ports = struct.unpack_from(f"<{paths}H", data, at)
        at += 2 * paths
        _rkey, first = READER.unpack_from(data, at)
        at += READER.size
        if first & QUEUE_PAIRS_LISTED:
            queue_pairs = (first ^ QUEUE_PAIRS_LISTED, *struct.unpack_from(f"<{paths - 1}I", data, at))
            at += 4 * (paths - 1)
        else:
            queue_pairs = tuple(range(first, first + paths))
        if at != len(data):
            raise ValueError(f"an offer of {len(data)} bytes, {at} by its counts")
        return cls(
            flags=flags,
            rank=rank,
            size=size,
            address=str(ipaddress.ip_address(address[:4] if ip_version == 4 else address)),
            port=port,
            payload_max=payload_max,
            receive_window_bytes=window,
            source_ports=source_ports,
            queue_pairs=queue_pairs,
        )
