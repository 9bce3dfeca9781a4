# SPDX-License-Identifier: Apache-2.0
"""Writes records.json: packets built field by field with `struct`, independent of the code under test.

Run by hand: `python tests/vectors/make_records.py`.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path

SCHEMAS = {
    "little": {
        "byte_order": "little",
        "label": "binary",
        "dense": [{"name": "age", "kind": "float32"}, {"name": "price", "kind": "bfloat16"}],
        "ids": [
            {"name": "user", "width_bytes": 4, "signed": False, "length": 1, "is_list": False},
            {"name": "seen", "width_bytes": 8, "signed": True, "length": 5, "is_list": True},
        ],
    },
    "big": {
        "byte_order": "big",
        "label": "float32",
        "dense": [],
        "ids": [
            {"name": "seen", "width_bytes": 2, "signed": True, "length": 300, "is_list": True},
            {"name": "pair", "width_bytes": 1, "signed": False, "length": 2, "is_list": False},
        ],
    },
}
SESSION, BATCH, ROW = 0x01020304, 7, 5


PRIMES = (
    0,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def xxh64(data: bytes) -> int:
    """XXH64 with the seed 0 of at least 32 bytes, after its specification (github.com/Cyan4973/xxHash)."""
    mask = (1 << 64) - 1

    def turned(number: int, bits: int) -> int:
        return (number << bits | number >> 64 - bits) & mask

    def step(total: int, lane: int) -> int:
        return turned((total + lane * PRIMES[2]) & mask, 31) * PRIMES[1] & mask

    totals = [(PRIMES[1] + PRIMES[2]) & mask, PRIMES[2], 0, -PRIMES[1] & mask]
    whole = len(data) // 32 * 32
    for at in range(0, whole, 32):
        totals = [step(total, lane) for total, lane in zip(totals, struct.unpack_from("<4Q", data, at), strict=True)]
    found = sum(turned(total, bits) for total, bits in zip(totals, (1, 7, 12, 18), strict=True)) & mask
    for total in totals:
        found = ((found ^ step(0, total)) * PRIMES[1] + PRIMES[4]) & mask
    found = (found + len(data)) & mask
    rest = data[whole:]
    while len(rest) >= 8:
        found = (turned(found ^ step(0, int.from_bytes(rest[:8], "little")), 27) * PRIMES[1] + PRIMES[4]) & mask
        rest = rest[8:]
    if len(rest) >= 4:
        half = int.from_bytes(rest[:4], "little") * PRIMES[1] & mask
        found = (turned(found ^ half, 23) * PRIMES[2] + PRIMES[3]) & mask
        rest = rest[4:]
    for byte in rest:
        found = turned(found ^ (byte * PRIMES[5] & mask), 11) * PRIMES[1] & mask
    found = (found ^ found >> 33) * PRIMES[2] & mask
    found = (found ^ found >> 29) * PRIMES[3] & mask
    return found ^ found >> 32


def packet(schema: Mapping[str, object], records: list[bytes]) -> str:
    canonical = json.dumps(schema, sort_keys=True, separators=(",", ":")).encode()
    body = b"".join(records)
    header = struct.pack(">HBB", 0x5E17, 2, 0) + hashlib.sha256(canonical).digest()[:4]
    header += struct.pack(">IIIHH", SESSION, BATCH, ROW, len(records), len(body))
    return (header + struct.pack(">Q", xxh64(header + bytes(8) + body)) + body).hex()


little = [
    # label, age 1.5, price 2.0 as the upper half of its float32, user, length of seen, seen
    struct.pack("<BfHIB", 1, 1.5, 0x4000, 4_000_000_000, 2) + struct.pack("<qq", -1, 1 << 40),
    struct.pack("<BfHIB", 0, -0.0, 0xFF80, 0, 0),
]
# label, length of seen (two bytes, as it may be above 255), pair, seen
big = [struct.pack(">fHBBhhh", 0.25, 3, 9, 255, -1, 0, 32767)]
vectors = [
    {
        "schema": SCHEMAS["little"],
        "packet": packet(SCHEMAS["little"], little),
        "labels": [1.0, 0.0],
        "dense": {"age": [1.5, "-0.0"], "price": [2.0, "-inf"]},
        "ids": {"user": [[4_000_000_000], [0]], "seen": [[-1, 1 << 40], []]},
    },
    {
        "schema": SCHEMAS["big"],
        "packet": packet(SCHEMAS["big"], big),
        "labels": [0.25],
        "dense": {},
        "ids": {"seen": [[-1, 0, 32767]], "pair": [[9, 255]]},
    },
]
document = {"session": SESSION, "batch": BATCH, "row": ROW, "vectors": vectors}
Path(__file__).with_name("records.json").write_text(json.dumps(document, indent=1) + "\n")
