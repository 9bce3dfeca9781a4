# SPDX-License-Identifier: Apache-2.0
"""Samples of progress while a rank is inside its collectives: payload received, and bytes by interface."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

PERIOD_S: Final = 0.001
# Of this network namespace; /sys would show the namespace that it was mounted in.
NET_DEV: Final = Path("/proc/self/net/dev")
# Columns of NET_DEV after the interface's name (proc(5)).
RX_BYTES, RX_PACKETS, TX_BYTES, TX_PACKETS = 0, 1, 8, 9


def read_interfaces(names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Bytes and packets of the named interfaces since they were made."""
    found: dict[str, dict[str, int]] = {}
    for line in NET_DEV.read_text().splitlines()[2:]:
        name, _, columns = line.partition(":")
        if name.strip() in names:
            numbers = columns.split()
            found[name.strip()] = {
                "rx_bytes": int(numbers[RX_BYTES]),
                "rx_packets": int(numbers[RX_PACKETS]),
                "tx_bytes": int(numbers[TX_BYTES]),
                "tx_packets": int(numbers[TX_PACKETS]),
            }
    return found


class Sampler:
    """Rows of (monotonic seconds, payload bytes received, bytes received by interface …) while the block runs."""

    def __init__(self, bytes_received: Callable[[], int], interfaces: Sequence[str]) -> None:
        self.rows: list[tuple[float, ...]] = []
        self._bytes_received = bytes_received
        self._interfaces = interfaces
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sampler")

    def _sample(self) -> None:
        while not self._end.wait(PERIOD_S):
            received = self._bytes_received()
            now_s = time.monotonic()
            by_interface = read_interfaces(self._interfaces)
            self.rows.append((now_s, received, *(by_interface[name]["rx_bytes"] for name in self._interfaces)))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
