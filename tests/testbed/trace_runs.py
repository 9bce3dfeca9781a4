# SPDX-License-Identifier: Apache-2.0
"""Sessions of `sennit trace` with ranks whose counters are known."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from sennit.runtime.trace.target import Target
from sennit.transport import counters
from tests.testbed.answering_ranks import DEADLINE_S, WORLD, Ranks, Start

SENNIT: Final = (sys.executable, "-m", "sennit")


def command_prefix(library: Path, copy: Path) -> list[str]:
    """Copies a library. What runs behind the prefix uses the copy, in a mount namespace of its own.

    A session of every process then sees these processes alone, whatever other tests run meanwhile.
    """
    shutil.copyfile(library, copy)
    script = 'mount --bind "$0" "$1" && shift && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, str(copy), str(library)]


def everybody(library: Path) -> Target:
    """Every process that uses this library."""
    return Target(file=library, path=str(library), process=None, is_mapped=False)


_HOLDS: Final = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(flush=True)
input()
"""


@contextlib.contextmanager
def holding(library: Path, enter: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """A process that has mapped this file, and does nothing else. `enter`: a prefix of its command."""
    pipe, command = subprocess.PIPE, [*enter, sys.executable, "-S", "-c", _HOLDS, str(library)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "\n"
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def session(
    *arguments: str, said: str = "tracepoints of every process", enter: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Attaches a session, and ends it in order after the block. `enter`: a prefix of its command."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([*enter, *SENNIT, "trace", *arguments], stderr=pipe, stdout=pipe, text=True)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any(said in line for line in lines), process.wait(DEADLINE_S)
        yield process
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, output + errors
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def last_pages(ranks: Ranks) -> list[counters.Page]:
    """Kills the ranks and returns their last counters.

    They are read while the ranks are stopped, because any rank that starts may remove the pages of dead ranks.
    """
    with ranks:
        for process in ranks.processes:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        pages = ranks.pages()
    assert [page.rank for page in pages] == list(range(WORLD)), pages
    for page in pages:
        page.file.unlink(missing_ok=True)
    return pages


def exchange(start: Start, folder: Path, seed: int) -> list[dict[str, int]]:
    """Runs collectives between two ranks that end in order. Returns the counters of both, from before their goodbye."""
    ranks = Ranks(start, folder, seed)
    for rank in range(WORLD):
        ranks.begin_barrier(rank)
    return [json.loads(counted) for counted in ranks.end()]
