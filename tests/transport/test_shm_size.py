# SPDX-License-Identifier: Apache-2.0
"""A /dev/shm that is too small, or is full later, in a mount namespace: the error says so.

Symmetric memory does not live there. But ranks meet there, and blocks for large messages are reserved before it is
known where their data will be.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

pytestmark = [pytest.mark.root, pytest.mark.needs("root")]

OFFER = """
from sennit.transport import _core
try:
    _core.Communicator(0, 8, timeout_s=1.0, seed=1).shm_offer()
except OSError as error:
    print(error)
"""

FILL = """
import contextlib, tempfile, threading
import numpy as np
from sennit.errors import SennitError
from sennit.transport.communicator import Communicator
from sennit.transport.store import FileStore
from sennit.transport.symmetric import symmetric_empty

lines = []
store = FileStore(tempfile.mkdtemp() + "/store")
made, filled = threading.Barrier(3), threading.Barrier(3)

def run(rank):
    with Communicator(rank=rank, world=2, store=store, timeout_s=30.0) as group:
        made.wait()
        filled.wait()
        lines.append(f"{rank} {group.allreduce(np.ones(4)).tolist()}")
        array = MAKE(1 << 18)
        array[:] = 1
        try:
            group.allreduce(array)
        except SennitError as error:
            lines.append(f"{rank} {error}")

ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
for rank in ranks:
    rank.start()
made.wait()
with contextlib.suppress(OSError), open("/dev/shm/filler", "wb", buffering=0) as filler:
    while True:
        filler.write(bytes(4096))
filled.wait()
for rank in ranks:
    rank.join()
for line in sorted(lines):
    print(line)
"""


def run(script: str, *, mib: int) -> str:
    mount = f'mount -t tmpfs -o size={mib}m none /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "--mount", "sh", "-ec", mount, sys.executable, script]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout


def test_the_error_has_the_size_that_is_needed_and_what_is_there() -> None:
    printed = run(OFFER, mib=1)
    assert printed.startswith("/dev/shm is too small for the inboxes of this host's 8 ranks: "), printed
    sizes, _, reason = printed.partition("ranks: ")[2].partition(" free: ")
    needed, _, there = sizes.partition(" needed, ")
    assert int(needed.removesuffix(" MiB")) > 8
    assert there == "1 MiB of 1 MiB"
    assert reason.startswith("No space left on device")


@pytest.mark.parametrize("memory", ["np.ones", "symmetric_empty"])
def test_a_folder_that_is_full_at_the_first_large_message_is_named(memory: str) -> None:
    printed = run(FILL.replace("MAKE", memory), mib=8)
    lines = printed.splitlines()
    assert len(lines) == 4, printed
    for rank, (small, large) in enumerate((lines[:2], lines[2:])):
        assert small == f"{rank} [2.0, 2.0, 2.0, 2.0]"
        assert large.startswith(f"{rank} ")
        assert "no memory in /dev/shm for large messages of rank " in large
