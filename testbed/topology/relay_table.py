# SPDX-License-Identifier: Apache-2.0
"""What the relay process and its parent share in memory: how long to delay what, and how many packets passed."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Final

# Words of 64 bits: four counters, then a delay for each plane and host as a byte of the hardware address numbers them.
_RECEIVED, _SENT, _LOST, _OVERRUN, _DELAYS = range(5)
# What the relay prints when it listens.
READY: Final = "ready"
TABLE_BYTES: Final = 8 * (_DELAYS + 256 * 256)


@dataclass(frozen=True, kw_only=True)
class RelayCounters:
    """Packets that were delayed, all hosts and planes together; a super-packet counts once."""

    received: int
    sent: int

    lost: int
    """Not taken by the port they were to leave by: down, or its queue full."""

    overrun: int
    """Lost because the relay could not keep up. Anything but 0 spoils a measurement. Up to 50 ms old."""

    @property
    def waiting(self) -> int:
        """Being delayed now."""
        return self.received - self.sent - self.lost


class RelayTable:
    """A view of the memory behind a descriptor; one process writes the counters, the other one the delays."""

    def __init__(self, descriptor: int) -> None:
        self._words = memoryview(mmap.mmap(descriptor, TABLE_BYTES)).cast("Q")

    def set_delay_us(self, host: int, plane: int, delay_us: int) -> None:
        self._words[_DELAYS + (plane << 8 | host)] = delay_us

    def delay_us(self, host: int, plane: int) -> int:
        return self._words[_DELAYS + (plane << 8 | host)]

    def count_received(self) -> None:
        self._words[_RECEIVED] += 1

    def count_sent(self) -> None:
        self._words[_SENT] += 1

    def count_lost(self) -> None:
        self._words[_LOST] += 1

    def count_overrun(self, packets: int) -> None:
        self._words[_OVERRUN] += packets

    def counters(self) -> RelayCounters:
        # Sent first: a packet counted as sent was counted as received before.
        sent, lost, overrun = self._words[_SENT], self._words[_LOST], self._words[_OVERRUN]
        return RelayCounters(received=self._words[_RECEIVED], sent=sent, lost=lost, overrun=overrun)


def make_table() -> int:
    """Memory for a table that a child process can be given: its descriptor."""
    descriptor = os.memfd_create("sennit-relay")
    os.ftruncate(descriptor, TABLE_BYTES)
    return descriptor
