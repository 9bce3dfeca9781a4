# SPDX-License-Identifier: Apache-2.0
"""Reads the counters of this machine's ranks, while they run and after a kill (docs/reference/counters.md).

Each process group keeps its counters in a file of /dev/shm that the native core writes (telemetry/counter_page.hpp).
Reading it costs the rank nothing.

Any user may put files there, so nothing in a file is trusted: not its kind, its size, or a number or name in it. Root
reads the pages of other users, and no more of them than a look can take: what it leaves out is counted.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sennit.errors import FormatError
from sennit.transport.accounts import Accounts

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
# The most that root reads of all other users together in one look. Eight ranks with 255 peers and 4 paths each have
# 96,000 values. A name counts as a value.
FOREIGN_MAX_PAGES: Final = 1024
FOREIGN_MAX_BYTES: Final = 1 << 23
FOREIGN_MAX_VALUES: Final = 100_000
_FILE_NAME: Final = re.compile(r"sennit\.counters-[0-9a-f]{16}")
WORD_MAX_CHARS: Final = 64
_WORD: Final = re.compile(rf"[a-z][a-z0-9_]{{0,{WORD_MAX_CHARS - 1}}}")
# With them a counter's name would be that of another family's sample (OpenMetrics 1.0, "Suffixes").
_RESERVED: Final = ("_total", "_created", "_bucket", "_count", "_sum", "_gcount", "_gsum", "_info")


class PageError(FormatError):
    """The file is not a page of counters, or its version is unknown."""


class _Spent(PageError):
    """Nothing more may be read."""


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
    account: int
    """The user who answers for the owner (`accounts.Accounts`), mostly the owner itself."""
    blocks: tuple[Block, ...]

    @property
    def number(self) -> str:
        """Tells the process groups of one process apart. Hexadecimal."""
        return self.file.name.rpartition("-")[2]

    def total(self, group: str, name: str) -> int:
        """Returns the sum over all blocks of a group."""
        return sum(block.values.get(name, 0) for block in self.blocks if block.group == group)


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """The pages of this machine at one moment."""

    pages: list[Page]
    """The reader's own first."""
    left_out: dict[int, int]
    """Account -> files that were not read, because the pages of other users would be more than `FOREIGN_MAX_PAGES`,
    `FOREIGN_MAX_BYTES` or `FOREIGN_MAX_VALUES`."""


def pages(folder: Path = FOLDER) -> Iterator[Page]:
    """Reads the counters of this user's ranks on this machine; for root, those of all users (`look`)."""
    return iter(look(folder).pages)


def look(folder: Path = FOLDER) -> Look:
    """Reads the counters of this user's ranks on this machine; for root, those of all users.

    Passes over files that vanish meanwhile, and those that are no pages. Of other users' pages, which root alone
    reads, as much is read as all of them together may have. Each account has an equal share of it, and what one does
    not need is for the others: the account with the smallest files comes first, and of its files the smallest.
    """
    reader = os.geteuid()
    own, foreign = _listed(folder, reader)
    seen = Look(pages=[], left_out={})
    without_limit = _Allowance(pages=len(own), size_bytes=len(own) * PAGE_MAX_BYTES, values=1 << 62)
    for name in sorted(own):
        _append(seen, folder / name, reader, reader, without_limit)
    left = _Allowance(pages=FOREIGN_MAX_PAGES, size_bytes=FOREIGN_MAX_BYTES, values=FOREIGN_MAX_VALUES)
    waiting = sorted(foreign.items(), key=lambda item: (item[1].size_bytes, item[0]))
    for number, (account, files) in enumerate(waiting):
        # Of more accounts than pages the last get nothing, and take nothing from the others' shares.
        share = left.take(max(1, min(len(waiting) - number, left.pages)))
        unread = files.unlisted + sum(
            not _append(seen, folder / name, owner, account, share) for _, name, owner in sorted(files.found)
        )
        if unread:
            seen.left_out[account] = unread
        left.give(share)
    return seen


