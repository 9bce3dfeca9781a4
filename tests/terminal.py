# SPDX-License-Identifier: Apache-2.0
"""Runs programs on a pseudo-terminal, as a user sees them."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence


def run_on_terminal(
    command: Sequence[str],
    *,
    timeout_s: float,
    columns: int = 120,
    until: str = "",
    then: Callable[[subprocess.Popen[bytes]], object] = lambda process: process.send_signal(signal.SIGINT),
    **variables: str | None,
) -> tuple[int, str]:
    """Returns the exit status and all that was written to the terminal.

    Once the program has written `until`, `then` is called, which by default interrupts it. `variables`: None removes
    one.
    """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (25, columns))
    env = _changed({**os.environ, "TERM": "xterm-256color"}, variables)
    written = bytearray()
    deadline_s = time.monotonic() + timeout_s
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=env) as process:
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
