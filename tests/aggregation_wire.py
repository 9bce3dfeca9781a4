# SPDX-License-Identifier: Apache-2.0
"""Packets of docs/reference/aggregation.md, built field by field, independent of the code under test."""

import struct
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

MAGIC, VERSION, STRIPE_BYTES = 0x5E18, 1, 32
LEAF, RESULT, WAITING, JOIN, JOINED, REFUSED, LEAVE = range(7)
F32, I32, BF16 = range(3)
UNKNOWN_JOB, NO_ROOM, OTHER_PLAN, OTHER_JOB = range(1, 5)
_HEADER = struct.Struct(">HBBIQQIHBB")
_PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63)
_MASK = (1 << 64) - 1


def _turned(number: int, bits: int) -> int:
    return (number << bits | number >> 64 - bits) & _MASK


def _step(total: int, word: int) -> int:
    return _turned((total + word * _PRIMES[1]) & _MASK, 31) * _PRIMES[0] & _MASK


def xxh64(stripes: bytes) -> int:
    """XXH64 with the seed 0 of whole stripes, after its specification (github.com/Cyan4973/xxHash)."""
    totals = [(_PRIMES[0] + _PRIMES[1]) & _MASK, _PRIMES[1], 0, -_PRIMES[0] & _MASK]
    for words in struct.iter_unpack("<4Q", stripes):
        totals = [_step(total, word) for total, word in zip(totals, words, strict=True)]
    found = sum(_turned(total, bits) for total, bits in zip(totals, (1, 7, 12, 18), strict=True)) & _MASK
    found = reduce(lambda sofar, total: ((sofar ^ _step(0, total)) * _PRIMES[0] + _PRIMES[3]) & _MASK, totals, found)
    found = (found + len(stripes)) & _MASK
    found = (found ^ found >> 33) * _PRIMES[1] & _MASK
    found = (found ^ found >> 29) * _PRIMES[2] & _MASK
    return found ^ found >> 32


@dataclass(frozen=True, kw_only=True)
class Packet:
    kind: int
    job: int = 0
    key: int = 0
    block: int = 0
    mark: int = 0
    leaf: int = 0
    arithmetic: int = F32
    stripes: bytes = b""

    def pack(self) -> bytes:
        head = _HEADER.pack(
            *(MAGIC, VERSION, self.kind, self.job, self.key, self.block, self.mark, self.leaf, self.arithmetic),
            len(self.stripes) // STRIPE_BYTES,
        )
        return head + struct.pack(">Q", xxh64(head + self.stripes)) + self.stripes


def unpack(content: bytes) -> Packet:
    magic, version, kind, job, key, block, mark, leaf, arithmetic, count = _HEADER.unpack_from(content)
    stripes = content[40:]
    assert (magic, version, len(stripes)) == (MAGIC, VERSION, count * STRIPE_BYTES)
    assert struct.unpack_from(">Q", content, 32) == (xxh64(content[:32] + stripes),)
    return Packet(
        kind=kind, job=job, key=key, block=block, mark=mark, leaf=leaf, arithmetic=arithmetic, stripes=stripes
    )


def join(key: int, leaf: int, leaves: int, window: int) -> Packet:
    return Packet(kind=JOIN, key=key, leaf=leaf, stripes=struct.pack(">HH28x", leaves, window))


def tree_sum(leaves: list[NDArray[np.generic]]) -> NDArray[np.generic]:
    """Over the canonical tree (docs/reference/plans.md): neighbours, then neighbours of these."""
    with np.errstate(all="ignore"):
        while len(leaves) > 1:
            pairs = [leaves[at : at + 2] for at in range(0, len(leaves), 2)]
            leaves = [reduce(np.add, pair) for pair in pairs]
    return leaves[0]
