# SPDX-License-Identifier: Apache-2.0
"""A group that cannot be made as asked names the cause, on every rank: real processes that share a store."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from sennit.transport.meeting.store import FileStore
from tests.extent import briefly

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

# Much longer than the test waits: what ends at the deadline fails.
GROUP_TIMEOUT_S = 600.0
WAIT_S = 120.0

RANK = """
import sys
from sennit.errors import SennitError
from sennit.transport.communicator import Communicator
from sennit.transport.meeting.store import FileStore

rank, world, folder, timeout_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
try:
    with Communicator(rank=rank, world=world, store=FileStore(folder), timeout_s=timeout_s) as group:
        print("made", flush=True)
        sys.stdin.read()
        group.barrier()
except SennitError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


def start(rank: int, folder: Path, *, world: int = 2) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RANK, str(rank), str(world), str(folder), str(GROUP_TIMEOUT_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=WAIT_S)[0].strip()


def test_a_rank_number_used_twice_is_named_on_every_rank_with_both_processes(tmp_path: Path) -> None:
    first = start(1, tmp_path)
    FileStore(tmp_path).wait(["sennit/world/hello/1"], timedelta(seconds=WAIT_S))
    second = start(1, tmp_path)
    cause = f"two processes say that they are rank 1 of 2: process {first.pid} on {os.uname().nodename}, and process "
    cause += f"{second.pid} on {os.uname().nodename}; see what gives each its rank"
    assert said(second) == f"MismatchError: {cause} (RANK, or --node-rank of torchrun)"
    third = start(0, tmp_path)
    for process in (third, first):
        assert said(process).startswith(f"MismatchError: {cause}")


def test_a_rank_number_used_twice_is_named_where_rank_0_is_missing(tmp_path: Path) -> None:
    """Everybody waits for rank 0, so the reason is where its record would be."""
    others = [start(rank, tmp_path, world=3) for rank in (1, 2)]
    FileStore(tmp_path).wait([f"sennit/world/hello/{rank}" for rank in (1, 2)], timedelta(seconds=WAIT_S))
    second = start(1, tmp_path, world=3)
    cause = f"two processes say that they are rank 1 of 3: process {others[0].pid} on {os.uname().nodename}, and "
    for process in (second, *others):
        assert said(process).startswith(f"MismatchError: {cause}process {second.pid} on {os.uname().nodename}; see")
    # Rank 0 hears it when it comes.
    assert said(start(0, tmp_path, world=3)).startswith(f"MismatchError: {cause}")


def test_who_comes_to_a_group_that_runs_is_told_who_has_its_rank(tmp_path: Path) -> None:
    members = [start(rank, tmp_path) for rank in range(2)]
    for member in members:
        assert member.stdout is not None
        assert member.stdout.readline() == "made\n"
    late = start(1, tmp_path)
    assert f"rank 1 of 2: process {members[1].pid} on {os.uname().nodename}, and process {late.pid} on" in said(late)
    for member in members:
        assert member.stdin is not None
        member.stdin.close()
        member.stdin = None
    assert [said(member) for member in members] == ["", ""]


LIMITED = """
import json, os, resource, sys, warnings
import torch.distributed as dist
from sennit.errors import SennitError
from sennit.transport.communicator import Communicator

warnings.simplefilter("ignore")
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def group(rank, name, store):
    return Communicator(rank=rank, world=2, store=dist.PrefixStore(name, store), timeout_s=float(sys.argv[1]))

def member(rank, pipe):
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    # All modules are imported before the limit holds.
    first = group(rank, "first", store)
    first.barrier()
    first.shutdown()
    del first
    free = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = []
    for spare in range(int(sys.argv[2])):
        name = f"spare {spare}"
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + spare, free[1]))
        try:
            made = group(rank, name, store)
            # Whoever is connected may learn only now that the other is not.
            made.barrier()
            told.append(made.routes[1 - rank])
            made.shutdown()
            del made
        except SennitError as error:
            told.append(f"{type(error).__name__}: {error}")
        resource.setrlimit(resource.RLIMIT_NOFILE, free)
    os.write(pipe, json.dumps(told).encode())
    os._exit(0)

pipes = []
for rank in range(2):
    ours, theirs = os.pipe()
    if os.fork() == 0:
        member(rank, theirs)
    os.close(theirs)
    pipes.append(ours)
texts = [b"".join(iter(lambda: os.read(pipe, 1 << 20), b"")).decode() for pipe in pipes]
print(json.dumps([json.loads(text) for text in texts]))
"""
# With so many descriptors to spare, a group has all that it needs.
ENOUGH = {"auto": 6, "shm": 6, "udp": 12}


