# SPDX-License-Identifier: Apache-2.0
"""An ingest in plain Python, as a peer: a thread with one system call for each datagram, and NumPy over whole batches.

It speaks to the same feeders, so that only the receiving side differs.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sennit.closing import Closing
from sennit.offload import reference
from sennit.offload._native import packet_checksum
from sennit.offload.admission import FeedCounters, Verdict, check_header, check_sequence
from sennit.offload.batches import Batch, BatchLayout
from sennit.offload.columns import ColumnValues, Ragged, dense_of, ids_of
from sennit.offload.errors import TargetUnavailable
from sennit.offload.ingest.target import CPU_BUFFER_BYTES, CPU_PACKET_BYTES, IngestTarget
from sennit.offload.records import HEADER, MAGIC, VERSION
from sennit.offload.schema import ByteOrder, DenseKind, LabelKind, Schema
from sennit.offload.sketch import Sketch
from sennit.offload.targets import Receiver
from sennit.thread_names import name_thread

if TYPE_CHECKING:
    from sennit.offload.ingest.shared_interface import Reception

# asm-generic/socket.h
_SO_RCVBUFFORCE: Final = 33
# How often the thread looks whether it is to end.
LOOK_S: Final = 0.2
# After the name that the receiving threads of sennit have, too.
THREAD: Final = "sennit-feed"


def record_of(schema: Schema) -> np.dtype[Any]:
    """A record as NumPy sees it. Raises TargetUnavailable for lists, whose records differ in length."""
    if schema.lists or schema.byte_order is not ByteOrder.LITTLE or schema.label is not LabelKind.BINARY:
        raise TargetUnavailable("python: lists, big-endian records or labels that are numbers; allowed: fixed records")
    if any(part.kind is not DenseKind.FLOAT32 for part in schema.dense):
        raise TargetUnavailable("python: dense numbers that are no float32")
    ids = [(part.name, part.dtype, (part.length,)) for part in schema.ids]
    return np.dtype([("label", "u1"), ("dense", "<f4", (len(schema.dense),)), *ids])


@dataclass(slots=True)
class _Slot:
    batch: int
    memory: bytearray
    next_row: int = 0
    ahead_row: int = 0


class PythonReceiver(Closing):
    """Receives the records of one session at a UDP socket."""

    def __init__(self, layout: BatchLayout, *, session: int, address: str, port: int) -> None:
        """Raises OSError if the address cannot be had, TargetUnavailable for records that differ in length."""
        self.layout, self.session = layout, session
        self._record = record_of(layout.plan.schema)
        size = layout.batch_rows * self._record.itemsize
        self._slots = [_Slot(number, bytearray(size)) for number in range(layout.slots)]
        self._counters = FeedCounters()
        self._expected = [MAGIC, VERSION, 0, layout.plan.schema.schema_id, session]
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        with contextlib.suppress(PermissionError):
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, CPU_BUFFER_BYTES)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(LOOK_S * 1e6)))
        self._socket.bind((address, port))
        self._ends = False
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        name_thread(THREAD)
        place = bytearray(CPU_PACKET_BYTES)
        packet = memoryview(place)
        while not self._ends:
            try:
                received = self._socket.recv_into(place)
            except (BlockingIOError, InterruptedError):
                continue
            self.deliver(packet[:received])

    def deliver(self, datagram: bytes | memoryview) -> None:
        if len(datagram) >= HEADER.size:
            *first, batch, row, records, body_bytes, checksum = HEADER.unpack_from(datagram)
            slot = self._slots[batch % self.layout.slots]
            # The usual packet, for which no header is made.
            if (
                first == self._expected
                and (batch, row) == (slot.batch, slot.next_row)
                and 0 < records <= self.layout.batch_rows - row
                and records * self._record.itemsize == body_bytes == len(datagram) - HEADER.size
                and checksum == packet_checksum(datagram)
            ):
                self._keep(slot, datagram, row, records, body_bytes)
                return
        self._counters.datagrams[self._refused(datagram)] += 1

    def _keep(self, slot: _Slot, datagram: bytes | memoryview, row: int, records: int, body_bytes: int) -> None:
        begin = row * self._record.itemsize
        slot.memory[begin : begin + body_bytes] = datagram[HEADER.size :]
        slot.ahead_row = 0
        slot.next_row = row + records
        counters = self._counters
        counters.datagrams[Verdict.ACCEPTED] += 1
        counters.records += records
        counters.body_bytes += body_bytes

    def _refused(self, datagram: bytes | memoryview) -> Verdict:
        schema_id, rows = self.layout.plan.schema.schema_id, self.layout.batch_rows
        header = check_header(datagram, schema_id=schema_id, session=self.session, batch_rows=rows)  # type: ignore[arg-type]
        if isinstance(header, Verdict):
            return header
        slot = self._slots[header.batch % self.layout.slots]
        verdict = check_sequence(header, open_batch=slot.batch, next_row=slot.next_row)
        if verdict is Verdict.OUT_OF_SEQUENCE:
            slot.ahead_row = max(slot.ahead_row, header.row)
        return Verdict.MALFORMED if verdict is Verdict.ACCEPTED else verdict

    def rows_taken(self, batch: int) -> int:
        slot = self._slots[batch % self.layout.slots]
        return slot.next_row if slot.batch == batch else 0

    def row_ahead(self, batch: int) -> int:
        slot = self._slots[batch % self.layout.slots]
        return slot.ahead_row if slot.batch == batch else 0

    def batch(self, number: int) -> Batch:
        plan, slot = self.layout.plan, self._slots[number % self.layout.slots]
        rows = np.frombuffer(slot.memory, self._record, slot.next_row)
        columns: dict[str, ColumnValues] = {
            part.name: np.ascontiguousarray(rows["dense"][:, place]) for place, part in enumerate(plan.schema.dense)
        }
        for part in plan.schema.ids:
            lengths = np.full(len(rows), part.length, np.int32)
            columns[part.name] = Ragged(lengths, rows[part.name].reshape(-1).astype(np.int64))
        found = reference.evaluate(plan.graph, columns, plan.outputs)
        tables = [ids_of(found, table.column) for table in plan.sparse]
        dense = [dense_of(found, name) for name in plan.dense]
        return Batch(
            number=number,
            labels=(rows["label"] != 0).astype(np.float32),
            dense=np.stack(dense, axis=1) if dense else np.zeros((len(rows), 0), np.float32),
            lengths=np.array([table.lengths for table in tables], np.int32).reshape(len(tables), len(rows)),
            values=tuple(table.values for table in tables),
        )

    def release(self, batch: int) -> None:
        place = batch % self.layout.slots
        # A new slot takes the place of the old one in one step. The thread may be looking at the old one, which is full
        # and so takes nothing any more: a late packet cannot become one of the next batch.
        self._slots[place] = _Slot((batch + self.layout.slots) % (1 << 32), self._slots[place].memory)

    def sketch(self) -> Sketch | None:
        return None

    def counters(self) -> FeedCounters:
        return self._counters

    def check(self) -> None:
        """The socket stays open until `close`."""

    def program_ns(self) -> int | None:
        return None

    def close(self) -> None:
        self._ends = True
        self._thread.join()
        self._socket.close()


class PythonTarget(IngestTarget):
    """An address where a `PythonReceiver` takes the records."""

    def receiver(
        self,
        layout: BatchLayout,
        local_rank: int,
        *,
        address: str,
        mates: Mapping[int, str],
        reception: Reception | None,
        session: int,
        timeout_s: float,
    ) -> Receiver:
        return PythonReceiver(layout, session=session, address=address, port=self.port + local_rank)
