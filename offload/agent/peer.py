# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end of a Unix socket. The kernel says it; a peer cannot say anything else (unix(7))."""

from __future__ import annotations

import errno
import os
import socket
import struct
from dataclasses import dataclass
from typing import Final, Self

from sennit.closing import Closing

# struct ucred: process, user, group.
_CREDENTIALS: Final = struct.Struct("=3i")
# asm-generic/socket.h. Linux 4.13, and 6.5.
_SO_PEERGROUPS: Final = 59
_SO_PEERPIDFD: Final = 77
# The most that Python's getsockopt can take.
_GROUPS_MAX: Final = 256


@dataclass(kw_only=True)
class Peer(Closing):
    """The process that connected."""

    process: int
    user: int
    groups: frozenset[int]
    """Its groups when it connected, supplementary ones included. Of a user in more than 256, the primary one alone."""

    end: int
    """A descriptor that becomes readable when the process ends, whoever else has its end of the socket."""

    @classmethod
    def of(cls, connection: socket.socket) -> Self:
        """Raises OSError if it has gone already."""
        told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, user, group = _CREDENTIALS.unpack(told)
        try:
            packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _GROUPS_MAX)
        except OSError as error:
            if error.errno != errno.ERANGE:
                raise
            packed = b""
        groups = frozenset(struct.unpack(f"={len(packed) // 4}I", packed)) | {group & 0xFFFFFFFF}
        end = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        return cls(process=process, user=user & 0xFFFFFFFF, groups=groups, end=end)

    def close(self) -> None:
        end, self.end = self.end, -1
        if end >= 0:
            os.close(end)
