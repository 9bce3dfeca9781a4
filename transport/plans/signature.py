# SPDX-License-Identifier: Apache-2.0
"""The 64-bit signature in every message of a plan. It shows ranks that they run different operations.

docs/reference/plans.md ("Signature") has the bit layout. The core compares signatures on arrival. If they differ, its
error has both in words (`_core.describe_signature`).
"""

from __future__ import annotations

import zlib
from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sennit.transport.plans.coding import Coding


# The top bit of the reduce op's byte.
ON_DEVICE: Final = 1 << 47
# The next bit: messages make round trips.
ROUND_TRIPS: Final = 1 << 46
# What is sent is coded. The low 32 bits then hold the codec and the seed of the post.
CODED: Final = 1 << 44
# Together with CODED this bit says that only what goes between hosts is coded. A plan with a codec is never on device.
BETWEEN_HOSTS: Final = ON_DEVICE
# An alltoall or allgather has no root. Its field holds the algorithm, if it is not the direct one.
BRUCK: Final = 1
BY_HOST: Final = 2
RING: Final = 3


class Kind(IntEnum):
    """The collective, as bits 56 to 59 of a signature."""

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
    """Packs the fields. Of `root` the low 12 bits are kept, of `elements` the low 32."""
    whose = (root >> 8 & 0xF) << 60 | kind << 56 | (root & 0xFF) << 32
    return whose | (type_code & 0xFF) << 48 | (op & 0xFF) << 40 | (elements & 0xFFFFFFFF)


def coded(value: int, coding: Coding | None, *sizes: int) -> int:
    """Returns the signature of the same call with a codec; without one the signature itself.

    `sizes`: of a call in which all ranks give the same. A digest of them is in place of the root.
    """
    if coding is None:
        return value
    digest = 1 + zlib.crc32(repr(sizes).encode()) % 255 << 32 if sizes else value & 0xFF << 32
    codec = coding.kind | coding.stochastic << 3 | (coding.block & 0xFFF) << 4
    return value & ~0xFF_FFFF_FFFF | CODED | coding.between_hosts * BETWEEN_HOSTS | digest | codec


def on_device(value: int) -> int:
    """Returns the signature of the same call on device memory, where messages are cut in another way.

    A send or receive is not cut, so its signature stays as it is.
    """
    return value if value >> 56 & 0xF == Kind.P2P else value | ON_DEVICE
