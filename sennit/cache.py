# SPDX-License-Identifier: Apache-2.0
"""A folder of things that take long to make: `$XDG_CACHE_HOME/sennit`, else `~/.cache/sennit`.

An entry is complete or absent. Two processes that want the same entry make it once. Who can do without an entry asks
`find`, to which a cache that cannot be read is an empty one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from sennit.errors import DeviceError

# A kernel is the slowest entry: it takes a minute on eight cores or half an hour on a busy one.
LOCK_TIMEOUT_S: Final = 3600.0
LOCK_PAUSE_S: Final = 0.2
_NOT_WRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
REMEDY: Final = "set XDG_CACHE_HOME to a folder that can be written"


def folder() -> Path:
    """XDG Base Directory Specification 0.8: a relative path in the variable is ignored.

    Raises DeviceError if this user has no home.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "sennit"
    except RuntimeError as error:
        raise DeviceError(f"there is no folder for the cache ({error}); {REMEDY}") from error


def find(pattern: str) -> list[Path]:
    """The entries whose names fit the pattern, by name. A folder that cannot be read has none."""
    try:
        return sorted(entry for entry in folder().glob(pattern) if entry.is_dir())
    except (DeviceError, OSError):
        return []


def writable_folder() -> Path:
    """The folder, made if it is missing. Raises DeviceError, which says what to do, if it cannot be written."""
    found = folder()
    try:
        found.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeviceError(f"the cache's folder cannot be made ({error}); {REMEDY}") from error
    if not os.access(found, os.W_OK | os.X_OK):
        raise DeviceError(f"{found} cannot be written; {REMEDY}")
    return found


def provide(
    name: str,
    make: Callable[[Path], None],
    waiting: Callable[[], None] = lambda: None,
    *,
    is_whole: Callable[[Path], bool] = lambda entry: True,
) -> Path:
    """The entry `name`. If it is missing, `make` fills an empty folder, which then becomes the entry.

    Calls `waiting` once if another process is making it. An entry that is not `is_whole` is removed and made anew,
    while nobody else makes it. Raises DeviceError, which says what to do, if the cache cannot
    be written or is full.
    """
    if (found := find(name)) and is_whole(found[0]):
        return found[0]
    base = writable_folder()
    entry, lock = base / name, base / f".{name}.lock"
    try:
        lock.touch(0o600)
        with locked(lock, waiting=waiting):
            if entry.is_dir():
                if is_whole(entry):
                    return entry
                shutil.rmtree(entry)
            for remains in base.glob(f".{name}-*"):  # left by a killed process: the lock is ours now
                shutil.rmtree(remains, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=base) as work:
                made = Path(work) / "entry"
                made.mkdir()
                make(made)
                made.rename(entry)
    except OSError as error:
        if error.errno in _NOT_WRITABLE:
            raise DeviceError(f"{base} cannot be written ({error}); {REMEDY}") from error
        raise
    return entry


@contextlib.contextmanager
def locked(path: Path, timeout_s: float = LOCK_TIMEOUT_S, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Locks a folder or file. Raises TimeoutError if another process keeps the lock."""
    # NFS locks only files that are open for writing.
    descriptor = os.open(path, os.O_CLOEXEC | (os.O_RDONLY if path.is_dir() else os.O_RDWR))
    try:
        deadline_s = time.monotonic() + timeout_s
        told = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    text = f"held by another process for {timeout_s:g} s"
                    raise TimeoutError(errno.ETIMEDOUT, text, str(path)) from None
                if not told:
                    waiting()
                    told = True
                time.sleep(LOCK_PAUSE_S)
        yield
    finally:
        os.close(descriptor)
