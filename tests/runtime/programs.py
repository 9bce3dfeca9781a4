# SPDX-License-Identifier: Apache-2.0
"""Runs a program on several ranks, as torchrun would: for programs of pages and examples.

What the launcher itself does is tested where a tutorial calls it.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from sennit.runtime.training.launch import serve_store
from tests.ranks import start


def run_ranks(
    program: Path | str, ranks: int, folder: Path, *arguments: str, deadline_s: float, **environment: str
) -> str:
    """What all ranks of a file or a module print, rank by rank.

    Fails with their standard errors unless each one ends well in time.
    """
    # The store outlives the ranks, as that of torchrun's agent.
    store, address = serve_store(0, timeout_s=deadline_s)
    shared = {"MASTER_ADDR": address.host, "MASTER_PORT": str(address.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes: list[BaseProcess] = []
    outputs = [folder / f"rank-{rank}.txt" for rank in range(ranks)]
    logs = [output.with_suffix(".err") for output in outputs]
    try:
        for rank, (output, log) in enumerate(zip(outputs, logs, strict=True)):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            variables = {**os.environ, "OMP_NUM_THREADS": "1", **shared, **own, **environment}
            runs = partial(_run, program, arguments, output)
            processes.append(start(runs, environment=variables, log=log))
        end_s = time.monotonic() + deadline_s
        for process in processes:
            process.join(max(0.0, end_s - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store
    errors = "".join(log.read_text() for log in logs if log.exists())
    assert codes == [0] * ranks, f"statuses {codes}\n{errors}"
    return "".join(output.read_text() for output in outputs)


def _run(program: Path | str, arguments: Sequence[str], output: Path) -> None:
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), 1)
    sys.argv = [str(program), *arguments]
    if isinstance(program, str):
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(program), run_name="__main__")
