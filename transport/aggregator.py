# SPDX-License-Identifier: Apache-2.0
"""The native aggregator: a store of leaves behind UDP sockets (docs/reference/aggregation.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sennit.transport.errors import ArgumentError
from sennit.transport.native import require_core

if TYPE_CHECKING:
    from sennit.transport._core import Aggregator as NativeAggregator

DEFAULT_PORT: Final = 4793
"""UDP, next to that of RoCEv2."""

LEAVES_MAX: Final = 64
"""Ranks of a group that it sums for: the bits of a bitmap (AGGREGATION_LEAVES_MAX)."""

CELL_BYTES: Final = 1_472
"""Memory of a block of one rank, or of a sum (AGGREGATION_CELL_BYTES)."""

MEMORY_MIN_BYTES: Final = 4 << 20
MEMORY_MAX_BYTES: Final = 4 << 30
"""What an arena may have."""


COUNTER_GROUP: Final = "aggregator"
"""Of its page of counters (docs/reference/counters.md); the names begin with it, too."""

# Counters that say not what became of a datagram.
_OF_ANSWERS: Final = ("answers", "unanswered", "received_bytes", "sent_bytes", "kernel_drops")


def datagrams(counters: Mapping[str, int]) -> int:
    """How many datagrams these counters have seen. Each is counted under one name."""
    return sum(number for name, number in counters.items() if name not in _OF_ANSWERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class AggregatedJob:
    """A group that the aggregator has slots for."""

    number: int
    leaves: int
    window: int
    """Blocks that a rank may have in flight."""

    idle_s: int
    """Seconds since its last packet."""

    slots_open: int
    """Blocks of which some leaves are here, and others not."""

    @property
    def slots(self) -> int:
        """Places for blocks, so that a late rank still finds the sums of the blocks before."""
        return 2 * self.window

    @property
    def memory_bytes(self) -> int:
        return self.slots * (self.leaves + 1) * CELL_BYTES


class Aggregator:
    """Takes leaves of blocks from ranks and answers with their sums. One thread at a time may use it."""

    def __init__(
        self,
        addresses: Sequence[str] = (),
        *,
        port: int = DEFAULT_PORT,
        memory_bytes: int = 256 << 20,
        arena: int = 0,
    ) -> None:
        """`addresses`: literal IPv4 or IPv6 addresses of this machine; none: all. Port 0 takes any. `arena`: the
        address of zeroed memory of this size, in which an XDP program works, too; 0: memory of its own.

        Raises ArgumentError for what is not allowed, DeviceError if an address cannot be bound.
        """
        if not 0 <= port <= 65_535:
            raise ArgumentError(f"port {port}; allowed: 0 to 65535")
        if not MEMORY_MIN_BYTES <= memory_bytes <= MEMORY_MAX_BYTES:
            raise ArgumentError(f"memory of {memory_bytes} bytes; allowed: {MEMORY_MIN_BYTES} to {MEMORY_MAX_BYTES}")
        require_core()
        from sennit.transport import _core

        self._native: NativeAggregator = _core.Aggregator(list(addresses), port, memory_bytes=memory_bytes, arena=arena)
        self.port: Final = self._native.port

    def run(self, seconds: float) -> None:
        """Answers packets for so long. A signal ends it earlier, so that its handler runs."""
        self._native.run(seconds)

    def counters(self) -> dict[str, int]:
        """Datagrams by what became of them, and answers; docs/reference/aggregation.md lists them."""
        return self._native.counters()

    def jobs(self) -> list[AggregatedJob]:
        return [
            AggregatedJob(number=number, leaves=leaves, window=window, idle_s=idle_s, slots_open=slots_open)
            for number, leaves, window, idle_s, slots_open in self._native.jobs()
        ]
