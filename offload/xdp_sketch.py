# SPDX-License-Identifier: Apache-2.0
"""The part of a plan's BPF program that fills the sketch, and the memory of its cells.

Each slot has its own cells behind the ring of slots. Only the processor that fills the slot counts in them, so
processors do not meet. Releasing a batch does not clear them: that would cost more than all the counting.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from sennit.offload.batches import PAGE_BYTES, BatchLayout
from sennit.offload.sketch import Sketch, SketchShape
from sennit.offload.xdp_values import Writer

_CELL = np.dtype("<u4")


class SlotSketches:
    """The cells of all slots."""

    def __init__(self, layout: BatchLayout, shape: SketchShape) -> None:
        self._layout, self.shape = layout, shape
        self._cells = len(layout.plan.sparse) * shape.depth * shape.width
        self.slot_bytes = -(-self._cells * _CELL.itemsize // PAGE_BYTES) * PAGE_BYTES
        self._moved = Sketch.of_plan(layout.plan, shape)
        # The most that one batch can add to a cell: all its ids are equal.
        sampled = -(-layout.batch_rows // shape.one_row_in)
        most = sampled * max((table.length for table in layout.plan.tables), default=1)
        self.batches_until_full = np.iinfo(_CELL).max // most
        """Batches that a slot may count before a 32-bit cell could overflow."""

    @property
    def size_bytes(self) -> int:
        return self.slot_bytes * self._layout.slots

    def released(self, memory: NDArray[np.uint8], batch: int) -> None:
        """Collects a slot's counts before the slot gets another batch. `memory` begins with the ring of slots."""
        if batch // self._layout.slots % self.batches_until_full == self.batches_until_full - 1:
            cells = self._of_slot(memory, batch % self._layout.slots)
            self._moved.counts += cells
            cells[:] = 0

    def total(self, memory: NDArray[np.uint8], rows: int) -> Sketch:
        """Everything counted in the first `rows` rows so far."""

        def count(sketch: Sketch, slot: int) -> None:
            sketch.counts += self._of_slot(memory, slot)

        total = self._moved.with_open(self._layout.slots, count)
        total.rows = rows
        return total

    def _of_slot(self, memory: NDArray[np.uint8], slot: int) -> NDArray[np.uint32]:
        begin = self._layout.ring_bytes + slot * self.slot_bytes
        cells: NDArray[np.uint32] = memory[begin : begin + self._cells * _CELL.itemsize].view(_CELL)
        return cells.reshape(self._moved.counts.shape)

    def row_function(self) -> list[str]:
        """Generates the function that counts the ids of one kept row of an accepted packet.

        Tables of one kind that follow each other are walked in a loop: their columns are equally far apart.
        """
        out, layout, shape = Writer(), self._layout, self.shape
        out.line(f"#define SKETCH_SHIFT {shape.one_row_in.bit_length() - 1}")
        out.line("")
        out.line("// The ids of one row. The verifier walks this function once by itself, whatever calls it.")
        with out.block("__noinline long sketch_row(__u64 slot_at, __u64 lines, __u64 row, __u64 first_of_packet)"):
            out.line('asm volatile("" ::"r"(slot_at), "r"(lines), "r"(row), "r"(first_of_packet));')
            tables = layout.plan.tables
            kinds = [(table.is_list, table.length) for table in tables]
            for (is_list, length), group in itertools.groupby(range(len(tables)), kinds.__getitem__):
                numbers = list(group)
                with out.block(f"for (__u64 n = 0; n < {len(numbers)}; n++)"):
                    out.line("STOP_ENDLESS(out);")
                    self._table(out, numbers, is_list, length)
                    out.line(f"lines += {_CELL.itemsize * shape.depth * shape.width};")
            out.depth -= 1
            out.line("out:")
            out.depth += 1
            out.line("return 0;")
        out.line("")
        return out.lines

    def _table(self, out: Writer, numbers: list[int], is_list: bool, length: int) -> None:
        layout, first = self._layout, numbers[0]
        offsets = layout.values_offsets
        pitch = offsets[numbers[1]] - offsets[first] if len(numbers) > 1 else 0
        if is_list:
            # The cursors are already past the packet's last row. The row is found from their earlier values.
            cursor = layout.saved_offset + 8 * layout.cursors.index(first)
            out.line(f"__u64 begin = *AT(__u64, slot_at + {cursor} + 8 * n);")
            lengths = layout.lengths_offset + layout.lengths_pitch * first
            out.line(f"__u64 of_row = slot_at + {lengths} + {layout.lengths_pitch} * n + 4 * first_of_packet;")
            with out.block("for (__u64 before = first_of_packet; before < row; before++)"):
                out.line("STOP_ENDLESS(out);")
                out.line("begin += *AT(__u32, of_row);")
                out.line("of_row += 4;")
            # The process may have written it. It must not decide how long the kernel counts.
            out.line(f"__u64 ids = least_of(*AT(__u32, of_row), {length});")
        else:
            out.line(f"__u64 begin = {length} * row, ids = {length};")
        out.line(f"__u64 id_at = slot_at + {offsets[first]} + {pitch} * n + 8 * begin;")
        with out.block("for (__u64 i = 0; i < ids; i++)"):
            out.line("STOP_ENDLESS(out);")
            out.line(f"sketch_count(lines, *AT(__u64, id_at), {self.shape.depth}, {self.shape.width});")
            out.line("id_at += 8;")

    def packet_lines(self, out: Writer) -> None:
        """Generates the code in `fill`, after the last record, for the sampled rows of the packet, up to kept - 1."""
        # slot->rows may have changed since `kept` began with it: the process can write it.
        kept = "(records - filtered)" if self._layout.plan.keep else "records"
        # 32 bits, as slot->rows has. With 64, clang makes a loop of it that the verifier does not end (E2BIG).
        out.line(f"const __u64 first_of_packet = (__u32)(kept - {kept});")
        out.line("const __u32 batch = bpf_ntohl(header->batch);")
        lines = f"{self._layout.ring_bytes}ull + (batch & (SLOTS - 1)) * {self.slot_bytes}ull"
        with out.block("for (__u64 n = first_of_packet >> SKETCH_SHIFT; n << SKETCH_SHIFT < kept; n++)"):
            out.line("STOP_ENDLESS(counted);")
            out.line("const __u64 row = sketch_row_of(batch, n, SKETCH_SHIFT);")
            out.line("if (row < first_of_packet || row >= kept) continue;")
            out.line(f"sketch_row(slot_at, {lines}, row, first_of_packet);")
        out.depth -= 1
        out.line("counted:")
        out.depth += 1
