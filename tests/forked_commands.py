# SPDX-License-Identifier: Apache-2.0
"""Commands of sennit as forks of the server of `ranks.py`, which has imported what they import.

A command of its own imports torch, its compiler and pandas, which takes six seconds of a processor. A fork has its own
arguments, variables and output, and its ranks are forks of it, as those of a command are. What a command imports and
how its interpreter ends is tested on commands in earnest. On a terminal: terminal.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.ranks import start

# linux/sched.h
CLONE_NEWNET = 0x40000000
LOOK_S = 0.02


class ForkedCommand:
    """`python -m MODULE ARGUMENTS` in a fork, and in a session of its own.

    It ends with the `with` block at the latest, with all that it started.
    """

    def __init__(self, module: str, *arguments: str, network: Path | None = None, **variables: str) -> None:
        """`network`: a namespace, by its file. `variables`: of the environment, beside those of this process."""
        # Files, not pipes: nobody has to read them while the command runs.
        self._folder = tempfile.TemporaryDirectory(prefix="sennit-test-")
        self._output, self._errors = (Path(self._folder.name) / name for name in ("output", "errors"))
        self._output.touch()
        call = functools.partial(_run, module, arguments, self._output, network)
        self._process = start(call, environment={**os.environ, **variables}, log=self._errors)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return self._output.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return self._errors.read_text(encoding="utf-8")

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def first_line(self, timeout_s: float) -> str:
        """The first line of its output, as soon as it is whole; less of it where the command ends before."""
        end_s = time.monotonic() + timeout_s
        while "\n" not in self.stdout and self.returncode is None:
            assert time.monotonic() < end_s, f"no line of output within {timeout_s:g} s"
            time.sleep(LOOK_S)
        return self.stdout.partition("\n")[0]

    def end(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Waits for its end."""
        self._process.join(timeout_s)
        code = self.returncode
        assert code is not None, f"no end within {timeout_s:g} s:\n{self.stdout}{self.stderr}"
        return subprocess.CompletedProcess([], code, self.stdout, self.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, or has not come to its session
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._process.close()
        self._folder.cleanup()


def forked(
    module: str, *arguments: str, timeout_s: float = 100.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m MODULE ARGUMENTS` in a fork until it has ended."""
    with ForkedCommand(module, *arguments, network=None, **variables) as command:
        return command.end(timeout_s)


def _run(module: str, arguments: Sequence[str], output: Path, network: Path | None) -> None:
    os.setsid()
    if network is not None:
        with network.open() as file:  # os.setns came with Python 3.12
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.setns(file.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), 1)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
