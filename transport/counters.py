# SPDX-License-Identifier: Apache-2.0
"""Reads the counters of this machine's ranks, while they run and after a kill (docs/reference/counters.md).

Each process group keeps its counters in a file of /dev/shm that the native core writes (telemetry/counter_page.hpp).
Reading it costs the rank nothing.

Any user may put files there, so nothing in a file is trusted: not its kind, its size, or a number or name in it.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
from collections import defaultdict
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

# No page of sennit is larger: 1,024 peers with 16 paths take 3 MiB.
PAGE_MAX_BYTES: Final = 1 << 26
NAMES_MAX: Final = 1024
# The most that root reads of each other user in one round.
FOREIGN_MAX_PAGES: Final = 1024
FOREIGN_MAX_BYTES: Final = 1 << 24
_FILE_NAME: Final = re.compile(r"sennit\.counters-[0-9a-f]{16}")
_WORD: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")


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
    """0: the process is no rank of a group, as an aggregator."""
    process: int
    """The process id in the rank's own PID namespace."""
    began_ns: int
    """When counting began, on CLOCK_BOOTTIME."""
    is_alive: bool
    """Whether the rank's process still holds the file."""
    owner: int
    """The user that owns the file. What is in the file is that user's word."""
    blocks: tuple[Block, ...]

    @property
    def number(self) -> str:
        """Tells the process groups of one process apart. Hexadecimal."""
        return self.file.name.rpartition("-")[2]

    def total(self, group: str, name: str) -> int:
        """Returns the sum over all blocks of a group."""
        return sum(block.values.get(name, 0) for block in self.blocks if block.group == group)


def pages(folder: Path = FOLDER) -> Iterator[Page]:
    """Reads the counters of this user's ranks on this machine; for root, those of all users.

    Skips files that vanish meanwhile, that are no pages, or that belong to another user: of those root reads
    `FOREIGN_MAX_PAGES` and `FOREIGN_MAX_BYTES` for each user.
    """
    reader = os.geteuid()
    foreign: defaultdict[int, list[int]] = defaultdict(lambda: [FOREIGN_MAX_PAGES, FOREIGN_MAX_BYTES])
    try:
        names = sorted(name for name in os.listdir(folder) if _FILE_NAME.fullmatch(name))
    except OSError:
        return
    for name in names:
        try:
            descriptor, found = _open(folder / name)
        except (OSError, PageError):
            continue
        try:
            if found.st_uid != reader:
                left = foreign[found.st_uid]
                left[0] -= 1
                left[1] -= found.st_size
                if reader != 0 or min(left) < 0:
                    continue
            page = _read(folder / name, descriptor, found)
        except (OSError, PageError):
            continue
        finally:
            os.close(descriptor)
        yield page


def read(file: Path) -> Page:
    """Reads one rank's counters.

    Raises OSError if the file cannot be read, and `PageError` if it is not a complete page.
    """
    descriptor, found = _open(file)
    try:
        return _read(file, descriptor, found)
    finally:
        os.close(descriptor)


def _open(file: Path) -> tuple[int, os.stat_result]:
    # O_NONBLOCK: a FIFO would block until somebody writes into it.
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise PageError(f"{file} is no ordinary file")
    return descriptor, found


def _read(file: Path, descriptor: int, found: os.stat_result) -> Page:
    is_alive = _is_locked(descriptor)
    header = os.pread(descriptor, HEADER.size, 0)
    if len(header) < HEADER.size:
        raise PageError(f"{file} has {len(header)} bytes; a page of counters has {HEADER.size} or more")
    magic, used_bytes, rank, world, process, began_ns = HEADER.unpack(header)
    if magic != MAGIC:
        raise PageError(f"{file} is not a page of counters of this version of sennit")
    # The file may have grown since it was opened.
    most_bytes = min(os.fstat(descriptor).st_size, PAGE_MAX_BYTES)
    if not HEADER.size <= used_bytes <= most_bytes:
        raise PageError(f"{file} says that it has {used_bytes} bytes; allowed: {HEADER.size}..{most_bytes}")
    body = os.pread(descriptor, used_bytes - HEADER.size, HEADER.size)
    return Page(
        file=file, rank=rank, world=world, process=process, began_ns=began_ns, is_alive=is_alive,
        owner=found.st_uid, blocks=tuple(_blocks(file, body)),
    )  # fmt: skip


def _blocks(file: Path, body: bytes) -> Iterator[Block]:
    names: dict[int, tuple[str, list[str]]] = {}
    offset = 0
    try:
        while offset < len(body):
            size, kind, identity, peer, path = RECORD.unpack_from(body, offset)
            if size < RECORD.size or offset + size > len(body):
                raise ValueError(f"a record of {size} bytes")
            payload = body[offset + RECORD.size : offset + size]
            if kind == NAMES:
                names[identity] = _names(payload)
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
    except (struct.error, KeyError, ValueError) as error:
        raise PageError(f"{file} is damaged at {offset}: {error}") from None


def _names(payload: bytes) -> tuple[str, list[str]]:
    """The group and the names of its counters, which become names and labels of what is exported."""
    group, *words = payload.rstrip(b"\0").decode("ascii").split("\0")
    if not 1 <= len(words) <= NAMES_MAX or len(set(words)) != len(words):
        raise ValueError(f"{len(words)} names, or one of them twice; allowed: 1..{NAMES_MAX}, each once")
    for word in (group, *words):
        if not _WORD.fullmatch(word):
            raise ValueError(f"the name {word!r}; allowed: {_WORD.pattern}")
    return group, words


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
