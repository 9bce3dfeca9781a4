# SPDX-License-Identifier: Apache-2.0
"""The target `cpu`: C++ receives records and computes columns, for hosts without BPF."""

from __future__ import annotations

import warnings
from typing import Final

from sennit.closing import Closing
from sennit.offload._native import DenseField, IdsField, RecordSchema, RowFilters, SocketReader
from sennit.offload._native import Receiver as NativeReceiver
from sennit.offload.admission import FeedCounters, Verdict
from sennit.offload.batches import Batch, BatchLayout
from sennit.offload.native import NativeTransform
from sennit.offload.operators import KeepLength, KeepRange, Sample
from sennit.offload.plan import FeaturePlan
from sennit.offload.schema import ByteOrder, DenseKind, LabelKind
from sennit.offload.sketch import DEFAULT_SHAPE, Sketch, SketchShape

# What arrives at 100 Gbit/s while a thread waits 2 ms to be scheduled.
RECEIVE_BUFFER_BYTES: Final = 32 << 20
STOP_TIMEOUT_MS: Final = 5000


class CpuReceiver(Closing):
    """Receives the records of one session: from `deliver`, or after `listen` from a socket, in a native thread.

    Batches own their memory, so a released slot does not change them.
    """

    def __init__(self, layout: BatchLayout, *, session: int, sketch: SketchShape | None = DEFAULT_SHAPE) -> None:
        """Raises OSError if the address space cannot hold the batches' fields."""
        plan = layout.plan
        self.layout, self.session = layout, session
        self._transform = NativeTransform(plan.graph, plan.outputs)
        self._dense = [self._transform.numbers[name] for name in plan.dense]
        self._sparse = [self._transform.numbers[table.column] for table in plan.sparse]
        self._native = NativeReceiver(
            _native_schema(plan, set(self._transform.sources)),
            _native_filters(plan),
            schema_id=plan.schema.schema_id,
            session=session,
            batch_rows=layout.batch_rows,
            slots=layout.slots,
        )
        self._socket: SocketReader | None = None
        self._sketch = Sketch.of_plan(plan, sketch) if sketch and plan.sparse else None
        """Counters of the batches released so far."""

    def listen(self, address: str, port: int = 0, *, receive_buffer_bytes: int = RECEIVE_BUFFER_BYTES) -> int:
        """Receives from this IPv4 or IPv6 address from now on, and returns the port. Port 0 takes a free one.

        OSError and ValueError say what is wrong with the address. If the kernel does not grant the receive buffer,
        there is a RuntimeWarning.
        """
        if self._socket is not None:
            raise ValueError(f"the receiver listens already, at port {self._socket.port}")
        if not 0 <= port < 1 << 16:
            raise ValueError(f"port {port}; allowed: 0 to 65535")
        if not 1 <= receive_buffer_bytes < 1 << 30:
            raise ValueError(f"a receive buffer of {receive_buffer_bytes} bytes; allowed: 1 to {(1 << 30) - 1}")
        self._socket = SocketReader(self._native, address, port, receive_buffer_bytes)
        if self._socket.receive_buffer_bytes < receive_buffer_bytes:
            warnings.warn(
                f"cpu: the kernel grants a receive buffer of {self._socket.receive_buffer_bytes} of "
                f"{receive_buffer_bytes} bytes; bursts may be lost. As root: sysctl -w "
                f"net.core.rmem_max={receive_buffer_bytes}",
                RuntimeWarning,
                stacklevel=2,
            )
        return self._socket.port

    @property
    def kernel_drops(self) -> int:
        """Datagrams that the kernel dropped because the receive buffer was full."""
        return self._socket.kernel_drops if self._socket is not None else 0

    def deliver(self, datagram: bytes) -> None:
        self._native.deliver(datagram)

    def rows_taken(self, batch: int) -> int:
        """The number of the batch's records received so far. Raises OSError if the socket has failed."""
        if self._socket is not None:
            self._socket.check()
        return self._native.rows_taken(batch)

    def row_ahead(self, batch: int) -> int:
        """The highest row received out of sequence since the last row taken in order; 0 if no gap is known."""
        return self._native.row_ahead(batch)

    def batch(self, number: int) -> Batch:
        program = self._transform.program
        labels, dense, lengths, values = self._native.batch(number, program, self._dense, self._sparse)
        return Batch(number=number, labels=labels, dense=dense, lengths=lengths, values=tuple(values))

    def release(self, batch: int) -> None:
        if self._sketch is not None:
            self._count(self._sketch, batch)
        self._native.release(batch)

    def sketch(self) -> Sketch | None:
        return self._sketch and self._sketch.with_open(self.layout.slots, self._count)

    def _count(self, sketch: Sketch, batch: int) -> None:
        """The batch in this slot, with the rows received so far. Only sampled rows become columns."""
        shift = sketch.shape.one_row_in.bit_length() - 1
        sketch.rows += self._native.count_ids(batch, self._transform.program, self._sparse, shift, sketch.counts)

    def counters(self) -> FeedCounters:
        datagrams, records, filtered, body_bytes = self._native.counters()
        counted = {verdict: datagrams[verdict] for verdict in Verdict}
        return FeedCounters(datagrams=counted, records=records, filtered=filtered, body_bytes=body_bytes)

    def check(self) -> None:
        """The socket stays open until `close`."""

    def program_ns(self) -> int | None:
        return None

    def close(self) -> None:
        """Stops the thread. Raises OSError if it does not stop within 5 s."""
        if self._socket is not None:
            reader, self._socket = self._socket, None
            reader.stop(timeout_ms=STOP_TIMEOUT_MS)


def _native_schema(plan: FeaturePlan, wanted: set[str]) -> RecordSchema:
    """Fields that no column needs. They are checked but not stored."""
    schema = plan.schema
    return RecordSchema(
        is_big_endian=schema.byte_order is ByteOrder.BIG,
        is_label_float=schema.label is LabelKind.FLOAT32,
        dense=[
            DenseField(is_bfloat16=part.kind is DenseKind.BFLOAT16, is_wanted=part.name in wanted)
            for part in schema.dense
        ],
        ids=[
            IdsField(
                width_bytes=part.width_bytes,
                is_signed=part.signed,
                length=part.length,
                is_list=part.is_list,
                is_wanted=part.name in wanted,
            )
            for part in schema.ids
        ],
    )


def _native_filters(plan: FeaturePlan) -> RowFilters:
    filters = RowFilters()
    dense = [part.name for part in plan.schema.dense]
    ids = [part.name for part in plan.schema.ids]
    for condition in plan.keep:
        match condition:
            case Sample():
                filters.sample(condition.seed, condition.below)
            case KeepRange():
                filters.keep_range(dense.index(condition.column), condition.low, condition.high)
            case KeepLength():
                filters.keep_length(ids.index(condition.column), condition.least, condition.most)
    return filters
