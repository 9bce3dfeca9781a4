# SPDX-License-Identifier: Apache-2.0
"""Samples progress while a rank is inside its collectives: payload received, and bytes by interface."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

PERIOD_S: Final = 0.001
# /proc shows this network namespace; /sys would show the namespace that it was mounted in.
NET_DEV: Final = Path("/proc/self/net/dev")
# The column of received bytes, counted after the interface's name (proc(5)).
RX_BYTES: Final = 0


def received_bytes(names: Sequence[str]) -> dict[str, int]:
    """Bytes that these interfaces have received since they were created, by name."""
    lines = (line.partition(":") for line in NET_DEV.read_text(encoding="utf-8").splitlines()[2:])
    return {name.strip(): int(columns.split()[RX_BYTES]) for name, _, columns in lines if name.strip() in names}


class Sampler:
    """Rows of (monotonic seconds, payload bytes received, bytes received by interface …) while the block runs."""

    def __init__(self, bytes_received: Callable[[], int], interfaces: Sequence[str]) -> None:
        self.rows: list[tuple[float, ...]] = []
        self._bytes_received = bytes_received
        self._interfaces = interfaces
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sampler")

    def _sample(self) -> None:
        # Higher priority than the ranks, which keep all processors busy: a late sample would look like a stall.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))
        while not self._end.wait(PERIOD_S):
            received = self._bytes_received()
            now_s = time.monotonic()
            by_interface = received_bytes(self._interfaces)
            self.rows.append((now_s, received, *(by_interface[name] for name in self._interfaces)))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
