# SPDX-License-Identifier: Apache-2.0
"""A control group of the kernel that limits the memory of the processes that join it, of the first or second version.

Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst of the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """`limited_memory` makes it."""

    def __init__(self, folder: Path, *, second: bool) -> None:
        self.folder, self._second = folder, second

    def command(self, *command: str) -> list[str]:
        """A command that joins the group, and then is `command`."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]

    @property
    def killed(self) -> int:
        """The processes that the kernel has killed because the group had no memory left."""
        told = (self.folder / ("memory.events" if self._second else "memory.oom_control")).read_text()
        return int(next(line.split()[1] for line in told.splitlines() if line.startswith("oom_kill ")))


@contextmanager
def limited_memory(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Skips the test where there can be no such group. All of its processes have to end inside the context."""
    second = (ROOT / "cgroup.controllers").exists()
    folder = (ROOT if second else ROOT / "memory") / f"sennit-test-{os.getpid()}"
    limit = "memory.max" if second else "memory.limit_in_bytes"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no control group of memory: {error}")
    try:
        yield MemoryGroup(folder, second=second)
    finally:
        folder.rmdir()
