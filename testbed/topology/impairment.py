# SPDX-License-Identifier: Apache-2.0
"""Impairments of a host's packets on a plane, their counters, and the dice that decide. The C side is fabric.bpf.c."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import Final

# As in fabric.bpf.c: the slots in a ring of held packets. The usable depth is one less.
HELD_MAX: Final = 128
REORDER_DEPTH_MAX: Final = HELD_MAX - 1
_ALWAYS: Final = 1 << 32
_U64: Final = (1 << 64) - 1
_FRACTIONS: Final = ("loss", "ecn", "duplicate", "corrupt", "reorder")


class Draw(IntEnum):
    """Which of a packet's random draws decides what (enum draw)."""

    DROP = 0
    DUPLICATE = 1
    MARK = 2
    CORRUPT = 3
    WHERE = 4
    HOLD = 5


DRAWS: Final = 8


@dataclass(frozen=True, kw_only=True)
class Impairment:
    """What happens to UDP and TCP packets that one host sends on one plane. Everything else passes.

    Fractions count what the switch sees: packets on planes made with `per_packet`, otherwise super-packets (GSO) of up
    to 64 KiB, whose packets all share one fate.
    """

    loss_fraction: float = 0
    """Dropped."""

    ecn_fraction: float = 0
    """Marked Congestion Experienced (RFC 3168) if the sender declared ECN support."""

    duplicate_fraction: float = 0
    """Delivered twice, the clean copy first."""

    corrupt_fraction: float = 0
    """One byte of the UDP payload is changed, and no checksum below the application finds it. TCP has such a checksum,
    so its packets are dropped instead.
    """

    corrupt_skip_bytes: int = 0
    """This many bytes at the start of the payload are never changed. A payload that is not longer is left alone."""

    reorder_fraction: float = 0
    """Held back until `reorder_depth` later packets have passed. At the end of traffic, up to that many stay behind.

    Super-packets are not held, nor frames below 80 bytes. A held packet is neither marked nor corrupted.
    """

    reorder_depth: int = 0
    """1 to 127 if reorder_fraction is not 0."""

    seed: int = 0
    """The same seed hits the same packets, counted from the call of `Planes.impair`. Each host and plane derives its
    own dice from it.
    """

    def __post_init__(self) -> None:
        for kind in _FRACTIONS:
            fraction = getattr(self, f"{kind}_fraction")
            if not 0 <= fraction <= 1:
                raise ValueError(f"{kind}_fraction {fraction}; allowed: 0..1")
        lowest = 1 if self.reorder_fraction else 0
        if not lowest <= self.reorder_depth <= REORDER_DEPTH_MAX:
            raise ValueError(f"reorder_depth {self.reorder_depth}; allowed: {lowest}..{REORDER_DEPTH_MAX}")
        if not 0 <= self.corrupt_skip_bytes <= 0xFFFF:
            raise ValueError(f"corrupt_skip_bytes {self.corrupt_skip_bytes}; allowed: 0..65535")
        if not 0 <= self.seed <= _U64:
            raise ValueError(f"seed {self.seed}; allowed: 0..2^64-1")

    def below(self, draw: Draw) -> int:
        """A packet is hit if the upper half of its draw is below this."""
        fraction = {
            Draw.DROP: self.loss_fraction,
            Draw.DUPLICATE: self.duplicate_fraction,
            Draw.MARK: self.ecn_fraction,
            Draw.CORRUPT: self.corrupt_fraction,
            Draw.HOLD: self.reorder_fraction,
        }[draw]
        return round(fraction * _ALWAYS)


def mix(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _U64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _U64
    return value ^ value >> 31


def port_seed(seed: int, host: int, plane: int) -> int:
    """The seed of one host's dice on one plane."""
    return mix((seed + mix(plane << 32 | host + 1)) & _U64)


def dice(impairment: Impairment, host: int, plane: int, draw: Draw) -> Iterator[bool]:
    """Predicts, packet by packet, whether fabric.bpf.c hits it."""
    seed, below = port_seed(impairment.seed, host, plane), impairment.below(draw)
    number = draw + 1
    while True:
        yield mix((seed + number * 0x9E3779B97F4A7C15) & _U64) >> 32 < below
        number += DRAWS


@dataclass(frozen=True, kw_only=True)
class PortConfig:
    """`struct port_config`: the program's settings for one port."""

    seed: int = 0
    drop_below: int = 0
    duplicate_below: int = 0
    mark_below: int = 0
    corrupt_below: int = 0
    hold_below: int = 0
    hold_depth: int = 0
    hold_ring: int = 0
    corrupt_skip_bytes: int = 0
    relay_ifindex: int = 0
    flags: int = 0

    def pack(self) -> bytes:
        return struct.pack("=6Q6I", *astuple(self), 0)


@dataclass(frozen=True, kw_only=True)
class ImpairmentCounters:
    """What happened to the packets that one host sent on one plane, since the planes were made.

    Counted in packets as a receiver counts them: a super-packet counts as its segments.
    """

    packets: int
    """UDP and TCP packets that reached the switch."""

    bytes: int
    """Their bytes with all headers."""

    dropped: int
    duplicated: int

    marked: int
    """Only packets that could be marked: the sender declared ECN support."""

    corrupted: int

    held: int
    released: int
    """Held packets released later. The rest is still held, or was lost when the impairment changed meanwhile."""

    unheld: int
    """Packets chosen to be held, but too large or too small, or the ring was full."""

    blackholed: int
    """UDP and TCP packets that arrived while the plane was a black hole."""

    other: int
    """Neither UDP nor TCP, so not impaired."""

    strangers: int
    """Sent to an unknown address or to all: dropped."""

    failed: int
    """Lost because the kernel was out of memory. Any value but 0 makes the other figures inexact."""

    def __sub__(self, before: ImpairmentCounters) -> ImpairmentCounters:
        """The difference since `before`."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        return ImpairmentCounters(**dict(zip((f.name for f in fields(self)), (a - b for a, b in pairs), strict=True)))


def unpack_counters(data: bytes) -> ImpairmentCounters:
    """Reads `struct port_counters`."""
    names = [field.name for field in fields(ImpairmentCounters)]
    return ImpairmentCounters(**dict(zip(names, struct.unpack(f"={len(names)}Q", data), strict=True)))
