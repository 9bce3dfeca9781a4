# SPDX-License-Identifier: Apache-2.0
"""A process that makes a segment removes the segments of killed processes from /dev/shm. Segments in use stay."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

MAKE_SEGMENT = """
from sennit.transport import _core
communicator = _core.Communicator(0, 2, timeout_s=5, seed=1, ranks_here=2)
assert communicator.shm_offer()
"""


@pytest.fixture
def old_segments() -> Iterator[tuple[Path, Path]]:
    paths = [Path(f"/dev/shm/sennit-{uuid.uuid4().hex[:16]}") for _ in range(2)]
    for path in paths:
        path.write_bytes(bytes(4096))
        os.utime(path, (1, 1))
        os.mkfifo(f"{path}.bell", 0o600)
        os.utime(f"{path}.bell", (1, 1))
    yield paths[0], paths[1]
    for path in paths:
        path.unlink(missing_ok=True)
        Path(f"{path}.bell").unlink(missing_ok=True)


def test_orphans_are_removed(old_segments: tuple[Path, Path]) -> None:
    orphan, held = old_segments
    held_bell = os.open(f"{held}.bell", os.O_RDWR | os.O_NONBLOCK)
    with held.open("r+b") as file, os.fdopen(held_bell, "r+b", buffering=0) as bell:
        fcntl.lockf(file, fcntl.LOCK_EX)
        fcntl.lockf(bell, fcntl.LOCK_EX)
        subprocess.run([sys.executable, "-c", MAKE_SEGMENT], check=True, timeout=60)
        assert held.exists()
        assert Path(f"{held}.bell").exists()
    assert not orphan.exists()
    assert not Path(f"{orphan}.bell").exists()
