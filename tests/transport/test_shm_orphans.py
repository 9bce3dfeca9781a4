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


LOOK_AT_OPENED = """
import ctypes, os, struct
from pathlib import Path
from sennit.transport.counter_page import CounterPage
IN_OPEN = 0x20  # linux/inotify.h
watch = ctypes.CDLL(None).inotify_init1(os.O_NONBLOCK)
files = [Path("/dev/shm", name) for name in ("sennit-0123456789abcdef", "sennit.counters-0123456789abcdef")]
for file in files:
    file.write_bytes(bytes(4096))
    os.utime(file, (1, 1))
    os.chown(file, 65534, 65534)
    assert ctypes.CDLL(None).inotify_add_watch(watch, os.fsencode(file), IN_OPEN) > 0
"""
OPENED = """
CounterPage(0, 1).close()
try:
    raise SystemExit(f"opened: {os.read(watch, 4096)}")
except BlockingIOError:
    pass
files[0].read_bytes()
assert struct.unpack_from("=iI", os.read(watch, 4096))[1] == IN_OPEN
"""


@pytest.mark.root
def test_files_of_other_users_are_not_even_opened() -> None:
    """There may be many, and each rank that starts looks at them. In a /dev/shm that nobody else looks at."""
    in_own_folder = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$0" -c "$1"']
    program = LOOK_AT_OPENED + MAKE_SEGMENT + OPENED
    subprocess.run([*in_own_folder, sys.executable, program], check=True, timeout=60)
