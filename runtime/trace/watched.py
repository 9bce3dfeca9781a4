# SPDX-License-Identifier: Apache-2.0
"""The command that a session watches. It ends by itself or by a signal of somebody else, whatever the session meets.

Signals to the session are passed on, as sudo(8) does it: what a terminal's keyboard sends has reached the command
already.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Final, Self

from sennit.runtime.trace.target import SessionError

LOOK_EVERY_S: Final = 0.05


class Watched:
    """A command, or none. In the `with` block SIGINT and SIGTERM end the session alone, and the command gets them.

    The block begins before the session says that it runs, so that nobody interrupts it too early.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._came_early: list[int] = []
        self._before: dict[int, Any] = {}
        self.is_interrupted = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def started(self) -> int | None:
        """The number of its process; None: it was not started."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def watch(self, seconds: float | None, interval_s: float, tick: Callable[[], bool | None]) -> None:
        """Starts the command, and calls `tick` every `interval_s` (0: never) until one of these ends the session: the
        command has ended, `seconds` are over, an interrupt, or `tick` returns True.

        Raises `SessionError` if the command cannot be started, and whatever `tick` raises.
        """
        begin_s = time.monotonic()
        end_s = begin_s + seconds if seconds is not None else float("inf")
        next_s = begin_s + interval_s if interval_s > 0 else float("inf")
        if self._command:
            self._start()
        while not self.is_interrupted and (self._process is None or self.is_running):
            now_s = time.monotonic()
            if now_s >= next_s:
                next_s += interval_s
                if tick():
                    break
            if now_s >= end_s:
                break
            time.sleep(LOOK_EVERY_S)

    def wait(self) -> int:
        """Waits until the command has ended, without a limit: only its user knows how long it may take.

        Returns its exit code, 128 + signal if a signal ended it; 0 without a command.
        """
        if self._process is None:
            return 0
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(self._command)
        except OSError as error:
            raise SessionError(
                f"{self._command[0]}: {error.strerror}; give a program that can be started behind --"
            ) from None
        early, self._came_early = self._came_early, []
        for number in early:
            self._process.send_signal(number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.is_interrupted = True
        if self._process is None:
            self._came_early.append(number)
        elif number != signal.SIGINT or not _is_in_foreground(self._process.pid):
            self._process.send_signal(number)


def _is_in_foreground(process: int) -> bool:
    """Whether Ctrl-C at this process's terminal reaches that process, too."""
    with contextlib.suppress(OSError):  # no terminal, or no such process
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            return os.tcgetpgrp(terminal) == os.getpgid(process)
        finally:
            os.close(terminal)
    return False
