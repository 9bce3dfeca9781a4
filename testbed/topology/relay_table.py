# SPDX-License-Identifier: Apache-2.0
"""Memory shared by the relay process and its parent: the delays, and how many packets passed."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Final

# 64-bit words, as in testbed/csrc/relay.hpp: counters, then a delay for each plane and host, indexed by a byte of the
# hardware address.
_RECEIVED, _SENT, _LOST, _OVERRUN, _LATE_NS, _DELAYS = range(6)
# Printed by the relay when it listens.
READY: Final = "ready"
TABLE_BYTES: Final = 8 * (_DELAYS + 256 * 256)


@dataclass(frozen=True, kw_only=True)
class RelayCounters:
    """Delayed packets, over all hosts and planes; a super-packet counts once."""

    received: int
    sent: int

    lost: int
    """Packets that the destination port refused: down, or its queue full."""

    overrun: int
    """Lost because the relay could not keep up. Any value but 0 spoils a measurement. Up to 50 ms old."""

    late_us: float = 0.0
    """How much later than asked the relay sent a packet, on average."""

    @property
    def waiting(self) -> int:
        """Packets being delayed now."""
        return self.received - self.sent - self.lost


class RelayTable:
    """A view of the shared memory. The relay writes the counters, and its parent the delays."""

    def __init__(self, descriptor: int) -> None:
        self._words = memoryview(mmap.mmap(descriptor, TABLE_BYTES)).cast("Q")

    def set_delay_us(self, host: int, plane: int, delay_us: int) -> None:
        self._words[_DELAYS + (plane << 8 | host)] = delay_us

    def counters(self) -> RelayCounters:
        # `sent` is read first: a packet counted as sent was counted as received before.
        sent, lost, overrun = self._words[_SENT], self._words[_LOST], self._words[_OVERRUN]
        late_us = self._words[_LATE_NS] / 1_000 / max(sent, 1)
        return RelayCounters(received=self._words[_RECEIVED], sent=sent, lost=lost, overrun=overrun, late_us=late_us)


def make_table() -> int:
    """Memory for a table that a child process can inherit: its descriptor."""
    descriptor = os.memfd_create("sennit-relay")
    os.ftruncate(descriptor, TABLE_BYTES)
    return descriptor
