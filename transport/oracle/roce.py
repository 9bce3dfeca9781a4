# SPDX-License-Identifier: Apache-2.0
"""RoCEv2 packets in Python: an implementation of docs/reference/wire.md that shares no code with the native one.

Tests, captures and the simulator's reports read packets with it; the data plane never does.
IBTA architecture specification, volume 1, sections 9.2, 9.3.3, 9.3.6 and annex A17.
"""

from __future__ import annotations

import enum
import ipaddress
import struct
import zlib
from dataclasses import dataclass
from typing import Final

from sennit.errors import FormatError

ROCE_UDP_PORT = 4791
DEFAULT_PARTITION_KEY = 0xFFFF
PAYLOAD_MAX_BYTES = 20_480  # Between sockets of one host; on a network 4,096.
ICRC_BYTES = 4
IPV4_DO_NOT_FRAGMENT = 0x4000
PROTOCOL_UDP = 17

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class Opcode(enum.IntEnum):
    """The two operations of the unreliable connected service that sennit sends."""

    UC_SEND_ONLY = 0x24
    UC_WRITE_ONLY_IMMEDIATE = 0x2B


# The checks of an arriving packet, in their order (docs/reference/wire.md). The core drops the packet at the first
# failing check and counts it under this name.
REFUSALS: Final = (
    "truncated", "bad_opcode", "bad_version", "bad_partition", "bad_pad", "oversized", "bad_length", "unknown_qpn",
    "bad_key", "bad_range", "bad_slot", "bad_icrc",
)  # fmt: skip


