# SPDX-License-Identifier: Apache-2.0
"""Reads the counters of this machine's ranks, while they run and after a kill (docs/reference/counters.md).

Each process group keeps its counters in a file of /dev/shm that the native core writes (telemetry/counter_page.hpp).
Reading it costs the rank nothing.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sennit.errors import FormatError

FOLDER: Final = Path("/dev/shm")
PATTERN: Final = "sennit.counters-*"
MAGIC: Final = 0x31_52_54_43_4E_4E_45_53
"""The revision of the layout."""

# magic, used bytes, rank, world, process, begin (ns of CLOCK_BOOTTIME), reserved
HEADER: Final = struct.Struct("=QQIIQQ24x")
USED_BYTES_OFFSET: Final = 8
# bytes with this header, kind, id of the names, peer, path
RECORD: Final = struct.Struct("=IHHII")
NAMES, COUNTERS = 1, 2
NONE: Final = 0xFFFFFFFF


class PageError(FormatError):
    """The file is not a page of counters, or its version is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The counters of one kind, peer and path."""

    group: str
    """The subject: engine, shm, udp_send, udp_receive, verbs, flow or path."""
    peer: int | None
    path: int | None
    values: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """The counters of one rank at one moment."""

    file: Path
    rank: int
    world: int
    process: int
    """The process id in the rank's own PID namespace."""
    began_ns: int
    """When counting began, on CLOCK_BOOTTIME."""
    is_alive: bool
    """Whether the rank's process still holds the file."""
    blocks: tuple[Block, ...]

    @property
    def number(self) -> str:
        """Tells the process groups of one process apart. Hexadecimal."""
        return self.file.name.rpartition("-")[2]

    def total(self, group: str, name: str) -> int:
        """Returns the sum over all blocks of a group."""
        return sum(block.values.get(name, 0) for block in self.blocks if block.group == group)


def pages(folder: Path = FOLDER) -> Iterator[Page]:
    """Reads all ranks of this machine whose counters this user may read. Skips files that vanish meanwhile."""
    for file in sorted(folder.glob(PATTERN)):
        try:
            yield read(file)
        except (OSError, PageError):
            continue


def read(file: Path) -> Page:
    """Reads one rank's counters.

    Raises OSError if the file cannot be read, and `PageError` if it is not a complete page.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        is_alive = _is_locked(descriptor)
        header = os.pread(descriptor, HEADER.size, 0)
        if len(header) < HEADER.size:
            raise PageError(f"{file} has {len(header)} bytes; a page of counters has {HEADER.size} or more")
        magic, used_bytes, rank, world, process, began_ns = HEADER.unpack(header)
        if magic != MAGIC:
            raise PageError(f"{file} is not a page of counters of this version of sennit")
        body = os.pread(descriptor, max(used_bytes - HEADER.size, 0), HEADER.size)
    finally:
        os.close(descriptor)
    return Page(
        file=file, rank=rank, world=world, process=process, began_ns=began_ns, is_alive=is_alive,
        blocks=tuple(_blocks(file, body)),
    )  # fmt: skip


def _blocks(file: Path, body: bytes) -> Iterator[Block]:
    names: dict[int, tuple[str, list[str]]] = {}
    offset = 0
    try:
        while offset < len(body):
            size, kind, identity, peer, path = RECORD.unpack_from(body, offset)
            if size < RECORD.size or offset + size > len(body):
                raise PageError(f"{file} is damaged at {offset}: a record of {size} bytes")
            payload = body[offset + RECORD.size : offset + size]
            if kind == NAMES:
                group, *words = payload.rstrip(b"\0").decode().split("\0")
                names[identity] = (group, words)
            elif kind == COUNTERS:
                group, words = names[identity]
                values = struct.unpack_from(f"={len(words)}Q", payload)
                yield Block(
                    group=group,
                    peer=None if peer == NONE else peer,
                    path=None if path == NONE else path,
                    values=dict(zip(words, values, strict=True)),
                )
            offset += size
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise PageError(f"{file} is damaged at {offset}: {error}") from None


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
