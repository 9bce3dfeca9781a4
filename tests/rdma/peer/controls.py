# SPDX-License-Identifier: Apache-2.0
"""The control payload, by the byte table of docs/reference/wire.md."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from .messages import Header
from .numbers import WORD_BITS

VERSION: Final = 4
PROBE_ECHO: Final = 0xFFFF_0000
SACK_WORDS_MAX: Final = 32
DONE_WORDS_MAX: Final = 4
ECHO_DELAY_MAX_US: Final = 0xFF_FFFF
# version, flags, done words, eager words, SACK entries, echoes, adverts, reason bytes, completed_below, credits_seen,
# eager_received, eager_consumed, number of the first advert, granted, queueing, number of the probe
HEADER: Final = struct.Struct("<BBBBHHHHIIIIIIHH")
ECHO: Final = struct.Struct("<IIHHHH")
SACK: Final = struct.Struct("<III")
ADVERT: Final = struct.Struct("<QII")
ADVERT_MESSAGE: Final = struct.Struct("<QQQ")
FIRST_PART: Final = 1 << 31
MORE_KEYS: Final = 7 << 28  # for more devices
MASK_32: Final = 0xFFFF_FFFF


class Flag(enum.IntFlag):
    NONE = 0
    ANSWER = 1
    ADVERT_GAP = 2
    GOODBYE = 4
    ABORT = 8
    PROBE = 16
    SHORT = 32


class BadControl(ValueError):
    """A payload that the specification forbids."""


@dataclass(frozen=True, kw_only=True)
class Echo:
    """What arrived over one path: its newest packet, and the number of packets."""

    path: int
    immediate: int
    delay_us: int
    received: int

    def pack(self) -> bytes:
        held_us = min(max(self.delay_us, 0), ECHO_DELAY_MAX_US)
        return ECHO.pack(self.immediate, held_us | self.path << 24, self.received & 0xFFFF, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Sack:
    """The packets of a credit that have arrived: all below `first_missing`, and those of `bitmap` (bit 0: packet 0)."""

    credit: int
    first_missing: int
    bitmap: int

    def pack(self) -> bytes:
        base = self.first_missing // WORD_BITS
        shown = self.bitmap >> base * WORD_BITS
        words = min(-(-shown.bit_length() // WORD_BITS), SACK_WORDS_MAX)
        shown &= (1 << words * WORD_BITS) - 1
        return SACK.pack(self.credit & MASK_32, self.first_missing, words) + shown.to_bytes(8 * words, "little")


@dataclass(frozen=True, kw_only=True)
class Advert:
    """Memory for one part of a message. The first part has `message`."""

    address: int
    rkey: int
    part_bytes: int
    message: Header | None

    def pack(self) -> bytes:
        if self.message is None:
            return ADVERT.pack(self.address, self.rkey, self.part_bytes)
        message = ADVERT_MESSAGE.pack(self.message.key, self.message.signature, self.message.size_bytes)
        return ADVERT.pack(self.address, self.rkey, self.part_bytes | FIRST_PART) + message


@dataclass(frozen=True, kw_only=True)
class Control:
    """Numbers that are read are as on the wire, 32 bits wide. Numbers to write may be wider."""

    flags: Flag = Flag.NONE
    completed_below: int = 0
    credits_seen: int = 0
    eager_received: int = 0
    eager_consumed: int = 0
    advert_first: int = 0
    granted: int = 0
    probe_number: int = 0
    done: int = 0
    """Bitmap; bit 0 is credit completed_below + 1."""
    eager: int = 0
    """Bitmap; bit 0 is eager packet eager_received + 1."""
    echoes: tuple[Echo, ...] = ()
    sacks: tuple[Sack, ...] = ()
    adverts: tuple[Advert, ...] = ()
    reason: str = ""

    def pack(self, version: int = VERSION) -> bytes:
        done_words, eager_words = (-(-bitmap.bit_length() // WORD_BITS) for bitmap in (self.done, self.eager))
        reason = self.reason.encode()
        numbers = (self.completed_below, self.credits_seen, self.eager_received, self.eager_consumed)
        header = HEADER.pack(
            version,
            self.flags,
            done_words,
            eager_words,
            len(self.sacks),
            len(self.echoes),
            len(self.adverts),
            len(reason),
            *(number & MASK_32 for number in (*numbers, self.advert_first, self.granted)),
            0,
            self.probe_number,
        )
        entries = [*(echo.pack() for echo in self.echoes), *(sack.pack() for sack in self.sacks)]
        entries += [advert.pack() for advert in self.adverts]
        bitmaps = self.done.to_bytes(8 * done_words, "little") + self.eager.to_bytes(8 * eager_words, "little")
        return b"".join([header, bitmaps, *entries, reason])

    @classmethod
    def unpack(cls, data: bytes) -> Control:
        """Raises BadControl, also for a length that does not match the counts."""
        reader = _Reader(data)
        version, flags, done_words, eager_words, sacks, echoes, adverts, reason_bytes, *numbers = reader.take(HEADER)
        if version != VERSION or done_words > DONE_WORDS_MAX:
            raise BadControl(f"version {version}, {done_words} done words")
        control = cls(
            flags=Flag(flags),
            completed_below=numbers[0],
            credits_seen=numbers[1],
            eager_received=numbers[2],
            eager_consumed=numbers[3],
            advert_first=numbers[4],
            granted=numbers[5],
            probe_number=numbers[7],
            done=reader.bitmap(done_words),
            eager=reader.bitmap(eager_words),
            echoes=tuple(reader.echo() for _ in range(echoes)),
            sacks=tuple(reader.sack() for _ in range(sacks)),
            adverts=tuple(reader.advert() for _ in range(adverts)),
            reason=reader.bytes(reason_bytes).decode(),
        )
        if reader.left:
            raise BadControl(f"{reader.left} bytes behind the end")
        return control


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def bytes(self, count: int) -> bytes:
        if count > self.left:
            raise BadControl(f"{self.left} bytes are left, {count} wanted")
        self._at += count
        return self._data[self._at - count : self._at]

    def take(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.bytes(layout.size))

    def bitmap(self, words: int) -> int:
        return int.from_bytes(self.bytes(8 * words), "little")

    def echo(self) -> Echo:
        immediate, path_and_delay, received, _marked, _waited, _zero = self.take(ECHO)
        path, delay_us = path_and_delay >> 24, path_and_delay & ECHO_DELAY_MAX_US
        return Echo(path=path, immediate=immediate, delay_us=delay_us, received=received)

    def sack(self) -> Sack:
        credit, first_missing, words = self.take(SACK)
        if words > SACK_WORDS_MAX:
            raise BadControl(f"{words} SACK words")
        bitmap = self.bitmap(words) << first_missing // WORD_BITS * WORD_BITS
        return Sack(credit=credit, first_missing=first_missing, bitmap=bitmap)

    def advert(self) -> Advert:
        address, rkey, size_bytes = self.take(ADVERT)
        if size_bytes & MORE_KEYS:
            raise BadControl("keys of several devices, where one was offered")
        message = Header(*self.take(ADVERT_MESSAGE)) if size_bytes & FIRST_PART else None
        return Advert(address=address, rkey=rkey, part_bytes=size_bytes & ~FIRST_PART, message=message)