class WireError(FormatError):
    """The bytes are no packet. `reason` is the name of the native core's counter."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Bth:
    """The base transport header, 12 bytes."""

    opcode: Opcode
    qpn: int
    psn: int
    pad_bytes: int = 0
    solicited: bool = False
    migrated: bool = True
    partition_key: int = DEFAULT_PARTITION_KEY
    fecn: bool = False
    becn: bool = False
    ack_request: bool = False

    SIZE_BYTES = 12

    def push(self) -> bytes:
        flags = self.solicited << 7 | self.migrated << 6 | self.pad_bytes << 4
        notification = self.fecn << 7 | self.becn << 6
        return struct.pack(
            ">BBHII",
            self.opcode,
            flags,
            self.partition_key,
            notification << 24 | self.qpn,
            self.ack_request << 31 | self.psn,
        )

    @classmethod
    def pull(cls, data: bytes) -> Bth:
        if len(data) < cls.SIZE_BYTES:
            raise WireError("truncated", f"{len(data)} bytes, a base transport header has {cls.SIZE_BYTES}")
        opcode, flags, partition_key, qpn_word, psn_word = struct.unpack_from(">BBHII", data)
        if opcode not in Opcode.__members__.values():
            raise WireError(
                "bad_opcode", f"{opcode:#04x}, want one of {', '.join(f'{known:#04x}' for known in Opcode)}"
            )
        if flags & 0x0F:
            raise WireError("bad_version", f"transport version {flags & 0x0F}, want 0")
        if partition_key & 0x7FFF != DEFAULT_PARTITION_KEY & 0x7FFF:
            raise WireError("bad_partition", f"partition key {partition_key:#06x}, want {DEFAULT_PARTITION_KEY:#06x}")
        return cls(
            opcode=Opcode(opcode),
            qpn=qpn_word & 0xFF_FFFF,
            psn=psn_word & 0xFF_FFFF,
            pad_bytes=flags >> 4 & 3,
            solicited=bool(flags & 0x80),
            migrated=bool(flags & 0x40),
            partition_key=partition_key,
            fecn=bool(qpn_word & 0x8000_0000),
            becn=bool(qpn_word & 0x4000_0000),
            ack_request=bool(psn_word & 0x8000_0000),
        )


@dataclass(frozen=True, kw_only=True)
class Reth:
    """The RDMA extended transport header, 16 bytes: the destination of the payload."""

    remote_address: int
    rkey: int
    length_bytes: int

    SIZE_BYTES = 16

    def push(self) -> bytes:
        return struct.pack(">QII", self.remote_address, self.rkey, self.length_bytes)

    @classmethod
    def pull(cls, data: bytes) -> Reth:
        if len(data) < cls.SIZE_BYTES:
            raise WireError("truncated", f"{len(data)} bytes, an RDMA header has {cls.SIZE_BYTES}")
        remote_address, rkey, length_bytes = struct.unpack_from(">QII", data)
        return cls(remote_address=remote_address, rkey=rkey, length_bytes=length_bytes)


@dataclass(frozen=True, kw_only=True)
class Packet:
    """A packet: the payload of a UDP datagram. Only data packets have `reth` and `immediate`."""

    bth: Bth
    payload: bytes
    reth: Reth | None = None
    immediate: int | None = None
    icrc: int | None = None

    @classmethod
    def data(cls, *, qpn: int, psn: int, remote_address: int, rkey: int, immediate: int, payload: bytes) -> Packet:
        opcode = Opcode.UC_WRITE_ONLY_IMMEDIATE
        return cls(
            bth=Bth(opcode=opcode, qpn=qpn, psn=psn, pad_bytes=-len(payload) % 4),
            reth=Reth(remote_address=remote_address, rkey=rkey, length_bytes=len(payload)),
            immediate=immediate,
            payload=payload,
        )

    @classmethod
    def control(cls, *, qpn: int, psn: int, payload: bytes) -> Packet:
        bth = Bth(opcode=Opcode.UC_SEND_ONLY, qpn=qpn, psn=psn, pad_bytes=-len(payload) % 4)
        return cls(bth=bth, payload=payload)

    def push(self) -> bytes:
        """Returns the packet without its ICRC."""
        parts = [self.bth.push()]
        if self.reth is not None and self.immediate is not None:
            parts += [self.reth.push(), struct.pack(">I", self.immediate)]
        return b"".join([*parts, self.payload, bytes(self.bth.pad_bytes)])

    @classmethod
    def pull(cls, data: bytes) -> Packet:
        """Reads a whole UDP payload. The ICRC is kept but not checked: see `icrc`."""
        bth = Bth.pull(data)
        offset = Bth.SIZE_BYTES
        reth: Reth | None = None
        immediate: int | None = None
        is_data = bth.opcode is Opcode.UC_WRITE_ONLY_IMMEDIATE
        header_bytes = Bth.SIZE_BYTES + (Reth.SIZE_BYTES + 4 if is_data else 0)
        if len(data) < header_bytes + ICRC_BYTES:
            raise WireError("truncated", f"{len(data)} bytes, want at least {header_bytes + ICRC_BYTES}")
        if is_data:
            reth = Reth.pull(data[offset:])
            (immediate,) = struct.unpack_from(">I", data, offset + Reth.SIZE_BYTES)
            offset = header_bytes
        padded = data[offset:-ICRC_BYTES]
        if len(padded) % 4 or bth.pad_bytes > len(padded):
            raise WireError("bad_pad", f"pad count {bth.pad_bytes}, {len(padded)} bytes with the pad")
        payload = padded[: len(padded) - bth.pad_bytes]
        if len(payload) > PAYLOAD_MAX_BYTES:
            raise WireError("oversized", f"{len(payload)} bytes, want at most {PAYLOAD_MAX_BYTES}")
        if reth is not None and reth.length_bytes != len(payload):
            raise WireError("bad_length", f"the header says {reth.length_bytes} bytes, {len(payload)} are there")
        (icrc_value,) = struct.unpack("<I", data[-ICRC_BYTES:])
        return cls(bth=bth, payload=payload, reth=reth, immediate=immediate, icrc=icrc_value)


def icrc(
    body: bytes,
    source: tuple[str, int],
    destination: tuple[str, int],
    *,
    identification: int = 0,
) -> int:
    """Returns the ICRC of `body` between two (address, port). Annex A17.3.3.

    `body` is `Packet.push()`, or a UDP payload without its last four bytes. `identification` is the IPv4 header's. The
    ICRC covers none with IPv6.
    """
    source_address, destination_address = ipaddress.ip_address(source[0]), ipaddress.ip_address(destination[0])
    if source_address.version != destination_address.version:
        raise ValueError(f"addresses of two families: {source_address}, {destination_address}")
    udp_bytes = 8 + len(body) + ICRC_BYTES
    udp = struct.pack(">HHHH", source[1], destination[1], udp_bytes, 0xFFFF)
    pseudo = bytes(8 * [0xFF]) + _masked_ip(source_address, destination_address, udp_bytes, identification) + udp
    return zlib.crc32(body[:4] + b"\xff" + body[5:], zlib.crc32(pseudo))


def seal(packet: Packet, source: tuple[str, int], destination: tuple[str, int], *, identification: int = 0) -> bytes:
    """Returns the UDP payload of `packet` with its ICRC, least significant byte first."""
    body = packet.push()
    return body + struct.pack("<I", icrc(body, source, destination, identification=identification))


def _masked_ip(source: IpAddress, destination: IpAddress, udp_bytes: int, identification: int) -> bytes:
    """Returns the IP header, with all bits set in the fields that routers may change."""
    if source.version == 6:
        return struct.pack(">IHBB", 0x6FFF_FFFF, udp_bytes, PROTOCOL_UDP, 0xFF) + source.packed + destination.packed
    fields = (0x45, 0xFF, 20 + udp_bytes, identification, IPV4_DO_NOT_FRAGMENT, 0xFF, PROTOCOL_UDP, 0xFFFF)
    return struct.pack(">BBHHHBBH", *fields) + source.packed + destination.packed