def told_by_ranks(transport: str) -> list[tuple[str, str]]:
    """What both ranks say where rank 1 has 0, 1, ... descriptors to spare: the way to the other, or the error."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(GROUP_TIMEOUT_S), str(ENOUGH[transport])],
        env={**os.environ, "SENNIT_TRANSPORT": transport, "SENNIT_INTERFACES": "lo"},
        stdout=subprocess.PIPE,
        timeout=WAIT_S,
        check=True,
    )
    first, second = json.loads(done.stdout)
    return list(zip(first, second, strict=True))


@pytest.mark.parametrize("transport", briefly(["auto", "shm", "udp"], ["auto"]))
def test_want_of_descriptors_names_the_limit_and_what_a_group_needs_on_every_rank(transport: str) -> None:
    failed = 0
    for first, second in told_by_ranks(transport):
        if second in ("shm", "udp"):
            assert first == second
            continue
        failed += 1
        limit = re.match(r"DeviceError: (.*Too many open files.*)\. This process may have (\d+) files open", second)
        assert limit is not None, second
        assert "raise that by `ulimit -n` (up to " in second
        assert (
            "A group takes 1 for each rank of its host over shared memory and 1 more (here up to 3), and 1 for each"
            in second
        )
        assert ("shared memory was given up before" in limit[1]) == (
            transport == "auto" and "boot_id" not in limit[1]
        ), second
        assert first.startswith("PeerError: ")
        assert f"rank 1 could not join world: {second}" in first
    assert 2 <= failed < ENOUGH[transport]


OTHER_USER = """
import json, os, sys, tempfile, warnings
os.umask(0)
folder = tempfile.mkdtemp()
os.chmod(folder, 0o777)
from sennit.errors import SennitError
from sennit.transport.communicator import Communicator
from sennit.transport.meeting.store import FileStore

child = os.fork()
rank = 0 if child else 1
if not child:
    os.setuid(65534)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        with Communicator(rank=rank, world=2, store=FileStore(folder), timeout_s=float(sys.argv[1])) as group:
            group.barrier()
            said = [group.routes[1 - rank], *(str(warning.message) for warning in caught)]
    except SennitError as error:
        said = [f"{type(error).__name__}: {error}"]
if child:
    os.waitpid(child, 0)
print(json.dumps([rank, said]), flush=True)
os._exit(0)
"""


@pytest.mark.root
@pytest.mark.needs("root")
@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_ranks_of_two_users_are_named(transport: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OTHER_USER, str(GROUP_TIMEOUT_S)],
        env={**os.environ, "SENNIT_TRANSPORT": transport},
        stdout=subprocess.PIPE,
        timeout=WAIT_S,
        check=True,
    )
    told: dict[int, list[Any]] = dict(json.loads(line) for line in done.stdout.splitlines())
    cause = "rank 1 cannot open the shared memory of rank 0: it belongs to user 0, and that rank runs as user 65534. "
    for rank in range(2):
        text = " ".join(told[rank])
        assert f"{cause}Run all ranks of a host as one user" in text, text
        assert text.startswith("udp " if transport == "auto" else ("Unsupported", "PeerError")), text
