# SPDX-License-Identifier: Apache-2.0
"""Tells hosts apart, for ranks that look for neighbours, and processes, for a rank number that is used twice.

Equal identities are only a hint that shared memory may work between two ranks. The proof is that each rank opens the
other's segment (`rendezvous.py`). That fails between containers that share a kernel but not `/dev/shm`.
"""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any, Final, Self

from sennit.transport.errors import DeviceError
from sennit.transport.light_tuple import LightTuple

# random(4): a new random UUID at every boot, the same in all containers of one kernel. Host names do not help:
# containers of one host have different names, and clones of one image have the same.
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def host_identity(override: str | None = None, *, boot_id: Path = BOOT_ID) -> str:
    """Returns `override` (SENNIT_HOST_ID) if given, else the kernel's boot id."""
    return machine_identity(boot_id=boot_id) if override is None else f"named:{override}"


def machine_identity(*, boot_id: Path = BOOT_ID) -> str:
    """Returns the machine whose cores this process shares, whatever SENNIT_HOST_ID says."""
    try:
        return f"boot:{boot_id.read_text(encoding='utf-8').strip()}"
    except OSError as error:
        hint = " (mount /proc in this container)" if isinstance(error, FileNotFoundError) else ""
        raise DeviceError(f"cannot read {boot_id}{hint}", error.errno) from error


class Process(LightTuple):
    """A process of any host. Equal ones are the same process."""

    host_name: str
    """For people."""

    pid: int
    """In its own pid namespace."""

    space: str
    """Its machine and pid namespace. Empty if /proc does not say."""

    began_ticks: int
    """When it began, in clock ticks since boot: a pid is used again. 0 if /proc does not say."""

    @classmethod
    def ours(cls) -> Self:
        pid, space = os.getpid(), ""
        with contextlib.suppress(OSError):
            space = f"{machine_identity()} {os.readlink('/proc/self/ns/pid')}"
        return cls(host_name=platform.node(), pid=pid, space=space, began_ticks=_began_ticks(pid))

    @classmethod
    def of_record(cls, record: Any) -> Self | None:
        """The process that `as_record` told of. None if `record` is not such a record."""
        try:
            pid, began_ticks = int(record["pid"]), int(record["began_ticks"])
            return cls(host_name=str(record["host_name"]), pid=pid, space=str(record["space"]), began_ticks=began_ticks)
        except (TypeError, KeyError, ValueError):
            return None

    def as_record(self) -> dict[str, Any]:
        return self._asdict()

    def is_near(self, here: Process) -> bool:
        """Whether `here`, this process, can see if it lives."""
        return self.space == here.space != "" and self.began_ticks != 0

    def lives_beside(self, here: Process) -> bool:
        """Whether it is alive, and not `here`, this process. False where this process cannot see it."""
        return self.is_near(here) and self.pid != here.pid and _began_ticks(self.pid) == self.began_ticks

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host_name}"


def _began_ticks(pid: int) -> int:
    """When a process of this pid namespace began. 0: there is none, or it has ended."""
    try:
        # proc_pid_stat(5). The name in parentheses may hold spaces. Fields from 3 on: state, ..., 22: starttime.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0
