# SPDX-License-Identifier: Apache-2.0
"""Runs programs on a pseudo-terminal, as a user sees them."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pty
import runpy
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from tests.ranks import start


def run_on_terminal(
    command: Sequence[str],
    *,
    timeout_s: float,
    columns: int = 120,
    until: str = "",
    then: Callable[[subprocess.Popen[bytes] | SennitFork], object] = lambda process: process.send_signal(signal.SIGINT),
    forked: bool = False,
    **variables: str | None,
) -> tuple[int, str]:
    """Returns the exit status and all that was written to the terminal.

    Once the program has written `until`, `then` is called, which by default interrupts it. `forked`: the
    command is the arguments of `sennit`, and runs as in forked_commands.py. `variables`: None removes one.
    """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (25, columns))
    env = _changed({**os.environ, "TERM": "xterm-256color"}, variables)
    written = bytearray()
    deadline_s = time.monotonic() + timeout_s
    with (
        SennitFork(command, theirs, env)
        if forked
        else subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=env)
    ) as process:
        os.close(theirs)
        try:
            while select.select([ours], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
                    if part := os.read(ours, 1 << 16):
                        written += part
                        if until and until.encode() in written:
                            then(process)
                            until = ""
                        continue
                return process.wait(max(0.1, deadline_s - time.monotonic())), written.decode(errors="replace")
            raise TimeoutError(f"{command} has not ended within {timeout_s:g} s: {written.decode(errors='replace')}")
        finally:
            process.kill()
            os.close(ours)


def _changed(env: Mapping[str, str], variables: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**env, **variables}.items() if value is not None}


class SennitFork:
    """`python -m sennit ARGUMENTS` in a fork, on a terminal. What tests need of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], terminal: int, env: dict[str, str]) -> None:
        here, there = multiprocessing.Pipe()
        call = functools.partial(_run, arguments, os.ttyname(terminal))
        self._process = start(call, environment=env, pipe=there)
        there.close()
        with here:
            here.recv()  # A terminal that nobody has open is at its end.

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"no end within {timeout_s:g} s")
        return self._process.exitcode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.join()


def _run(arguments: Sequence[str], terminal: str, has_it: Connection) -> None:
    for standard in (1, 2):
        os.dup2(os.open(terminal, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC), standard)
    with has_it:
        has_it.send(None)
    sys.argv = ["sennit", *arguments]
    runpy.run_module("sennit", run_name="__main__", alter_sys=True)
