# SPDX-License-Identifier: Apache-2.0
"""The 64-bit signature in every message of a plan. It shows ranks that they run different operations.

docs/reference/plans.md ("Signature") has the bit layout. The core compares signatures on arrival. If they differ, its
error has both in words (`_core.describe_signature`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

# The top bit of the reduce op's byte.
ON_DEVICE: Final = 1 << 47
# The next bit: messages make round trips.
ROUND_TRIPS: Final = 1 << 46
# Of an alltoall or allgather, which have no root: the algorithm, if it is not the direct one.
BRUCK: Final = 1
BY_HOST: Final = 2
RING: Final = 3


class Kind(IntEnum):
    """The collective, as the top byte of a signature."""

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


def signature(kind: Kind, *, type_code: int = 0, op: int = 0, root: int = 0, elements: int = 0) -> int:
    """Packs the fields. Of `root` the low 8 bits are kept, of `elements` the low 32."""
    return kind << 56 | (type_code & 0xFF) << 48 | (op & 0xFF) << 40 | (root & 0xFF) << 32 | (elements & 0xFFFFFFFF)


def on_device(value: int) -> int:
    """Returns the signature of the same call on device memory, where messages are cut in another way.

    A send or receive is not cut, so its signature stays as it is.
    """
    return value if value >> 56 == Kind.P2P else value | ON_DEVICE
