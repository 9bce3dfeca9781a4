# SPDX-License-Identifier: Apache-2.0
"""Which library a session watches, and in whom: processes in containers and other environments have files of their own.

A process's library is found in its memory (/proc/PID/maps) and opened as what it has mapped (/proc/PID/map_files), so
it need not have a name here, nor still have one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from sennit.command_line import printable
from sennit.errors import SennitError

DELETED: Final = " (deleted)"
SHOWN_MAX: Final = 8


class SessionError(SennitError):
    """The session cannot run here. The message says why, and what to do."""


class Tracepoints(Protocol):
    """`transport.tracepoints` and `offload.tracepoints`."""

    def library(self) -> Path:
        """The file of this installation."""

    def is_library(self, file: Path) -> bool:
        """Whether a file of this name, of any installation, has these tracepoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapping:
    """The library of a process."""

    process: int
    path: str
    """Its name where the process runs, for people."""

    file: Path
    """Where this process opens it."""

    @property
    def identity(self) -> tuple[int, int] | None:
        return _identity(self.file)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a session watches."""

    file: Path
    """The path that opens the library. With `process` it lasts as long as that process."""

    path: str
    """The library's name for people."""

    process: int | None
    """The number of the watched process; None: every process that uses the file."""

    is_mapped: bool
    """Whether the process uses the file already."""

    def __str__(self) -> str:
        return "every process" if self.process is None else f"process {self.process}"


def target_of(tracepoints: Tracepoints, process: int | None) -> Target:
    """This installation's library in every process, or the library of one.

    A process that has none yet is watched for this installation's. Raises `SessionError` if there is no such process.
    """
    own = tracepoints.library()
    if process is None:
        return Target(file=own, path=str(own), process=None, is_mapped=False)
    found = _mapping(tracepoints, process)
    if found is not None:
        return Target(file=found.file, path=found.path, process=process, is_mapped=True)
    named = [one for one in _mappings(tracepoints) if _number_inside(one.process) == process]
    if named:
        places = " or ".join(f"--pid {one.process}" for one in named)
        raise SessionError(f"--pid {process}: in a container a process has this number; here it is {places}")
    if not Path(f"/proc/{process}").exists():
        raise SessionError(f"--pid {process}: no such process here; give the number that ps shows here")
    return Target(file=own, path=str(own), process=process, is_mapped=False)


def why_empty(target: Target, tracepoints: Tracepoints) -> str:
    """Why a session saw nothing, as far as the processes that run now tell."""
    if target.process is not None:
        if target.is_mapped:
            return f"process {target.process} uses {target.path}, and came to none of these tracepoints"
        return f"process {target.process} had not loaded {target.path} when the session began"
    own = _identity(target.file)
    here = sum(one.identity == own for one in _mappings(tracepoints))
    if here:
        told = f"{here} process{'es use' if here > 1 else ' uses'} {target.path}, and came to none of these tracepoints"
    else:
        told = f"no process that runs now uses {target.path}"
    others = not_seen(target, tracepoints)
    return f"{told}; {others}" if others else told


def not_seen(target: Target, tracepoints: Tracepoints) -> str:
    """Which processes that run now a session of every process does not see; empty if there are none."""
    if target.process is not None:
        return ""
    own = _identity(target.file)
    others: dict[tuple[int, int] | None, list[Mapping]] = {}
    for one in _mappings(tracepoints):
        if (identity := one.identity) not in (own, None):  # None: it has ended
            others.setdefault(identity, []).append(one)
    if not others:
        return ""
    shown = [_shown(found) for found in itertools.islice(others.values(), SHOWN_MAX)]
    if len(others) > SHOWN_MAX:
        shown.append(f"and of {len(others) - SHOWN_MAX} more")
    return f"with a library of its own, in a container or another environment: {', '.join(shown)}"


def _shown(found: list[Mapping]) -> str:
    """The processes of one library, by their first one."""
    more = f", and {len(found) - 1} more of it" if len(found) > 1 else ""
    return f"--pid {found[0].process} ({found[0].path}{more})"


def _mappings(tracepoints: Tracepoints) -> Iterator[Mapping]:
    """Mappings of all processes that this one sees, in the order of their numbers."""
    for number in _numbers():
        found = _mapping(tracepoints, number)
        if found is not None:
            yield found


def _numbers() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def _mapping(tracepoints: Tracepoints, process: int) -> Mapping | None:
    """None if the process has no such library, or is gone."""
    try:
        lines = Path(f"/proc/{process}/maps").read_bytes().splitlines()
    except OSError:
        return None
    for line in lines:
        place, *_, path = os.fsdecode(line).split(maxsplit=5)
        if tracepoints.is_library(Path(path.removesuffix(DELETED))):
            return Mapping(process=process, path=printable(path), file=Path(f"/proc/{process}/map_files/{place}"))
    return None


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _number_inside(process: int) -> int | None:
    """Its number in its own namespace; proc_pid_status(5), NSpid."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    numbers = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
    return int(numbers[-1]) if len(numbers) > 1 else None
