# SPDX-License-Identifier: Apache-2.0
"""Numbers that are 64 bits wide inside and shorter on the wire (docs/reference/wire.md, "Flow", "Immediate")."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

INDEX_BITS: Final = 20
INDEX_MASK: Final = (1 << INDEX_BITS) - 1
EAGER_SLOT: Final = 0
CREDIT_SLOTS: Final = 4_095
CREDITS_OPEN_MAX: Final = 256
CREDIT_MAX_PACKETS: Final = 16_384
WORD_BITS: Final = 64


def nearest(short: int, bits: int, known: int) -> int:
    """Returns the number with these low bits that is nearest to `known` (RFC 1982)."""
    ahead = (short - known) % (1 << bits)
    return known + ahead - (1 << bits if ahead >= 1 << (bits - 1) else 0)


def immediate_of(slot: int, index: int) -> int:
    return slot << INDEX_BITS | index & INDEX_MASK


def split_immediate(immediate: int) -> tuple[int, int]:
    """Returns slot and index."""
    return immediate >> INDEX_BITS, immediate & INDEX_MASK


def lap_of(number: int) -> int:
    """Returns the bits of an eager packet's number that its immediate lacks, as far as its payload has them."""
    return number >> INDEX_BITS & (1 << 31) - 1


def slot_of_credit(credit: int) -> int:
    return credit % CREDIT_SLOTS + 1


def credit_of_slot(slot: int, completed_below: int) -> int:
    """Returns the credit of a slot.

    Open credits are the 256 from `completed_below` on. A slot more than half a cycle ahead is an earlier credit.
    """
    ahead = (slot - 1 - completed_below) % CREDIT_SLOTS
    return completed_below + ahead - (CREDIT_SLOTS if ahead > CREDIT_SLOTS // 2 else 0)


def packet_count(size_bytes: int, payload_max: int) -> int:
    """Returns the number of packets of a message. An empty message has one packet."""
    return max(1, -(-size_bytes // payload_max))


def bits_of(bitmap: int) -> Iterator[int]:
    """Yields the numbers of the set bits, in ascending order."""
    while bitmap:
        lowest = bitmap & -bitmap
        yield lowest.bit_length() - 1
        bitmap ^= lowest


def first_zero(bitmap: int) -> int:
    return (~bitmap & (bitmap + 1)).bit_length() - 1
