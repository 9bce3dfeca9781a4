# SPDX-License-Identifier: Apache-2.0
"""The conformance table as data: what is sent, and what each side does with it.

Sections are those of the InfiniBand Architecture Specification, volume 1, release 1.4. A17 is its annex on RoCE v2.
Compliance statements (C9-88) are named as in the kernel's source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from .packets import BTH_BYTES, HEADER_BYTES, Aim, Datagram, Source

Aims = Sequence[Aim]
ICRC_BYTES: Final = 4
# An unused queue pair number: rxe numbers them from 16 on, udp chooses random ones below.
UNUSED: Final = 1 << 22
# The name in pyverbs.
INVALID_REQUEST: Final = "remote invalidate request error"
ACCESS: Final = "remote access error"


@dataclass(frozen=True, kw_only=True)
class OnRxe:
    """What rxe's queue pair does with each packet."""

    delivered: bool
    counted: bool = True
    """Counted in rcvd_pkts: headers and ICRC were right, and only the responder refused the packet."""
    error: str = ""
    """With a shared receive queue: the status of the receive that a dropped packet consumes."""
    completes: bool = True
    """False for a delivered write without immediate."""
    size_bytes: int | None = None
    """The size in the completion, if it is not that of the payload."""
    lands: int | None = 1
    """The place in the message where a delivered packet is written."""
    bad_partition: bool = False
    warns: bool = False
    """The kernel logs a stack trace."""


@dataclass(frozen=True, kw_only=True)
class OnUdp:
    """What the udp port does with each packet: it delivers it, or drops it under this counter."""

    counter: str = ""

    @property
    def delivered(self) -> bool:
        return not self.counter


@dataclass(frozen=True, kw_only=True)
class Case:
    """Packets sent between good ones, in place of packet `place` of a message of 4,096 + 4,096 + 5 bytes."""

    name: str
    forge: Callable[[Aims], list[Datagram]]
    standard: str
    rxe: OnRxe
    udp: OnUdp
    place: int = 1
    first_psn: int = 100
    why: str = ""
    """Why the two sides differ."""
    patch: str = ""
    """The start of the name of a patch in docs/upstream that changes rxe's behaviour to `patched`."""
    patched: OnRxe | None = None

    def rxe_with(self, patches: Sequence[str]) -> OnRxe:
        has = self.patched is not None and any(name.startswith(self.patch) for name in patches)
        return self.patched if has and self.patched is not None else self.rxe


def changed(datagram: Datagram, change: Callable[[bytes], bytes]) -> Datagram:
    return replace(datagram, change=change)


def flipped(at: int) -> Callable[[bytes], bytes]:
    """Returns a function that flips one bit of the byte `at`, which may count from the end."""

    def flip(data: bytes) -> bytes:
        mutable = bytearray(data)
        mutable[at] ^= 1
        return bytes(mutable)

    return flip


def swapped_icrc(data: bytes) -> bytes:
    return data[:-ICRC_BYTES] + data[: -ICRC_BYTES - 1 : -1]


def cut(size_bytes: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:size_bytes]


def header_cuts(aim: Aim, sizes: range) -> list[Datagram]:
    return [changed(aim.datagram(), cut(size)) for size in sizes]


def ghost(aim: Aim) -> Datagram:
    assert aim.ended is not None
    return aim.ended.datagram()


DELIVERED: Final = OnRxe(delivered=True)
UNCOUNTED: Final = OnRxe(delivered=False, counted=False)

