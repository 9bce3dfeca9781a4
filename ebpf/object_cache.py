# SPDX-License-Identifier: Apache-2.0
"""Compiled BPF objects on disk, below `sennit.cache.folder()`.

The kernel runs what is in these files, often for root. So a file counts only if this user owns it and its folder, if
nobody else may write to either, and if its content has the digest that it begins with. Any other is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from sennit import cache
from sennit.errors import DeviceError

FOLDER: Final = "bpf"
DIGEST_BYTES: Final = hashlib.sha256().digest_size
# Each has about 100 KiB. The least recently used go first.
KEPT_MAX: Final = 128


def read(key: str) -> bytes | None:
    """The object that was written under this key; None if there is none that can be trusted."""
    try:
        folder = os.open(_folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (DeviceError, OSError):
        return None
    try:
        if not _is_ours(os.fstat(folder)):
            return None
        file = os.open(_name(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    finally:
        os.close(folder)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
        os.close(file)
        return None
    with open(file, "rb") as stream:
        try:
            content = stream.read()
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(file)
    digest, image = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return image if image and hashlib.sha256(image).digest() == digest else None


def write(key: str, image: bytes) -> None:
    """Writes an object atomically. A folder that cannot be written is no error: the next process compiles again."""
    with contextlib.suppress(DeviceError, OSError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".")
        try:
            with open(descriptor, "wb") as file:
                file.write(hashlib.sha256(image).digest() + image)
            os.replace(name, folder / _name(key))
        except OSError:
            os.unlink(name)
            raise
        _forget_oldest(folder)


def _forget_oldest(folder: Path) -> None:
    by_use = sorted(folder.glob("*.o"), key=lambda path: path.lstat().st_mtime, reverse=True)
    for path in by_use[KEPT_MAX:]:
        path.unlink(missing_ok=True)


def _folder() -> Path:
    return cache.folder() / FOLDER


def _name(key: str) -> str:
    return f"{key}.o"


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
