# SPDX-License-Identifier: Apache-2.0
"""A folder of things that take long to make: `$XDG_CACHE_HOME/sennit`, else `~/.cache/sennit`.

An entry is complete or absent. Two processes that want the same entry make it once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

# A kernel is the slowest entry: it takes a minute on eight cores or half an hour on a busy one.
LOCK_TIMEOUT_S: Final = 3600.0
LOCK_PAUSE_S: Final = 0.2


def folder() -> Path:
    """XDG Base Directory Specification 0.8: a relative path in the variable is ignored."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "sennit"


def provide(name: str, make: Callable[[Path], None], waiting: Callable[[], None] = lambda: None) -> Path:
    """The entry `name`. If it is missing, `make` fills an empty folder, which then becomes the entry.

    Calls `waiting` once if another process is making it.
    """
    entry = folder() / name
    if entry.is_dir():
        return entry
    folder().mkdir(parents=True, exist_ok=True)
    with _locked(folder() / f".{name}.lock", waiting):
        if entry.is_dir():
            return entry
        for remains in folder().glob(f".{name}-*"):  # left by a killed process: the lock is ours now
            shutil.rmtree(remains, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder()) as work:
            made = Path(work) / "entry"
            made.mkdir()
            make(made)
            made.rename(entry)
    return entry


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        told = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{path} was held by another process for {LOCK_TIMEOUT_S:.0f} s") from None
                if not told:
                    waiting()
                    told = True
                time.sleep(LOCK_PAUSE_S)
        yield
    finally:
        os.close(descriptor)