CASES: Final = (
    Case(
        name="right in every field",
        forge=lambda aims: [aims[1].datagram()],
        standard="delivered",
        rxe=DELIVERED,
        udp=OnUdp(),
    ),
    Case(
        name="PSN wraps from 16,777,215 to 0",
        forge=lambda aims: [aims[1].datagram()],
        first_psn=(1 << 24) - 1,
        standard="modulo 2^24 (9.7.1)",
        rxe=DELIVERED,
        udp=OnUdp(),
    ),
    Case(
        name="PSN far ahead: packets before it are lost",
        forge=lambda aims: [aims[1].datagram(psn=aims[1].psn + (1 << 20))],
        standard="an *only* packet starts a message whatever its PSN (9.8.2)",
        rxe=DELIVERED,
        udp=OnUdp(),
    ),
    Case(
        name="PSN behind: an old packet whose key still holds",
        forge=lambda aims: [aims[1].datagram(psn=aims[1].psn - (1 << 20))],
        standard="as before",
        rxe=DELIVERED,
        udp=OnUdp(),
    ),
    Case(
        name="duplicate of a packet that was delivered, with other bytes",
        forge=lambda aims: [aims[0].datagram()],
        standard="UC has no duplicates: a message of its own (9.8.2)",
        rxe=OnRxe(delivered=True, lands=0),
        udp=OnUdp(counter="duplicate_packets"),
        why="the flow is what makes it once; with verbs, too, which sees it in the immediate",
    ),
    Case(
        name="ghost: a packet of a message that is over",
        forge=lambda aims: [ghost(aims[1])],
        standard="the key has ended: dropped (9.9.3)",
        rxe=OnRxe(delivered=False, error=ACCESS),
        udp=OnUdp(counter="duplicate_packets"),
    ),
    Case(
        name="queue pair that does not exist; those of management (0, 1)",
        forge=lambda aims: [aims[1].datagram(qpn=qpn) for qpn in (aims[1].qpn ^ UNUSED, 0, 1)],
        standard="dropped (9.6.1)",
        rxe=UNCOUNTED,
        udp=OnUdp(counter="unknown_qpn"),
    ),
    Case(
        name="queue pair of multicasts (0xFFFFFF), to an address that is none",
        forge=lambda aims: [aims[1].datagram(qpn=0xFF_FFFF)],
        standard="dropped (9.6.1)",
        rxe=OnRxe(delivered=False),
        udp=OnUdp(counter="unknown_qpn"),
    ),
    Case(
        name="key wrong in its lowest bit; in a higher one; 0",
        forge=lambda aims: [aims[1].datagram(rkey=rkey) for rkey in (aims[1].rkey ^ 1, aims[1].rkey ^ 1 << 24, 0)],
        standard="dropped (9.9.3)",
        rxe=OnRxe(delivered=False, error=ACCESS),
        udp=OnUdp(counter="bad_key"),
    ),
    Case(
        name="address one byte before the key's memory; one byte beyond; 0; around 2^64",
        forge=lambda aims: [
            aims[1].datagram(address=address)
            for address in (
                aims[0].address - 1,
                aims[0].address + aims[0].region_bytes - len(aims[1].payload) + 1,
                0,
                -1,
            )
        ],
        standard="dropped (9.9.3)",
        rxe=OnRxe(delivered=False, error=ACCESS),
        udp=OnUdp(counter="bad_range"),
    ),
    Case(
        name="address of another packet of the message",
        forge=lambda aims: [aims[1].datagram(address=aims[0].address)],
        standard="delivered",
        rxe=OnRxe(delivered=True, lands=0),
        udp=OnUdp(counter="bad_range"),
        why="the port knows where the packet with this immediate belongs, a device does not",
    ),
    Case(
        name="length below the payload's",
        forge=lambda aims: [aims[1].datagram(length=len(aims[1].payload) - 1)],
        standard="dropped (9.9.3)",
        rxe=OnRxe(delivered=False, error=INVALID_REQUEST),
        udp=OnUdp(counter="bad_length"),
    ),
    Case(
        name="length above the payload's, in a packet below the MTU; above 2^31",
        forge=lambda aims: [
            aims[1].datagram(payload=aims[1].payload[:100], length=length) for length in (104, (1 << 31) + 1)
        ],
        standard="dropped (C9-94; 9.9.3)",
        rxe=OnRxe(delivered=False, error=INVALID_REQUEST),
        udp=OnUdp(counter="bad_length"),
    ),
    Case(
        name="length above the payload's, in a packet of the MTU",
        forge=lambda aims: [aims[1].datagram(length=len(aims[1].payload) + 1)],
        standard="dropped (9.9.3)",
        rxe=OnRxe(delivered=True, size_bytes=4_097),
        patch="0003-",
        patched=OnRxe(delivered=False, error=INVALID_REQUEST),
        udp=OnUdp(counter="bad_length"),
        why="rxe compares only below the MTU, and reports bytes that never came; the flow takes no length but its own",
    ),
    Case(
        name="length 0, with a payload",
        forge=lambda aims: [aims[1].datagram(length=0)],
        standard="dropped (9.9.3)",
        rxe=OnRxe(delivered=False, error=ACCESS, warns=True),
        patch="0003-",
        patched=OnRxe(delivered=False, error=INVALID_REQUEST),
        udp=OnUdp(counter="bad_length"),
    ),
    Case(
        name="length 0, no payload, any key and address",
        forge=lambda aims: [aims[1].datagram(payload=b"", rkey=0, address=0)],
        standard="delivered, key and address unseen (C9-88)",
        rxe=OnRxe(delivered=True, lands=None),
        udp=OnUdp(counter="bad_key"),
        why="the message has 4,096 bytes in this place; messages of 0 bytes pass (`test_udp.cpp`)",
    ),
    Case(
        name="payload above the MTU of 4,096",
        forge=lambda aims: [aims[1].datagram(payload=bytes(4_100))],
        standard="dropped (C9-92)",
        rxe=OnRxe(delivered=False, error=INVALID_REQUEST),
        udp=OnUdp(counter="oversized"),
    ),
    Case(
        name="pad count below the pad",
        forge=lambda aims: [aims[2].datagram(pad_count=2)],
        place=2,
        standard="payload and length differ: dropped (9.9.3)",
        rxe=OnRxe(delivered=False, error=INVALID_REQUEST),
        udp=OnUdp(counter="bad_length"),
    ),
    Case(
        name="no pad where there should be",
        forge=lambda aims: [aims[2].datagram(pad=b"")],
        place=2,
        standard="dropped (9.2.4)",
        rxe=OnRxe(delivered=False, error=INVALID_REQUEST),
        udp=OnUdp(counter="bad_pad"),
    ),
    Case(
        name="pad count above what is there",
        forge=lambda aims: [aims[2].datagram(payload=b"", pad_count=3)],
        place=2,
        standard="dropped (9.2.4)",
        rxe=UNCOUNTED,
        udp=OnUdp(counter="bad_pad"),
    ),
    Case(
        name="pad of ones",
        forge=lambda aims: [aims[2].datagram(pad=b"\xff" * 3)],
        place=2,
        standard="delivered without the pad (9.2.4)",
        rxe=OnRxe(delivered=True, lands=2),
        udp=OnUdp(),
    ),
    Case(
        name="cut short: every length from the base transport header's to the first byte of the payload",
        forge=lambda aims: header_cuts(aims[1], range(BTH_BYTES, HEADER_BYTES + ICRC_BYTES)),
        standard="dropped (9.6.1)",
        rxe=UNCOUNTED,
        udp=OnUdp(counter="truncated"),
    ),
    Case(
        name="cut short by 4 bytes",
        forge=lambda aims: [changed(aims[1].datagram(), cut(-4))],
        standard="ICRC wrong: dropped (A17.3.3)",
        rxe=UNCOUNTED,
        udp=OnUdp(counter="bad_length"),
    ),
    Case(
        name="cut short by 1 byte",
        forge=lambda aims: [changed(aims[1].datagram(), cut(-1))],
        standard="as before",
        rxe=UNCOUNTED,
        udp=OnUdp(counter="bad_pad"),
    ),
    Case(
        name="4 bytes too many",
        forge=lambda aims: [changed(aims[2].datagram(), lambda data: data + bytes(4))],
        place=2,
        standard="as before",
        rxe=UNCOUNTED,
        udp=OnUdp(counter="bad_length"),
    ),
    Case(
        name="ICRC wrong in one bit; most significant byte first; a bit of payload or of the PSN changed on the way",
        forge=lambda aims: [
            changed(aims[1].datagram(), change)
            for change in (flipped(-1), swapped_icrc, flipped(HEADER_BYTES + 7), flipped(11))
        ],
        standard="dropped (A17.3.3)",
        rxe=UNCOUNTED,
        udp=OnUdp(counter="bad_icrc"),
    ),
    Case(
        name="what routers may change: hop limit, traffic class, congestion marks; BTH byte 4",
        forge=lambda aims: [
            replace(
                aims[1].datagram(), hop_limit=3, traffic_class=0x2B, change=lambda data: data[:4] + b"\xff" + data[5:]
            )
        ],
        standard="not under the ICRC: delivered (A17.3.3)",
        rxe=DELIVERED,
        udp=OnUdp(),
    ),
    Case(
        name="transport version 1; 15",
        forge=lambda aims: [aims[1].datagram(version=version) for version in (1, 15)],
        standard="dropped (9.6.1)",
        rxe=UNCOUNTED,
        udp=OnUdp(counter="bad_version"),
    ),
    Case(
        name="partition key of others; invalid ones (0x8000, 0)",
        forge=lambda aims: [aims[1].datagram(partition_key=key) for key in (0x1234, 0x8000, 0)],
        standard="dropped and counted (9.6.1, 10.9)",
        rxe=OnRxe(delivered=False, counted=False, bad_partition=True),
        udp=OnUdp(counter="bad_partition"),
    ),
    Case(
        name="partition key of a limited member (0x7FFF)",
        forge=lambda aims: [aims[1].datagram(partition_key=0x7FFF)],
        standard="delivered to a full member (10.9)",
        rxe=DELIVERED,
        udp=OnUdp(),
    ),
    Case(
        name="opcodes of RC and UD, an acknowledgement, unknown ones",
        forge=lambda aims: [aims[1].datagram(opcode=opcode) for opcode in (0x0B, 0x64, 0x11, 0x3F, 0xFF)],
        standard="dropped (9.6.1)",
        rxe=UNCOUNTED,
        udp=OnUdp(counter="bad_opcode"),
    ),
    Case(
        name="middle and last packet of a message that has no first",
        forge=lambda aims: [aims[1].datagram(opcode=opcode) for opcode in (0x27, 0x29)],
        standard="dropped, the next message is taken (9.8.2)",
        rxe=OnRxe(delivered=False),
        udp=OnUdp(counter="bad_opcode"),
    ),
    Case(
        name="WRITE ONLY without immediate (0x2A)",
        forge=lambda aims: [aims[1].datagram(opcode=0x2A, immediate=None)],
        standard="delivered without a completion",
        rxe=OnRxe(delivered=True, completes=False),
        udp=OnUdp(counter="bad_opcode"),
        why="it names no message, and nobody sends it here",
    ),
    Case(
        name="solicited event and acknowledgement asked for, not migrated",
        forge=lambda aims: [aims[1].datagram(solicited=1, ack_request=1, migrated=0)],
        standard="delivered",
        rxe=DELIVERED,
        udp=OnUdp(),
    ),
    Case(
        name="from another port of the peer, ICRC right",
        forge=lambda aims: [replace(aims[1].datagram(), source=Source.OTHER_PORT)],
        standard="the source port is entropy: delivered (A17)",
        rxe=DELIVERED,
        udp=OnUdp(counter="bad_icrc"),
        why="a socket's end is not shown the port, and computes with the one that rendezvous told",
    ),
    Case(
        name="from another address, ICRC right",
        forge=lambda aims: [replace(aims[1].datagram(), source=Source.OTHER_ADDRESS)],
        standard="not the connected peer: dropped (9.6.1, A17)",
        rxe=UNCOUNTED,
        udp=OnUdp(counter="bad_icrc"),
    ),
)
