# SPDX-License-Identifier: Apache-2.0
"""What to say when the system opens no more files for a process: its limit, how to raise it, and what a group needs.

Sockets, shared memory, events and FIFOs are all descriptors. Chance decides which call fails first. The error of that
call ("udp: cannot bind [::1]:0: Too many open files") names neither limit nor remedy.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sennit.transport.errors import DeviceError

# proc_sys_fs(5).
FILE_MAX: Final = Path("/proc/sys/fs/file-max")


def explained(error: Exception, *, world: int) -> Exception:
    """Returns `error`, or a DeviceError that has the advice, too, if descriptors ran out."""
    cause = _cause(error)
    return error if cause is None else DeviceError.told(f"{error}. {advice(error, world=world)}", cause.errno)


def advice(error: BaseException, *, world: int) -> str:
    """Returns the limit, how to raise it, and how many descriptors a group of `world` ranks takes, if that is what
    `error` comes from, else nothing.
    """
    if not (found := limit(error)):
        return ""
    return (
        f"{found}. A group takes 1 for each rank of its host over shared memory and 1 more (here up to {world + 1}), "
        "and 1 for each interface over UDP; the groups of a process share 8 more for each interface"
    )


def limit(error: BaseException) -> str:
    """Returns the limit and how to raise it, if that is what `error` comes from, else nothing."""
    cause = _cause(error)
    if cause is None:
        return ""
    if cause.errno == errno.EMFILE:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"This process may have {soft} files open: raise that by `ulimit -n` (up to {hard}; LimitNOFILE= in "
            "systemd, docker run --ulimit nofile=N)"
        )
    return f"This machine may have {_file_max()} files open: raise that by `sysctl fs.file-max`"


def _cause(error: BaseException | None) -> OSError | None:
    """The failed system call that `error` comes from, if it was for want of a descriptor."""
    return next((each for each in _chain(error) if each.errno in (errno.EMFILE, errno.ENFILE)), None)


def _chain(error: BaseException | None) -> Iterator[OSError]:
    while error is not None:
        if isinstance(error, OSError):
            yield error
        error = error.__cause__ or error.__context__


def _file_max() -> str:
    try:
        return FILE_MAX.read_text(encoding="utf-8").strip()
    except OSError:  # for want of a descriptor
        return "no more"
