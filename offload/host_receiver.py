# SPDX-License-Identifier: Apache-2.0
"""The target `numpy`: the reference for packet handling and for the columns of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sennit.closing import Closing
from sennit.offload import hashing, reference
from sennit.offload.admission import FeedCounters, Verdict, check_header, check_sequence
from sennit.offload.batches import Batch, BatchLayout
from sennit.offload.columns import ColumnValues, Ragged, dense_of, ids_of
from sennit.offload.errors import RecordError
from sennit.offload.operators import KeepLength, KeepRange, RowFilter, Sample
from sennit.offload.plan import FeaturePlan
from sennit.offload.records import HEADER, Header, Rows, decode_records
from sennit.offload.sketch import DEFAULT_SHAPE, Sketch, SketchShape, sampled_rows


@dataclass
class _Slot:
    batch: int
    next_row: int = 0
    ahead_row: int = 0
    parts: list[Rows] = field(default_factory=list)
    """The kept rows of each packet, in order of arrival."""


class HostReceiver(Closing):
    """Receives the records of one session."""

    def __init__(self, layout: BatchLayout, *, session: int, sketch: SketchShape | None = DEFAULT_SHAPE) -> None:
        self.layout, self.session = layout, session
        self._slots = [_Slot(number) for number in range(layout.slots)]
        self._counters = FeedCounters()
        self._sketch = Sketch.of_plan(layout.plan, sketch) if sketch and layout.plan.sparse else None
        """Counters of the batches released so far."""

    def deliver(self, datagram: bytes) -> None:
        self._counters.datagrams[self._take(datagram)] += 1

    def _take(self, datagram: bytes) -> Verdict:
        plan = self.layout.plan
        header = check_header(
            datagram, schema_id=plan.schema.schema_id, session=self.session, batch_rows=self.layout.batch_rows
        )
        if isinstance(header, Verdict):
            return header
        slot = self._slots[header.batch % self.layout.slots]
        verdict = check_sequence(header, open_batch=slot.batch, next_row=slot.next_row)
        if verdict is Verdict.OUT_OF_SEQUENCE:
            slot.ahead_row = max(slot.ahead_row, header.row)
        if verdict is not Verdict.ACCEPTED:
            return verdict
        try:
            rows = decode_records(plan.schema, datagram[HEADER.size :], header.records)
        except RecordError:
            return Verdict.MALFORMED
        keep = kept_rows(plan, rows, header)
        slot.parts.append(_select(rows, keep))
        slot.next_row += header.records
        slot.ahead_row = 0
        self._counters.records += header.records
        self._counters.filtered += int(np.count_nonzero(~keep))
        self._counters.body_bytes += header.body_bytes
        return Verdict.ACCEPTED

    def rows_taken(self, batch: int) -> int:
        slot = self._slots[batch % self.layout.slots]
        return slot.next_row if slot.batch == batch else 0

    def row_ahead(self, batch: int) -> int:
        slot = self._slots[batch % self.layout.slots]
        return slot.ahead_row if slot.batch == batch else 0

    def batch(self, number: int) -> Batch:
        plan, parts = self.layout.plan, self._slots[number % self.layout.slots].parts
        rows = _joined(parts or [decode_records(plan.schema, b"", 0)])
        columns = reference.evaluate(plan.graph, rows.columns, plan.outputs)
        tables = [ids_of(columns, table.column) for table in plan.sparse]
        dense = [dense_of(columns, name) for name in plan.dense]
        return Batch(
            number=number,
            labels=rows.labels,
            dense=np.stack(dense, axis=1) if dense else np.zeros((len(rows), 0), np.float32),
            lengths=np.array([table.lengths for table in tables], np.int32).reshape(len(tables), len(rows)),
            values=tuple(table.values for table in tables),
        )

    def release(self, batch: int) -> None:
        if self._sketch:
            self._count(self._sketch, batch)
        following = (batch + self.layout.slots) % (1 << 32)
        self._slots[batch % self.layout.slots] = _Slot(following)

    def sketch(self) -> Sketch | None:
        return self._sketch and self._sketch.with_open(self.layout.slots, self._count)

    def _count(self, sketch: Sketch, batch: int) -> None:
        """The batch in this slot, with the rows received so far. Only sampled rows become columns."""
        slot = self._slots[batch % self.layout.slots]
        ends = np.cumsum([len(part) for part in slot.parts], dtype=np.int64)
        rows = int(ends[-1]) if slot.parts else 0
        chosen = sampled_rows(slot.batch, rows, sketch.shape.one_row_in)
        sketch.rows += rows
        if not len(chosen):
            return
        sampled = []
        for number in np.unique(np.searchsorted(ends, chosen, side="right")):
            part = slot.parts[number]
            keep = np.isin(np.arange(len(part)) + ends[number] - len(part), chosen)
            sampled.append(_select(part, keep))
        plan = self.layout.plan
        columns = reference.evaluate(plan.graph, _joined(sampled).columns, plan.outputs)
        sketch.add_sampled([ids_of(columns, table.column).values for table in plan.sparse])

    def counters(self) -> FeedCounters:
        return self._counters

    def check(self) -> None:
        """Nothing ends before `close`."""

    def program_ns(self) -> int | None:
        return None

    def close(self) -> None:
        self._slots.clear()


def kept_rows(plan: FeaturePlan, rows: Rows, header: Header) -> NDArray[np.bool_]:
    """Which rows the plan keeps, as booleans."""
    keep = np.ones(len(rows), np.bool_)
    for condition in plan.keep:
        keep &= _condition(condition, rows, header)
    return keep


def _condition(condition: RowFilter, rows: Rows, header: Header) -> NDArray[np.bool_]:
    if isinstance(condition, Sample):
        numbers = np.uint64(header.batch << 32 | header.row) + np.arange(len(rows), dtype=np.uint64)
        return hashing.splitmix64(condition.seed, numbers) >> np.uint64(32) < np.uint64(condition.below)
    if isinstance(condition, KeepRange):
        x = dense_of(rows.columns, condition.column)
        return (x >= np.float32(condition.low)) & (x <= np.float32(condition.high))
    assert isinstance(condition, KeepLength)
    lengths = ids_of(rows.columns, condition.column).lengths
    return (lengths >= condition.least) & (lengths <= condition.most)


def _select(rows: Rows, keep: NDArray[np.bool_]) -> Rows:
    columns: dict[str, ColumnValues] = {}
    for name, values in rows.columns.items():
        columns[name] = values.keep_rows(keep) if isinstance(values, Ragged) else values[keep]
    return Rows(labels=rows.labels[keep], columns=columns)


def _joined(parts: list[Rows]) -> Rows:
    """Joins the rows of several packets."""
    columns: dict[str, ColumnValues] = {}
    for name, first in parts[0].columns.items():
        if isinstance(first, Ragged):
            pieces = [ids_of(part.columns, name) for part in parts]
            lengths = np.concatenate([piece.lengths for piece in pieces])
            columns[name] = Ragged(lengths, np.concatenate([piece.values for piece in pieces]))
        else:
            columns[name] = np.concatenate([dense_of(part.columns, name) for part in parts])
    return Rows(labels=np.concatenate([part.labels for part in parts]), columns=columns)
