# SPDX-License-Identifier: Apache-2.0
"""The header of a message, and the payload of an eager packet (docs/reference/wire.md)."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from .numbers import lap_of

# key, signature, size of the message, flag and lap, bytes that follow
EAGER: Final = struct.Struct("<QQQII")


class Kind(enum.IntEnum):
    DATA = 0
    REQUEST = 1


@dataclass(frozen=True)
class Header:
    """The fields that both ends of a message must agree on. The key pairs the ends."""

    key: int
    signature: int
    size_bytes: int


@dataclass(frozen=True)
class Eager:
    """An eager message, or the request of a bulk message."""

    kind: Kind
    header: Header
    data: bytes

    def pack(self, number: int) -> bytes:
        """The payload of the eager packet with this number."""
        head = self.header
        flags = lap_of(number) << 1 | self.kind
        return EAGER.pack(head.key, head.signature, head.size_bytes, flags, len(self.data)) + self.data

    @classmethod
    def unpack(cls, payload: bytes, number: int) -> Eager | None:
        """None: not the packet with this number. Raises ValueError for payloads that end a flow."""
        if len(payload) < EAGER.size:
            raise ValueError(f"an eager packet of {len(payload)} bytes; at least {EAGER.size}")
        key, signature, size_bytes, flags, following = EAGER.unpack_from(payload)
        if flags >> 1 != lap_of(number):
            return None
        kind, data = Kind(flags & 1), payload[EAGER.size :]
        if len(data) != following or following != (size_bytes if kind is Kind.DATA else 0):
            raise ValueError(f"an eager packet with {len(data)} bytes says {following}, of a message of {size_bytes}")
        return cls(kind, Header(key, signature, size_bytes), data)


def eager_max_bytes(payload_max: int) -> int:
    return payload_max - EAGER.size
