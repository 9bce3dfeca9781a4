# SPDX-License-Identifier: Apache-2.0
"""Ports for programs that are told which one to take, and take it later.

The kernel gives ports of its own range to whoever asks for any, also for a connection to somebody else. So a port of
that range may be taken again before the program comes to it. These are below the range.
"""

from __future__ import annotations

import contextlib
import random
import socket

FIRST, END = 20_000, 32_000
TRIES = 3_000


def free_ports(count: int) -> list[int]:
    """Free ports, one after the other in number, of TCP on every address of this machine.

    The search begins anywhere: two runs of a test on one machine would find the same ones before they use them.
    """
    for first in random.SystemRandom().sample(range(FIRST, END - count, count), min(TRIES, (END - FIRST) // count - 1)):
        ports = list(range(first, first + count))
        with contextlib.ExitStack() as stack:
            try:
                for port in ports:
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return ports
    raise AssertionError(f"no {count} free ports in a row from {FIRST} to {END}")
