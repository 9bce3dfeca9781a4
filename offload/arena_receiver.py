# SPDX-License-Identifier: Apache-2.0
"""The ring of batches in an arena, as the process sees it that trains. Another one may have loaded the program."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sennit.closing import Closing
from sennit.ebpf.maps import BpfMap
from sennit.offload._native import KernelSlots
from sennit.offload.admission import FeedCounters, Verdict
from sennit.offload.batches import Batch, BatchLayout
from sennit.offload.sketch import Sketch, SketchShape
from sennit.offload.xdp_sketch import SlotSketches

# A processor has a slot for microseconds. A hypervisor may stop it for longer.
SLOT_TIMEOUT_MS: Final = 5000


class ArenaReceiver(Closing):
    """Reads what a BPF program writes. A subclass brings the memory (`take_over`), and closes it."""

    def __init__(self, layout: BatchLayout, *, session: int, udp_port: int, sketch: SketchShape | None) -> None:
        self.layout, self.session, self.udp_port = layout, session, udp_port
        self.sketches = SlotSketches(layout, sketch) if sketch and layout.plan.sparse else None
        """The memory in which the program counts ids."""

    @property
    def arena_bytes(self) -> int:
        return self.layout.ring_bytes + (self.sketches.size_bytes if self.sketches else 0)

    def take_over(self, memory: NDArray[np.uint8], counters: BpfMap) -> None:
        """Begins with an arena full of zeros. The program takes packets of the first `slots` batches from then on."""
        self.memory, self._counters = memory, counters
        self.layout.prepare(memory)
        self._slots = KernelSlots(memory, self.layout.slots, self.layout.slot_bytes)
        for batch in range(self.layout.slots):
            self._slots.open(batch)

    def rows_taken(self, batch: int) -> int:
        """The number of the batch's records received so far. The sender must continue from there."""
        return self._slots.rows_taken(batch)

    def row_ahead(self, batch: int) -> int:
        """The highest row received out of sequence since the last row taken in order; 0 if no gap is known."""
        return self._slots.row_ahead(batch)

    def batch(self, number: int) -> Batch:
        state = self._slots.claim(number, timeout_ms=SLOT_TIMEOUT_MS)
        try:
            rows = self._slots.rows_kept(number)
            cursors = self.layout.cursor_values(self.memory, number % self.layout.slots).copy()
        finally:
            self._slots.give_back(number, state)
        return self.layout.batch(self.memory, number, rows, cursors)

    def release(self, batch: int) -> None:
        """Assigns the slot to the batch `slots` later, which gives its sender credit.

        Raises OSError (ETIMEDOUT) if a processor does not leave the slot.
        """
        self._slots.claim(batch, timeout_ms=SLOT_TIMEOUT_MS)
        if self.sketches:
            self.sketches.released(self.memory, batch)
        self.layout.cursor_values(self.memory, batch % self.layout.slots)[:] = 0
        self._slots.open((batch + self.layout.slots) % (1 << 32))

    def sketch(self) -> Sketch | None:
        """How often ids occurred so far, open batches included; None if the sketch is off."""
        counted = self.counters()
        return self.sketches.total(self.memory, counted.records - counted.filtered) if self.sketches else None

    def counters(self) -> FeedCounters:
        counted = self._counters.values(0)
        total = {name: int(counted[name].sum()) for name in counted.dtype.names or ()}
        return FeedCounters(
            datagrams={verdict: total[verdict.name.lower()] for verdict in Verdict},
            records=total["records"],
            filtered=total["filtered"],
            body_bytes=total["body_bytes"],
        )

    def program_ns(self) -> int | None:
        return None
