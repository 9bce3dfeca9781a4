# SPDX-License-Identifier: Apache-2.0
"""An initramfs: a cpio archive in the form "newc" (Documentation/driver-api/early-userspace/buffer-format.rst)."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MAGIC: Final = b"070701"
TRAILER: Final = "TRAILER!!!"
ALIGNMENT_BYTES: Final = 4


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file or folder of the archive."""

    path: str
    """Without a leading slash."""

    mode: int
    """Type and permissions, as in `stat.st_mode`."""

    content: bytes = b""
    device: tuple[int, int] = (0, 0)
    """Major and minor number of a device node."""


def file(path: str, content: bytes, permissions: int = 0o644) -> Entry:
    return Entry(path=path, mode=stat.S_IFREG | permissions, content=content)


def folder(path: str) -> Entry:
    return Entry(path=path, mode=stat.S_IFDIR | 0o755)


def console() -> Entry:
    """/dev/console: the kernel opens it for the first process, before anything can be mounted."""
    return Entry(path="dev/console", mode=stat.S_IFCHR | 0o600, device=(5, 1))


def archive(entries: Iterable[Entry]) -> bytes:
    """Returns the whole archive. The caller puts folders before their contents."""
    parts = [_member(number, entry) for number, entry in enumerate(entries, start=1)]
    return b"".join([*parts, _member(0, Entry(path=TRAILER, mode=0))])


def _member(number: int, entry: Entry) -> bytes:
    name = entry.path.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    # Inode, mode, uid, gid, links, mtime, size, device's major and minor, node's major and minor, name size, sum.
    numbers = (number, entry.mode, 0, 0, links, 0, len(entry.content), 0, 0, *entry.device, len(name), 0)
    header = MAGIC + b"".join(b"%08x" % value for value in numbers)
    return _padded(header + name) + _padded(entry.content)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT_BYTES)
