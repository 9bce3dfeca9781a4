# SPDX-License-Identifier: Apache-2.0
"""The processes of a run that is played on hosts: each has a name, a log and a session, and ends with the run."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from sennit.runtime.training.launch import PRELOAD, SINGLE
from sennit.testbed.scenarios.ranks import RankError
from sennit.testbed.topology import Planes
from sennit.testbed.topology.namespace import enter

LOOK_S: Final = 0.02
LOG_TAIL_CHARACTERS: Final = 2000


def nobody(failed: Sequence[str]) -> bool:
    return not failed


def anybody(failed: Sequence[str]) -> bool:
    return True


class Cast:
    """Starts processes by name, waits for what they do, and kills all that are left at the end of its `with` block.

    A name is in use until its process was killed or forgotten, and then free for another one, whose log is a new one.
    """

    def __init__(self, planes: Planes, folder: Path, *, timeout_s: float) -> None:
        """`folder`: gets the logs. `timeout_s`: from now, for all that is waited for."""
        self._planes, self._folder = planes, folder
        self._deadline_s = time.monotonic() + timeout_s
        self._running: dict[str, subprocess.Popen[Any] | BaseProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in list(self._running):
            self.kill(name)

    def start(self, name: str, host: int, command: list[str], variables: Mapping[str, str]) -> None:
        """Starts a command on a host. `variables`: of its environment, beside those of this process."""
        with self.log(name).open("wb") as log:
            self._running[name] = self._planes.popen(
                host,
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def fork(self, name: str, host: int, module: str, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        """Runs `python -m MODULE ARGUMENTS` on a host, as a fork of one process that has imported what they need."""
        self.log(name).write_bytes(b"")
        environment = {**os.environ, **SINGLE, **variables}
        call = functools.partial(
            _run, self._planes.netns_name(host), environment, module, list(arguments), self.log(name)
        )
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        process = context.Process(target=call, name=name)
        process.start()
        self._running[name] = process

    def pid(self, name: str) -> int:
        pid = self._running[name].pid
        assert pid is not None
        return pid

    def codes(self) -> dict[str, int | None]:
        """The exit code of each process, and None of one that runs."""
        return {
            name: process.exitcode if isinstance(process, BaseProcess) else process.poll()
            for name, process in self._running.items()
        }

    def wait_until(
        self, is_so: Callable[[], bool], otherwise: str, *, may_fail: Callable[[Sequence[str]], bool] = nobody
    ) -> None:
        """Waits until `is_so()`. Raises RankError at the deadline, or once processes failed that may not.

        `may_fail`: whether these may, by their names. `otherwise`: what the error says where it is not so in time.
        """
        while True:
            has_come = is_so()
            codes = self.codes()
            failed = [name for name, code in codes.items() if code not in (None, 0)]
            if failed and not may_fail(failed):
                raise RankError(f"{failed[0]} failed with {codes[failed[0]]}:\n{self._tail(failed[0])}")
            if has_come:
                return
            if time.monotonic() > self._deadline_s:
                name = next((name for name, code in codes.items() if code is None), next(iter(codes)))
                raise RankError(f"{otherwise} in time; {name}:\n{self._tail(name)}")
            time.sleep(LOOK_S)

    def wait(self, *, may_fail: Callable[[Sequence[str]], bool] = nobody) -> None:
        """Waits until all have ended."""
        self.wait_until(lambda: None not in self.codes().values(), "no end", may_fail=may_fail)

    def kill(self, name: str) -> None:
        """Kills a process with all that it has started, and frees its name."""
        process = self._running.pop(name)
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it has ended, or has not come to its session
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join() if isinstance(process, BaseProcess) else process.wait()

    def log(self, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '')}.log"

    def said(self, name: str) -> str:
        """Its whole output and errors so far."""
        return self.log(name).read_text(errors="replace", encoding="utf-8")

    def _tail(self, name: str) -> str:
        return self.said(name)[-LOG_TAIL_CHARACTERS:]


def _run(network: str, environment: dict[str, str], module: str, arguments: list[str], log: Path) -> None:
    os.setsid()
    enter(network)
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
