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
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Self

from sennit.runtime.trace.target import Target
from sennit.transport import counters
from tests.ranks import command
from tests.testbed.answering_rank import run_and_answer

WORLD: Final = 2
DEADLINE_S: Final = 60.0
SENNIT: Final = (sys.executable, "-m", "sennit")

Start = Callable[..., "subprocess.Popen[str]"]


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


class Ranks:
    """Two ranks that have run collectives and are idle. They are killed at the end of the block."""

    def __init__(self, start: Start, folder: Path, seed: int) -> None:
        """`start(rank, command, **options)` starts each rank."""
        pipe = subprocess.PIPE
        self.processes = []
        for rank in range(WORLD):
            answers = command(partial(run_and_answer, rank, WORLD, folder / "store", seed))
            self.processes.append(start(rank, answers, stdin=pipe, stdout=pipe, text=True))
        for rank in range(WORLD):
            assert self.answer(rank) == "done\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=DEADLINE_S)

    def begin_barrier(self, rank: int) -> None:
        process = self.processes[rank]
        assert process.stdin is not None
        process.stdin.write("counters\n")
        process.stdin.flush()

    def answer(self, rank: int) -> str:
        """Returns the rank's next line, which has its counters after a barrier."""
        process = self.processes[rank]
        assert process.stdout is not None
        return process.stdout.readline()

    def pages(self) -> list[counters.Page]:
        """Returns the counters of all ranks, in rank order."""
        numbers = {process.pid for process in self.processes}
        return sorted((page for page in counters.pages() if page.process in numbers), key=lambda page: page.rank)

    def wait_for(self, rank: int, group: str, name: str, value: int) -> None:
        """Waits until the rank has counted `value`."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self.pages()[rank].total(group, name) < value:
            assert time.monotonic() < deadline_s, (rank, group, name, value)


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
    found = []
    for process in ranks.processes:
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        found.append(json.loads(output))
    return found
