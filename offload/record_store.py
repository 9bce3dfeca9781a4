# SPDX-License-Identifier: Apache-2.0
"""A data set encoded as wire records, one after another, in memory that several processes map.

A feeder sends every record once per epoch, in random order. So records are encoded once, and a packet is a copy of some
of them. Each record is read from one place in memory; columns would need one place per column.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sennit.offload._native import RecordColumns, RecordSender
from sennit.offload.errors import RecordError
from sennit.offload.schema import RECORD_MAX_BYTES, ByteOrder, DenseKind, Ids, LabelKind, Schema

_START_BYTES: Final = np.dtype(np.uint64).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class IdColumn:
    """The ids of one field for N rows."""

    values: NDArray[np.int32] | NDArray[np.int64]
    """All ids, row after row."""

    offsets: NDArray[np.int64] | None = None
    """[N + 1]: the index of each row's first id, for a list. None for a fixed number of ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """N rows, column by column, in the order of the schema's fields."""

    labels: NDArray[np.float32]
    """[N]"""

    dense: NDArray[np.float32]
    """[N, D]"""

    ids: tuple[IdColumn, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """What another process needs to map the records, besides the file descriptor of their memory."""

    schema: Schema
    count: int
    body_bytes: int
    """Size of all records together. With lists, the offset of each record follows behind them."""

    record_bytes: int
    """Bytes of each record, or 0 if sizes differ."""

    @property
    def size_bytes(self) -> int:
        return self.body_bytes + self._padding + (0 if self.record_bytes else (self.count + 1) * _START_BYTES)

    @property
    def _padding(self) -> int:
        return -self.body_bytes % _START_BYTES

    @property
    def starts_offset(self) -> int:
        return self.body_bytes + self._padding


class RecordStore:
    """Encoded records. `fd` is anonymous memory; it is freed with the last process that holds it."""

    def __init__(self, fd: int, extent: Extent) -> None:
        """Maps records that `encode` wrote. Takes ownership of the descriptor."""
        self.fd, self.extent = fd, extent
        size = os.fstat(fd).st_size
        if size != extent.size_bytes:
            os.close(fd)
            raise RecordError(f"the memory of the records has {size} bytes, {extent.size_bytes} expected")
        self._memory = np.frombuffer(mmap.mmap(fd, size), np.uint8)

    @classmethod
    def encode(cls, schema: Schema, columns: Columns) -> RecordStore:
        """Raises RecordError for a field and row that do not fit the schema, MemoryError for too little memory."""
        count = len(columns.labels)
        if not count:
            raise RecordError("no rows")
        check_columns(schema, columns)
        native = RecordColumns(
            schema.byte_order is ByteOrder.BIG,
            columns.labels,
            schema.label is LabelKind.BINARY,
            columns.dense,
            [part.kind is DenseKind.BFLOAT16 for part in schema.dense],
        )
        for field, column in zip(schema.ids, columns.ids, strict=True):
            if column.offsets is None:
                native.add_ids(column.values, field.width_bytes, field.length)
            else:
                native.add_list(column.values, column.offsets, field.width_bytes, field.length_bytes)
        extent = Extent(schema=schema, count=count, body_bytes=native.size_bytes, record_bytes=native.record_bytes)
        fd = os.memfd_create("sennit-records", os.MFD_CLOEXEC)
        try:
            # Allocate all pages now. A page missing later would raise SIGBUS instead of an error.
            os.posix_fallocate(fd, 0, extent.size_bytes)
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise MemoryError(f"{count} records take {extent.size_bytes} bytes: {error.strerror}") from None
        store = cls(fd, extent)
        native.encode(store._bytes, store._starts)
        return store

    def __reduce__(self) -> tuple[Callable[..., RecordStore], tuple[Any, Extent]]:
        """Pickling for a child process passes the memory itself, not a copy of its content."""
        return _mapped, (DupFd(self.fd), self.extent)

    def __len__(self) -> int:
        return self.extent.count

    @property
    def _bytes(self) -> NDArray[np.uint8]:
        return self._memory[: self.extent.body_bytes]

    @property
    def _starts(self) -> NDArray[np.uint64] | None:
        return None if self.extent.record_bytes else self._memory[self.extent.starts_offset :].view(np.uint64)

    def record(self, number: int) -> bytes:
        """One record as it is sent on the wire."""
        if self._starts is None:
            begin, end = (at * self.extent.record_bytes for at in (number, number + 1))
        else:
            begin, end = (int(at) for at in self._starts[number : number + 2])
        return self._bytes[begin:end].tobytes()

    def sender(self, *, session: int, body_max_bytes: int = RECORD_MAX_BYTES) -> RecordSender:
        """A sender for one socket. Raises ValueError if a record is longer than a packet's body may be."""
        extent = self.extent
        return RecordSender(
            self._bytes, self._starts, extent.record_bytes, extent.schema.schema_id, session, body_max_bytes
        )

    def close(self) -> None:
        """The memory stays mapped as long as a sender exists."""
        os.close(self.fd)


def _mapped(fd: Any, extent: Extent) -> RecordStore:
    return RecordStore(fd.detach(), extent)


def check_columns(schema: Schema, columns: Columns) -> None:
    """Checks everything that `encode_records` refuses, before anything is written."""
    count = len(columns.labels)
    if columns.dense.shape != (count, len(schema.dense)):
        raise RecordError(f"dense is {columns.dense.shape}; expected: {(count, len(schema.dense))}")
    if len(columns.ids) != len(schema.ids):
        raise RecordError(f"{len(columns.ids)} columns of ids; the schema has {len(schema.ids)}")
    if schema.label is LabelKind.BINARY:
        wrong = np.flatnonzero((columns.labels != 0) & (columns.labels != 1))
        if len(wrong):
            raise RecordError(f"row {wrong[0]}: label {columns.labels[wrong[0]]}; allowed: 0 or 1")
    for number, part in enumerate(schema.dense):
        if part.kind is DenseKind.BFLOAT16:
            bits = np.ascontiguousarray(columns.dense[:, number]).view(np.uint32)
            wrong = np.flatnonzero(bits & 0xFFFF)
            if len(wrong):
                value = columns.dense[wrong[0], number]
                raise RecordError(f"row {wrong[0]}: {part.name} {value!r} is no bfloat16")
    for field, column in zip(schema.ids, columns.ids, strict=True):
        _check_ids(field, column, count)


def _check_ids(field: Ids, column: IdColumn, count: int) -> None:
    if field.is_list != (column.offsets is not None):
        kind, other = ("list", "a fixed number of ids") if field.is_list else ("fixed number of ids", "lists")
        raise RecordError(f"{field.name} is a {kind}, but its column has {other}")
    bounds = np.iinfo(field.dtype)
    if len(column.values):
        for value in (int(column.values.min()), int(column.values.max())):
            if not bounds.min <= value <= bounds.max:
                raise RecordError(f"{field.name} has the id {value}; allowed: {bounds.min} to {bounds.max}")
    if column.offsets is None:
        if len(column.values) != count * field.length:
            raise RecordError(f"{field.name} has {len(column.values)} ids; expected: {count} × {field.length}")
        return
    lengths = np.diff(column.offsets)
    wrong = np.flatnonzero((lengths < 0) | (lengths > field.length))
    if len(wrong):
        raise RecordError(f"row {wrong[0]}: {field.name} has {lengths[wrong[0]]} ids; allowed: at most {field.length}")
