# SPDX-License-Identifier: Apache-2.0
"""Commands that tests run inside the VM, with a deadline that holds even where the kernel lets nobody end them.

`rdma link delete` waits in the kernel until the last user of the device is gone, and no signal ends that wait
(ib_uverbs_remove_one() in drivers/infiniband/core/uverbs_main.c). `subprocess.run` waits for a command that it has
killed, so where the user is the caller itself, both would wait for ever.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Final

TIMEOUT_S: Final = 30.0
KILL_TIMEOUT_S: Final = 2.0
SYSRQ: Final = Path("/proc/sysrq-trigger")
# "Show State" would print all tasks, but UML's kernel panics in it.
SHOW_BLOCKED_TASKS: Final = "w"
DMESG_TIMEOUT_S: Final = 10.0

_kept: list[subprocess.Popen[bytes]] = []
"""Processes that the kernel kept. They end with the wait, and `wait_for_kept` then takes them."""


def execute(command: str, *, timeout_s: float = TIMEOUT_S, check: bool = True) -> None:
    """Runs a command, whose words have no spaces.

    Raises `CalledProcessError` if it fails and `check` is set, and `TimeoutError` with the kernel's stacks if it does
    not end in time.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command.split(), stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            stacks = stacks_of_blocked_tasks()
            process.kill()
            try:
                process.wait(KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _kept.append(process)
            reason = f"{command!r} did not end within {timeout_s:g} s; tasks of the kernel that nobody can end:"
            raise TimeoutError(f"{reason}\n{stacks}") from None
        if check and code != 0:
            output.seek(0)
            text = output.read().decode(errors="replace")
            raise subprocess.CalledProcessError(code, command, text)


def wait_for_kept() -> None:
    """Waits for each command that the kernel kept beyond its time, once nobody uses what it waited for.

    Raises `subprocess.TimeoutExpired` if one does not end in time.
    """
    while _kept:
        _kept[-1].wait(TIMEOUT_S)
        _kept.pop()


def stacks_of_blocked_tasks() -> str:
    """Returns where tasks wait that no signal ends, as the kernel prints it. Needs root."""
    SYSRQ.write_text(SHOW_BLOCKED_TASKS, encoding="utf-8")
    log = subprocess.run(["dmesg"], check=True, capture_output=True, text=True, timeout=DMESG_TIMEOUT_S).stdout
    _, found, stacks = log.rpartition("Show Blocked State")
    return stacks if found else log
