# SPDX-License-Identifier: Apache-2.0
"""The tree of ranks in rendezvous, and the values that hold several ranks' records (`exchanges.py`).

A block is compressed JSON, field by field: most ranks have in a field what their neighbours have. Values are base85
(RFC 1924), because a store holds text.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
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
