# SPDX-License-Identifier: Apache-2.0
"""Pinned maps on the BPF file system, for `bpftool map dump pinned` and other processes.

A folder of pins belongs to the process that holds its lock. The next process that makes a folder removes what killed
processes left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from sennit import cache
from sennit.closing import Closing
from sennit.ebpf.library import BpfError
from sennit.ebpf.maps import BpfMap

BPFFS: Final = Path("/sys/fs/bpf")
"""The usual mount point."""
PARENT_NAME: Final = "sennit"
"""The folder that contains all pin folders. Nothing outside it is ever removed."""
LOCK_TIMEOUT_S: Final = 2.0
# uapi/linux/magic.h
_BPF_FS_MAGIC: Final = 0xCAFE4A11
# Larger than any `struct statfs`. Its first field, a long, is the file system's magic number.
_STATFS_LONGS: Final = 32

_libc = ctypes.CDLL(None, use_errno=True)


class PinFolder(Closing):
    """A folder of pinned maps that only this process uses while it is open."""

    def __init__(self, name: str, bpffs: Path = BPFFS) -> None:
        """`name` has no dots, because the file system reserves them.

        Mounts the BPF file system at its usual place if needed. Raises BpfError if this process has no right to, if
        `bpffs` is something else, or if another process has the folder (EBUSY).
        """
        self._descriptor = -1
        _require_bpffs(bpffs)
        parent = bpffs / PARENT_NAME
        self.path = parent / name
        try:
            parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            with cache.locked(parent, LOCK_TIMEOUT_S):
                _remove_abandoned(parent)
                try:
                    self.path.mkdir(mode=0o755)
                except FileExistsError:
                    raise BpfError(errno.EBUSY, f"{self.path}: another process has pinned its maps there") from None
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BpfError:
            raise
        except OSError as error:
            raise BpfError(error.errno or 0, f"{self.path}: {error.strerror}") from None

    def pin(self, pinned: BpfMap, name: str = "") -> Path:
        """Pins the map in the folder, under its own name by default."""
        path = self.path / (name or pinned.name)
        pinned.pin(path)
        return path

    def close(self) -> None:
        """Removes the names. Processes that opened a map keep it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(FileNotFoundError):  # somebody has removed it
                _remove(self.path)
            os.close(descriptor)


def _require_bpffs(folder: Path) -> None:
    if _is_bpffs(folder):
        return
    if folder != BPFFS:
        raise BpfError(errno.EINVAL, f"{folder} is no BPF file system (mount -t bpf bpf DIRECTORY)")
    # As bpftool mounts it.
    if _libc.mount(b"bpf", os.fsencode(BPFFS), b"bpf", ctypes.c_ulong(0), b"mode=0700") != 0:
        code = ctypes.get_errno()
        raise BpfError(code, f"{BPFFS}: no BPF file system, and mounting it takes CAP_SYS_ADMIN: {os.strerror(code)}")


def _is_bpffs(path: Path) -> bool:
    found = (ctypes.c_long * _STATFS_LONGS)()
    return _libc.statfs(os.fsencode(path), found) == 0 and found[0] == _BPF_FS_MAGIC


def _remove_abandoned(parent: Path) -> None:
    """Folders of processes that ended: nobody holds their lock."""
    for folder in parent.iterdir():
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
        except OSError:  # a live process's folder, or another user's
            continue
        finally:
            os.close(descriptor)


def _remove(folder: Path) -> None:
    for pin in folder.iterdir():
        pin.unlink()
    folder.rmdir()
