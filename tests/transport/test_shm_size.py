# SPDX-License-Identifier: Apache-2.0
"""A /dev/shm that is too small is done without. One that is full later: the error says so. In a mount namespace.

Symmetric memory does not live there. But ranks meet there, and blocks for large messages are reserved before it is
known where their data will be.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

pytestmark = [pytest.mark.root, pytest.mark.needs("root")]

SMALL = """
import os, tempfile
store = tempfile.mkdtemp() + "/store"
child = os.fork()
rank = 0 if child else 1

import warnings
import numpy as np
from sennit.transport.communicator import Communicator
from sennit.transport.meeting.store import FileStore

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")
    for number in range(2):
        with Communicator(rank=rank, world=2, store=FileStore(f"{store}{number}"), timeout_s=30.0) as group:
            sums = [group.allreduce(np.ones(elements)).sum() / elements for elements in (4, 1 << 18)]
            # A sleeping rank is woken by the bell.
            group.barrier()
            names = [name for name in os.listdir("/dev/shm") if name.startswith("sennit-")]
            way = group.routes[1 - rank]
if child:
    os.waitpid(child, 0)
print(rank, sums == [2.0, 2.0], way, names, len(caught), *(warning.message for warning in caught), flush=True)
os._exit(0)
"""

FILL = """
import contextlib, tempfile, threading
import numpy as np
from sennit.errors import SennitError
from sennit.transport.communicator import Communicator
from sennit.transport.meeting.store import FileStore
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


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_where_it_is_too_small_ranks_share_memory_without_a_name_and_say_so_once(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SENNIT_TRANSPORT", transport)
    printed = run(SMALL, mib=1)
    lines = sorted(printed.splitlines())
    assert len(lines) == 2, printed
    for rank, line in enumerate(lines):
        told, _, warning = line.partition(" 1 ")
        assert told == f"{rank} True shm []", printed
        assert warning.startswith("/dev/shm is too small for the inboxes of this host's 2 ranks: "), printed
        sizes, _, reason = warning.partition("ranks: ")[2].partition(" free: ")
        assert sizes.partition(" needed, ")[2] == "1 MiB of 1 MiB"
        assert reason.startswith("No space left on device. Ranks share memory without a name there")


@pytest.mark.parametrize("memory", ["np.ones", "symmetric_empty"])
def test_a_folder_that_is_full_at_the_first_large_message_is_named(memory: str) -> None:
    printed = run(FILL.replace("MAKE", memory), mib=8)
    lines = printed.splitlines()
    assert len(lines) == 4, printed
    for rank, (small, large) in enumerate((lines[:2], lines[2:])):
        assert small == f"{rank} [2.0, 2.0, 2.0, 2.0]"
        assert large.startswith(f"{rank} ")
        assert "no memory in /dev/shm for large messages of rank " in large
