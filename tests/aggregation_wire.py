# SPDX-License-Identifier: Apache-2.0
"""Packets of docs/reference/aggregation.md, built field by field, independent of the code under test.

Run by hand, it writes vectors/aggregation.json: `python tests/aggregation_wire.py`.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

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


def _mixed(total: int, word: int) -> int:
    return _turned((total + word * _PRIMES[1]) & _MASK, 31) * _PRIMES[0] & _MASK


def xxh64(stripes: bytes) -> int:
    """XXH64 with the seed 0 of whole stripes, after its specification (github.com/Cyan4973/xxHash)."""
    totals = [(_PRIMES[0] + _PRIMES[1]) & _MASK, _PRIMES[1], 0, -_PRIMES[0] & _MASK]
    for words in struct.iter_unpack("<4Q", stripes):
        totals = [_mixed(total, word) for total, word in zip(totals, words, strict=True)]
    found = sum(_turned(total, bits) for total, bits in zip(totals, (1, 7, 12, 18), strict=True)) & _MASK
    found = reduce(lambda sofar, total: ((sofar ^ _mixed(0, total)) * _PRIMES[0] + _PRIMES[3]) & _MASK, totals, found)
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


# The first job of an aggregator: 1 in the upper 26 bits, its place in the table in the lower ones.
_KEY, _JOB, _MARK = 0x0123456789ABCDEF, 64, 0xDECADE


def _packet(kind: int, block: int, leaf: int, arithmetic: int, stripes: bytes = b"") -> Packet:
    return Packet(
        kind=kind, job=_JOB, key=_KEY, block=block, mark=_MARK, leaf=leaf, arithmetic=arithmetic, stripes=stripes
    )


def _refused(asked: Packet, reason: int) -> Packet:
    return Packet(**{**vars(asked), "kind": REFUSED, "stripes": struct.pack(">H30x", reason)})


def _step(leaf: int, sent: Packet, *answers: tuple[int, Packet]) -> dict[str, Any]:
    """`answers`: (rank that gets it, packet)."""
    return {"rank": leaf, "sent": sent.pack().hex(), "answers": [[rank, one.pack().hex()] for rank, one in answers]}


def _joined(leaf: int) -> Packet:
    return Packet(kind=JOINED, job=_JOB, key=_KEY, leaf=leaf, stripes=struct.pack(">HH28x", 2, 4))


def _sums(block: int, arithmetic: int, leaves: Sequence[bytes], result: bytes) -> list[dict[str, Any]]:
    """Rank 1 sends first."""
    answer = _packet(RESULT, block, 0, arithmetic, result)
    return [
        _step(1, _packet(LEAF, block, 1, arithmetic, leaves[1])),
        _step(0, _packet(LEAF, block, 0, arithmetic, leaves[0]), (0, answer), (1, answer)),
    ]


def conversation() -> list[dict[str, Any]]:
    """Steps of tests/vectors/aggregation.json: what two ranks send to an aggregator, and what it answers."""
    # 2^24 + 1 is a tie, which goes to the even 2^24; the least subnormal twice; -0 + -0; infinity.
    floats = struct.pack("<8f", 16777216.0, 1e-45, -0.0, 1.5, 3.0, -1.0, float("inf"), 3e38)
    others = struct.pack("<8f", 1.0, 1e-45, -0.0, -1.5, 0.1, 1e-8, 1.0, 3e38)
    float_sums = bytes.fromhex("0000804b02000000000000800000000066664640000080bf0000807f0000807f")
    integers, integer_sums = struct.pack("<8i", *[2**31 - 1] * 8), struct.pack("<8i", *[-(2**31)] * 8)
    # 1 + 2^-8 is half-way between 1 and the next bfloat16: to the even one. 3 + 1.5 / 2^7 rounds up.
    bfloats = struct.pack("<2H", 0x3F80, 0x4040) * 8
    small = struct.pack("<2H", 0x3B80, 0x3C40) * 8
    wrong = _packet(LEAF, 3, 1, F32, bytes(32))
    return [
        _step(0, join(_KEY, 0, 2, 7), (0, _joined(0))),
        _step(1, join(_KEY, 1, 2, 4), (1, _joined(1))),
        *_sums(0, F32, [floats, others], float_sums),
        *_sums(1, I32, [integers, struct.pack("<8i", *[1] * 8)], integer_sums),
        *_sums(2, BF16, [bfloats, small], struct.pack("<2H", 0x3F80, 0x4041) * 8),
        _step(
            1,
            _packet(LEAF, 2, 1, BF16, small),
            (1, _packet(RESULT, 2, 1, BF16, struct.pack("<2H", 0x3F80, 0x4041) * 8)),
        ),
        _step(0, _packet(LEAF, 3, 0, I32, bytes(32))),
        _step(0, _packet(LEAF, 3, 0, I32, bytes(32)), (0, _packet(WAITING, 3, 0, I32))),
        _step(1, wrong, (1, _refused(wrong, OTHER_PLAN))),
        _step(1, unknown := Packet(kind=LEAF, job=_JOB, key=1, stripes=bytes(32)), (1, _refused(unknown, UNKNOWN_JOB))),
    ]


if __name__ == "__main__":
    path = Path(__file__).with_name("vectors") / "aggregation.json"
    path.write_text(json.dumps({"steps": conversation()}, indent=1) + "\n")
