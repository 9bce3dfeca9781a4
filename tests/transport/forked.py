# SPDX-License-Identifier: Apache-2.0
"""Starts a rank of a test: a worker file and its arguments, as `python FILE ARGUMENTS` would run it.

What a rank imports takes half a second of processor time. One process does it, and the ranks are its forks.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

FORKSERVER = multiprocessing.get_context("forkserver")
SPAWN = multiprocessing.get_context("spawn")


def start(
    file: Path, arguments: Sequence[object], environment: Mapping[str, str], log: Path, *, own_interpreter: bool = False
) -> BaseProcess:
    """Returns the process once it runs. Its standard error goes to `log`.

    `own_interpreter`: no fork, for what happens when an interpreter ends. A fork ends without its destructors.
    """
    log.touch()
    context = SPAWN if own_interpreter else FORKSERVER
    given = {"ARGUMENTS": (str(file), [str(argument) for argument in arguments], dict(environment), str(log))}
    # A path, because other packages have modules called `tests`, too.
    process = context.Process(target=runpy.run_path, args=(__file__, given, "__main__"))
    process.start()
    return process


def run(file: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), 2)
    sys.argv = [file, *arguments]
    runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    run(*globals()["ARGUMENTS"])  # From `start`, through runpy.
