# SPDX-License-Identifier: Apache-2.0
"""Writes Python's counters to a file that other processes read with `counters`.

The file format is that of the native core's counters (docs/reference/counters.md, "The file";
telemetry/counter_page.hpp).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sennit.transport import counters

FILE_BYTES: Final = 65_536


class CounterPage:
    """A page of counters of this process, until it is closed or the process ends."""

    def __init__(self, rank: int, world_size: int, folder: Path = counters.FOLDER) -> None:
        """Creates the file. If that fails (no such folder, or it is full), only this process sees the counters."""
        self.path: Path | None = None
        """The path of the page; None without a file."""

        self._used_bytes = 0
        self._names = 0
        self._finalizer: weakref.finalize[Any, CounterPage] | None = None
        began_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        header = counters.HEADER.pack(counters.MAGIC, 0, rank, world_size, os.getpid(), began_ns)
        try:
            _remove_orphans(folder)
            descriptor, self._memory = _unnamed_file(folder)
        except OSError:
            self._memory = mmap.mmap(-1, FILE_BYTES)
            self._append(header)
            return
        self._append(header)
        name = counters.PATTERN.replace("*", secrets.token_hex(8))
        try:
            _give_name(descriptor, folder, name)
        except OSError:
            os.close(descriptor)
            return
        self.path = folder / name
        self._finalizer = weakref.finalize(self, _end, descriptor, self.path, os.getpid())

    def add(
        self, group: str, names: Sequence[str], *, peer: int | None = None, path: int | None = None
    ) -> NDArray[np.uint64]:
        """Returns zeroed counters, one for each name. Other processes see every write at once.

        Raises ValueError if the page has no room for them, or if readers would refuse a name.
        """
        counters.check_names(group, names)
        self._names += 1
        nobody = counters.NONE
        text = b"".join(word.encode() + b"\0" for word in (group, *names))
        self._append(_record(counters.NAMES, self._names, nobody, nobody, text))
        begin = self._used_bytes + counters.RECORD.size
        places = nobody if peer is None else peer, nobody if path is None else path
        self._append(_record(counters.COUNTERS, self._names, *places, bytes(8 * len(names))))
        return np.frombuffer(self._memory, np.uint64, len(names), begin)

    def close(self) -> None:
        """Removes the file. Counters can still be written, but nobody reads them."""
        if self._finalizer is not None:
            self._finalizer()

    def _append(self, content: bytes) -> None:
        end = self._used_bytes + len(content)
        if end > FILE_BYTES:
            raise ValueError(f"a page of counters with {end} bytes; allowed: {FILE_BYTES}")
        self._memory[self._used_bytes : end] = content
        # The length is written last, because readers trust everything before it.
        np.frombuffer(self._memory, np.uint64, 1, counters.USED_BYTES_OFFSET)[0] = self._used_bytes = end


def _record(kind: int, names: int, peer: int, path: int, payload: bytes) -> bytes:
    padded = payload + bytes(-len(payload) % 8)
    return counters.RECORD.pack(counters.RECORD.size + len(padded), kind, names, peer, path) + padded


def _unnamed_file(folder: Path) -> tuple[int, mmap.mmap]:
    """Creates a locked file with all its memory allocated.

    Running out of memory later would be a SIGBUS. The file gets its name once it has content.
    """
    descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
        return descriptor, mmap.mmap(descriptor, FILE_BYTES)
    except OSError:
        os.close(descriptor)
        raise


def _give_name(descriptor: int, folder: Path, name: str) -> None:
    into = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Python follows the symbolic link only if it has a folder's descriptor.
        os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=into, follow_symlinks=True)
    finally:
        os.close(into)


def _remove_orphans(folder: Path) -> None:
    """Removes pages of this user whose writers were killed. They stay readable until somebody creates another page."""
    begin = counters.PATTERN.removesuffix("*")
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(begin):
                continue
            with contextlib.suppress(OSError):
                # Those of others are not opened: there may be many.
                if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    _remove_orphan(entry.path)


def _remove_orphan(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    finally:
        os.close(descriptor)


def _end(descriptor: int, path: Path, process: int) -> None:
    if os.getpid() == process:  # A forked child must not remove its parent's file.
        path.unlink(missing_ok=True)
    os.close(descriptor)
