# SPDX-License-Identifier: Apache-2.0
"""The tree of ranks in rendezvous, and the values that hold several ranks' records (`exchanges.py`).

A block is compressed JSON, field by field: most ranks have in a field what their neighbours have. Values are base85
(RFC 1924), because a store holds text.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, TypeAlias

Record: TypeAlias = dict[str, Any]

# How many values of other ranks a rank reads for each level of the tree. 32: two levels for 1,024 ranks.
FAN_IN: Final = 32
# A block of 65,536 ranks has at most this many bytes. More is no block of ours.
BLOCK_MAX_BYTES: Final = 1 << 28


def children_of(rank: int, world: int) -> list[int]:
    """Returns the ranks whose blocks this rank puts behind its own record, in order."""
    children: list[int] = []
    span = 1
    while span < world and rank % (span * FAN_IN) == 0:
        children += range(rank + span, min(rank + span * FAN_IN, world), span)
        span *= FAN_IN
    return children


def subtree(rank: int, world: int) -> range:
    """Returns the ranks of a rank's block: itself, its children, and theirs."""
    span = 1
    while span < world and rank % (span * FAN_IN) == 0:
        span *= FAN_IN
    return range(rank, min(rank + span, world))


def pack(records: Sequence[Record]) -> str:
    """Writes a block of at least one record. All have the fields of the first."""
    columns = {name: [record[name] for record in records] for name in records[0]}
    return base64.b85encode(zlib.compress(json.dumps(columns, separators=(",", ":")).encode(), 9)).decode()


def unpack(data: bytes) -> list[Record]:
    """Reads a block. Raises ValueError if it is none."""
    try:
        inflate = zlib.decompressobj()
        columns = json.loads(inflate.decompress(base64.b85decode(data), BLOCK_MAX_BYTES))
        if not inflate.eof:
            raise ValueError("cut short")
        return [dict(zip(columns, fields, strict=True)) for fields in zip(*columns.values(), strict=True)]
    except (zlib.error, AttributeError, TypeError) as error:
        raise ValueError(str(error)) from error


def pack_parcels(parcels: Sequence[bytes]) -> str:
    """Writes byte strings of at most 65,535 bytes, behind the size that all have, or else behind all sizes."""
    sizes = [len(parcel) for parcel in parcels]
    is_one_size = len(set(sizes)) == 1
    head = struct.pack(f"<B{1 if is_one_size else len(sizes)}H", is_one_size, *(sizes[:1] if is_one_size else sizes))
    return base64.b85encode(head + b"".join(parcels)).decode()


def unpack_parcels(data: bytes, count: int) -> list[bytes]:
    """Reads `count` byte strings. Raises ValueError if they are not as many, or cut short."""
    raw = base64.b85decode(data)
    is_one_size = raw[:1] == b"\x01"
    head = struct.Struct(f"<B{1 if is_one_size else count}H")
    if len(raw) < head.size:
        raise ValueError("the sizes are cut short")
    _, *sizes = head.unpack_from(raw)
    if is_one_size:
        sizes *= count
    if len(raw) != head.size + sum(sizes):
        raise ValueError(f"{len(raw) - head.size} bytes of parcels of {sum(sizes)} bytes")
    return [raw[first:end] for first, end in pairwise(accumulate(sizes, initial=head.size))]
