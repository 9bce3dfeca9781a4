# SPDX-License-Identifier: Apache-2.0
"""Packets of any shape as bytes: correct except for the given fields, and with a correct ICRC unless changed."""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sennit.transport.oracle import roce

PAYLOAD_BYTES: Final = 4_096
BTH: Final = struct.Struct(">BBHII")
RETH: Final = struct.Struct(">QII")
IMMEDIATE: Final = struct.Struct(">I")
BTH_BYTES: Final = BTH.size
HEADER_BYTES: Final = BTH.size + RETH.size + IMMEDIATE.size
WRITE_ONLY_IMMEDIATE: Final = int(roce.Opcode.UC_WRITE_ONLY_IMMEDIATE)
PSN_MASK: Final = (1 << 24) - 1


class Source(enum.Enum):
    """The socket that sends a datagram."""

    PEER = "the peer's"
    OTHER_PORT = "the peer's address, another port"
    OTHER_ADDRESS = "an address that is not the peer's"


@dataclass(frozen=True, kw_only=True)
class Datagram:
    """A packet without its ICRC, which depends on the addresses, and the way to send it."""

    body: bytes
    payload: bytes
    change: Callable[[bytes], bytes] = bytes
    """A change to the packet after the ICRC is added."""
    source: Source = Source.PEER
    hop_limit: int = 64
    traffic_class: int = 0

    def sealed(self, source: tuple[str, int], destination: tuple[str, int]) -> bytes:
        """Returns the payload of the UDP datagram."""
        icrc = roce.icrc(self.body, source, destination) if len(self.body) >= BTH_BYTES else 0
        return self.change(self.body + struct.pack("<I", icrc))


@dataclass(frozen=True, kw_only=True)
class Aim:
    """One packet of a message: its correct destination, and what a forger needs to know."""

    qpn: int
    psn: int
    address: int
    rkey: int
    immediate: int
    payload: bytes
    region_bytes: int
    """Bytes that the key opens, from `address` on."""
    ended: Aim | None = None
    """A packet of a message that has ended."""

    def packet(self, **fields: Any) -> bytes:
        """Returns headers, payload and pad. A field that is not given is correct.

        Fields of the base header are as on the wire. If `address` or `immediate` is None, the packet lacks this header.
        """
        payload: bytes = fields.pop("payload", self.payload)
        pad: bytes = fields.pop("pad", bytes(-len(payload) % 4))
        values = {
            "opcode": WRITE_ONLY_IMMEDIATE,
            "solicited": 0,
            "migrated": 1,
            "pad_count": len(pad),
            "version": 0,
            "partition_key": roce.DEFAULT_PARTITION_KEY,
            "notification": 0,
            "qpn": self.qpn,
            "ack_request": 0,
            "psn": self.psn,
            "address": self.address,
            "rkey": self.rkey,
            "length": len(payload),
            "immediate": self.immediate,
        }
        unknown = fields.keys() - values.keys()
        if unknown:
            raise TypeError(f"no fields of a packet: {', '.join(unknown)}")
        values |= fields
        base = BTH.pack(
            values["opcode"],
            values["solicited"] << 7 | values["migrated"] << 6 | values["pad_count"] << 4 | values["version"],
            values["partition_key"],
            values["notification"] << 24 | values["qpn"],
            values["ack_request"] << 31 | values["psn"] & PSN_MASK,
        )
        target = b""
        if values["address"] is not None:
            target = RETH.pack(values["address"] % (1 << 64), values["rkey"], values["length"])
        immediate = b"" if values["immediate"] is None else IMMEDIATE.pack(values["immediate"])
        return base + target + immediate + payload + pad

    def datagram(self, **fields: Any) -> Datagram:
        return Datagram(body=self.packet(**fields), payload=fields.get("payload", self.payload))
