# SPDX-License-Identifier: Apache-2.0
"""What ranks do in test_launch.py.

The product starts them, not tests/ranks.py. They import this file by its own name: other packages are called `tests`,
too.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from torch._C._distributed_c10d import Store

from sennit.command_line import stdout_console
from sennit.errors import SennitError


def surroundings(name: str, rank: int, world_size: int, store: Store) -> tuple[str | None, str | None, int]:
    """Returns this rank's value of a variable, its number of threads for OpenMP, and the threads of its parent."""
    threads = len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))
    return os.environ.get(name), os.environ.get("OMP_NUM_THREADS"), threads


def origin(_: str, rank: int, world_size: int, store: Store) -> tuple[int, bool, bool]:
    """The parent, whether pandas is here already, and whether the collector leaves out what was imported."""
    has_pandas = "pandas" in sys.modules or importlib.util.find_spec("pandas") is None
    return os.getppid(), has_pandas, gc.get_freeze_count() > 100_000


def end_at_once(how: str, rank: int, world_size: int, store: Store) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3)


def first_waits_for_the_loss_of_others(heard: str, rank: int, world_size: int, store: Store) -> str:
    """Rank 0 waits for a file, the others fail."""
    if rank > 0:
        raise SennitError("no more")
    deadline_s = time.monotonic() + 20.0
    while not Path(heard).exists():
        if time.monotonic() > deadline_s:
            return "not told"
        time.sleep(0.02)
    return "heard"


def writes_to(path: str, rank: int, world_size: int, store: Store) -> None:
    """Rank 0 prints to a file, or to a pipe whose reader has gone. The others wait for it."""
    if rank == 0:
        read, write = os.pipe()
        os.close(read)
        os.dup2(write if path == "pipe" else os.open(path, os.O_WRONLY), 1)
        stdout_console().print("a line")
    store.wait(["never"])


def wait_to_be_ended(seconds: str, rank: int, world_size: int, store: Store) -> None:
    """Says that it is here, and says so again after a while. Says that it was asked to end."""

    def asked(number: int, frame: FrameType | None) -> None:
        os.write(1, b"asked\n")
        os._exit(1)

    signal.signal(signal.SIGTERM, asked)
    os.write(1, b"here\n")  # in one piece: two ranks share the pipe
    threading.Event().wait(float(seconds))
    print("still here", flush=True)


def wait_to_be_interrupted(seconds: str, rank: int, world_size: int, store: Store) -> None:
    """Says that it is here, and that it was interrupted. A second interrupt does not come between the two parts."""
    try:
        os.write(1, b"here\n")
        threading.Event().wait(float(seconds))
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGINT)
        os.write(1, b"interrupted\n")
        raise