def shares(wanted: Mapping[int, int], most: int) -> dict[int, int]:
    """Splits `most` among accounts that want so many each: equally, and what one does not need is for the others."""
    given = {}
    for number, (account, one) in enumerate(sorted(wanted.items(), key=lambda item: (item[1], item[0]))):
        given[account] = min(one, most // (len(wanted) - number))
        most -= given[account]
    return given


def read(file: Path) -> Page:
    """Reads one rank's counters.

    Raises OSError if the file cannot be read, and `PageError` if it is not a complete page.
    """
    descriptor, found = _open(file)
    try:
        account = found.st_uid if found.st_uid == os.geteuid() else Accounts().of(found.st_uid)
        return _read(file, descriptor, found, account, _Allowance(pages=1, size_bytes=PAGE_MAX_BYTES, values=1 << 62))
    finally:
        os.close(descriptor)


def check_names(group: str, words: Sequence[str]) -> None:
    """Raises ValueError for names that no page may have: they become names and labels of what is exported."""
    if not 1 <= len(words) <= NAMES_MAX or len(set(words)) != len(words):
        raise ValueError(f"{len(words)} names, or one of them twice; allowed: 1..{NAMES_MAX}, each once")
    for word in (group, *words):
        if not _WORD.fullmatch(word):
            raise ValueError(f"the name {word!r}; allowed: {_WORD.pattern}")
    for word in words:
        if word.endswith(_RESERVED):
            raise ValueError(f"the name {word!r}; allowed: names without {', '.join(_RESERVED)} at their end")


@dataclass(kw_only=True, slots=True)
class _Allowance:
    """How much may still be read."""

    pages: int
    size_bytes: int
    values: int

    def take(self, parts: int) -> _Allowance:
        """Takes one of so many equal parts."""
        part = _Allowance(pages=self.pages // parts, size_bytes=self.size_bytes // parts, values=self.values // parts)
        self.pages -= part.pages
        self.size_bytes -= part.size_bytes
        self.values -= part.values
        return part

    def give(self, rest: _Allowance) -> None:
        self.pages += max(rest.pages, 0)
        self.size_bytes += max(rest.size_bytes, 0)
        self.values += max(rest.values, 0)


@dataclass(slots=True)
class _Files:
    """The files of an account, by their names."""

    size_bytes: int = 0
    found: list[tuple[int, str, int]] = field(default_factory=list)
    """(bytes, name, owner) of as many as might be read."""
    unlisted: int = 0
    """How many more there are."""


def _listed(folder: Path, reader: int) -> tuple[list[str], dict[int, _Files]]:
    """Returns the names of the reader's files, and for root the files of each other account. Opens none of them."""
    own: list[str] = []
    foreign: defaultdict[int, _Files] = defaultdict(_Files)
    accounts = Accounts()
    # A file may have many names, which cost nothing.
    known: set[int] = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not _FILE_NAME.fullmatch(entry.name) or entry.inode() in known:
                    continue
                known.add(entry.inode())
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if not stat.S_ISREG(found.st_mode):
                    continue
                if found.st_uid == reader:
                    own.append(entry.name)
                elif reader == 0:
                    files = foreign[accounts.of(found.st_uid)]
                    if len(files.found) < FOREIGN_MAX_PAGES:
                        files.size_bytes += found.st_size
                        files.found.append((found.st_size, entry.name, found.st_uid))
                    else:
                        files.unlisted += 1
    except OSError:
        pass
    return own, foreign


def _append(seen: Look, file: Path, owner: int, account: int, left: _Allowance) -> bool:
    """Reads a page, if it is one. False: it may not be read any more."""
    if left.pages <= 0:
        return False
    left.pages -= 1
    try:
        descriptor, found = _open(file)
    except (OSError, PageError):
        return True
    try:
        if found.st_uid == owner:  # else it is another file by now
            seen.pages.append(_read(file, descriptor, found, account, left))
    except _Spent:
        return False
    except (OSError, PageError):
        return True
    finally:
        os.close(descriptor)
    return True


def _open(file: Path) -> tuple[int, os.stat_result]:
    # O_NONBLOCK: a FIFO would block until somebody writes into it.
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise PageError(f"{file} is no ordinary file")
    return descriptor, found


def _read(file: Path, descriptor: int, found: os.stat_result, account: int, left: _Allowance) -> Page:
    """Takes what it reads from `left`. Raises `_Spent` if that is too little."""
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
    if used_bytes > left.size_bytes:
        raise _Spent(f"{file} has {used_bytes} bytes; allowed: {left.size_bytes}")
    left.size_bytes -= used_bytes
    body = os.pread(descriptor, used_bytes - HEADER.size, HEADER.size)
    return Page(
        file=file, rank=rank, world=world, process=process, began_ns=began_ns, is_alive=is_alive,
        owner=found.st_uid, account=account, blocks=tuple(_blocks(file, body, left)),
    )  # fmt: skip


def _blocks(file: Path, body: bytes, left: _Allowance) -> Iterator[Block]:
    names: dict[int, tuple[str, list[str]]] = {}
    offset = 0
    try:
        while offset < len(body):
            size, kind, identity, peer, path = RECORD.unpack_from(body, offset)
            if size < RECORD.size or offset + size > len(body):
                raise ValueError(f"a record of {size} bytes")
            payload = body[offset + RECORD.size : offset + size]
            if kind == NAMES:
                group, words = names[identity] = _names(payload)
                _charge(left, len(words))
                check_names(group, words)
            elif kind == COUNTERS:
                group, words = names[identity]
                values = struct.unpack_from(f"={len(words)}Q", payload)
                _charge(left, len(words))
                yield Block(
                    group=group,
                    peer=None if peer == NONE else peer,
                    path=None if path == NONE else path,
                    values=dict(zip(words, values, strict=True)),
                )
            offset += size
    except _Spent:
        raise
    except (struct.error, KeyError, ValueError) as error:
        raise PageError(f"{file} is damaged at {offset}: {error}") from None


def _charge(left: _Allowance, values: int) -> None:
    if values > left.values:
        left.values = 0
        raise _Spent("more values than may be read")
    left.values -= values


def _names(payload: bytes) -> tuple[str, list[str]]:
    """The group and the names of its counters."""
    if len(payload) > (most_bytes := (NAMES_MAX + 2) * (WORD_MAX_CHARS + 1)):
        raise ValueError(f"names of {len(payload)} bytes; allowed: {most_bytes}")
    group, *words = payload.rstrip(b"\0").decode("ascii").split("\0")
    return group, words


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
