# SPDX-License-Identifier: Apache-2.0
"""Runs a program on several ranks, as torchrun would: for programs of pages and examples.

Importing torch takes seconds, so ranks are forked from one process that has imported it. What the launcher itself does
is tested where a tutorial calls it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from sennit.runtime.training.launch import serve_store

FORKSERVER = multiprocessing.get_context("forkserver")
HERE = Path(__file__).resolve()


def run_ranks(program: Path, ranks: int, folder: Path, *arguments: str, deadline_s: float, **environment: str) -> str:
    """What all ranks print, rank by rank. Fails with their standard errors unless each one ends well in time."""
    # The store outlives the ranks, as that of torchrun's agent.
    store, address = serve_store(0, timeout_s=deadline_s)
    shared = {"MASTER_ADDR": address.host, "MASTER_PORT": str(address.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes: list[BaseProcess] = []
    logs = [folder / f"rank-{rank}.txt" for rank in range(ranks)]
    try:
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            variables = {**os.environ, "OMP_NUM_THREADS": "1", **shared, **own, **environment}
            given = {"ARGUMENTS": (str(program), list(arguments), variables, str(log))}
            # A path, because other packages have modules called `tests`, too.
            started = FORKSERVER.Process(target=runpy.run_path, args=(str(HERE), given, "__main__"))
            started.start()
            processes.append(started)
        end_s = time.monotonic() + deadline_s
        for process in processes:
            process.join(max(0.0, end_s - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store
    errors = "".join(log.with_suffix(".err").read_text() for log in logs if log.with_suffix(".err").exists())
    assert codes == [0] * ranks, f"statuses {codes}\n{errors}"
    return "".join(log.read_text() for log in logs)


def run(program: str, arguments: Sequence[str], environment: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, Path(log)), (2, Path(log).with_suffix(".err"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), number)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    run(*globals()["ARGUMENTS"])  # From `run_ranks`, through runpy.
