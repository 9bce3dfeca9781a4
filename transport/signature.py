# SPDX-License-Identifier: Apache-2.0
"""The 64-bit signature that every message of a plan carries, so that ranks which disagree find out.

Bit layout: docs/reference/plans.md ("Signature"). The core compares signatures on arrival and prints both sides in
the words of `describe_signature`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from sennit.transport.elements import Dtype, ReduceOp


class Kind(IntEnum):
    """What a plan does, as the top byte of its signature."""

    ALLREDUCE = 1
    REDUCE = 2
    BROADCAST = 3
    ALLGATHER = 4
    GATHER = 5
    SCATTER = 6
    REDUCE_SCATTER = 7
    ALLTOALL = 8
    P2P = 9
    BARRIER = 10


_ROOTED: Final = frozenset({Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER})
_REDUCING: Final = frozenset({Kind.ALLREDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER})


def signature(kind: Kind, *, type_code: int = 0, op: int = 0, root: int = 0, elements: int = 0) -> int:
    """Packs the fields; `root` keeps its low 8 bits, `elements` its low 32."""
    return kind << 56 | (type_code & 0xFF) << 48 | (op & 0xFF) << 40 | (root & 0xFF) << 32 | (elements & 0xFFFFFFFF)


def _name(values: type[IntEnum], code: int) -> str:
    try:
        return values(code).name.lower()
    except ValueError:
        return f"{code:#04x}"


def describe_signature(value: int) -> str:
    """A signature in words, e.g. `allreduce(f32, sum, elements=1024)`."""
    code = value >> 56 & 0xFF
    if code == Kind.BARRIER:
        return "barrier()"
    parts = [_name(Dtype, value >> 48 & 0xFF)]
    if code in _REDUCING:
        parts.append(_name(ReduceOp, value >> 40 & 0xFF))
    if code in _ROOTED:
        parts.append(f"root={value >> 32 & 0xFF}")
    elements = value & 0xFFFFFFFF
    parts.append(f"elements={elements}" if elements else "elements=any")
    return f"{_name(Kind, code)}({', '.join(parts)})"
