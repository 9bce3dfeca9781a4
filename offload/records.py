# SPDX-License-Identifier: Apache-2.0
"""Records on the wire and the packets that carry them. docs/reference/records.md is the specification."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sennit.offload._native import packet_checksum
from sennit.offload.columns import ColumnValues, Ragged, dense_of, ids_of
from sennit.offload.errors import RecordError
from sennit.offload.schema import ByteOrder, DenseKind, LabelKind, Schema

MAGIC: Final = 0x5E17
VERSION: Final = 2
# Magic, version, flags, schema, session, batch, first row, record count, body bytes, checksum. Network byte order.
HEADER: Final = struct.Struct(">HBBIIIIHHQ")
_CHECKSUM: Final = struct.Struct(">Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The header of a packet of records."""

    schema_id: int
    session: int
    """A random number for each run, so that packets of other runs are recognised."""

    batch: int
    """The number of the batch that all of the packet's records belong to."""

    row: int
    """Row of the packet's first record. Batch and row together are the record's sequence number."""

    records: int
    body_bytes: int
    version: int = VERSION
    flags: int = 0

    def encode(self, body: bytes) -> bytes:
        """The packet: this header with its checksum, and the body."""
        unsealed = HEADER.pack(
            MAGIC,
            self.version,
            self.flags,
            self.schema_id,
            self.session,
            self.batch,
            self.row,
            self.records,
            self.body_bytes,
            0,
        )
        return sealed(unsealed + body)


def sealed(packet: bytes) -> bytes:
    """The packet with a correct checksum in place of the one that it has."""
    return packet[: HEADER.size - _CHECKSUM.size] + _CHECKSUM.pack(packet_checksum(packet)) + packet[HEADER.size :]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The content of some records, column by column."""

    labels: NDArray[np.float32]
    columns: dict[str, ColumnValues] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)


def encode_records(schema: Schema, rows: Rows) -> list[bytes]:
    """Encodes each row as a record. Raises RecordError that names the field and row that do not fit."""
    order: Literal["<", ">"] = "<" if schema.byte_order is ByteOrder.LITTLE else ">"
    parts: list[list[bytes]] = [[] for _ in range(len(rows))]
    if schema.label is LabelKind.BINARY:
        _check_binary(rows.labels)
        _append(parts, rows.labels.astype(np.uint8).reshape(-1, 1))
    else:
        _append(parts, rows.labels.astype(f"{order}f4").reshape(-1, 1))
    for dense in schema.dense:
        bits = dense_of(rows.columns, dense.name).view(np.uint32)
        if dense.kind is DenseKind.FLOAT32:
            _append(parts, bits.astype(f"{order}u4").reshape(-1, 1))
        else:
            if np.any(bits & 0xFFFF):
                row = int(np.flatnonzero(bits & 0xFFFF)[0])
                raise RecordError(f"row {row}: {dense.name} {rows.columns[dense.name]!r} is no bfloat16")
            _append(parts, (bits >> 16).astype(f"{order}u2").reshape(-1, 1))
    tails: list[list[bytes]] = [[] for _ in range(len(rows))]
    for ids in schema.ids:
        found = ids_of(rows.columns, ids.name)
        bounds = np.iinfo(ids.dtype)
        outside = (found.values < bounds.min) | (found.values > bounds.max)
        if np.any(outside):
            value = int(found.values[np.flatnonzero(outside)[0]])
            raise RecordError(f"{ids.name} has the id {value}; allowed: {bounds.min} to {bounds.max}")
        wrong = found.lengths > ids.length if ids.is_list else found.lengths != ids.length
        if np.any(wrong):
            row = int(np.flatnonzero(wrong)[0])
            most = "at most " if ids.is_list else ""
            raise RecordError(f"row {row}: {ids.name} has {found.lengths[row]} ids; allowed: {most}{ids.length}")
        values = found.values.astype(ids.dtype.newbyteorder(order))
        for row, (start, length) in enumerate(zip(found.starts, found.lengths, strict=True)):
            if ids.is_list:
                parts[row].append(struct.pack(f"{order}{'B' if ids.length_bytes == 1 else 'H'}", length))
            (tails if ids.is_list else parts)[row].append(values[start : start + length].tobytes())
    return [b"".join([*head, *tail]) for head, tail in zip(parts, tails, strict=True)]


def encode_packets(
    schema: Schema, records: Sequence[bytes], *, session: int, batch: int, row: int = 0, body_max_bytes: int
) -> list[bytes]:
    """Packs the records in order into datagrams, as many per datagram as fit."""
    packets: list[bytes] = []
    body: list[bytes] = []
    size = first = 0
    for number, record in enumerate([*records, b""]):
        if body and (number == len(records) or size + len(record) > body_max_bytes):
            header = Header(
                schema_id=schema.schema_id,
                session=session,
                batch=batch,
                row=row + first,
                records=len(body),
                body_bytes=size,
            )
            packets.append(header.encode(b"".join(body)))
            body, size, first = [], 0, number
        if len(record) > body_max_bytes:
            raise RecordError(f"record {number} has {len(record)} bytes; allowed: {body_max_bytes}")
        body.append(record)
        size += len(record)
    return packets


def decode_records(schema: Schema, body: bytes, count: int) -> Rows:
    """Decodes the `count` records of a packet's body. Raises RecordError for a bad end or a list that is too long."""
    order: Literal["<", ">"] = "<" if schema.byte_order is ByteOrder.LITTLE else ">"
    labels = np.zeros(count, np.float32)
    dense = {part.name: np.zeros(count, np.uint32) for part in schema.dense}
    lengths = {part.name: np.zeros(count, np.int32) for part in schema.ids}
    values: dict[str, list[NDArray[np.int64]]] = {part.name: [] for part in schema.ids}
    at = 0

    def take(dtype: str | np.dtype[Any], many: int) -> NDArray[Any]:
        nonlocal at
        kind = np.dtype(dtype).newbyteorder(order)
        if at + many * kind.itemsize > len(body):
            raise RecordError(f"the body ends at byte {len(body)}, inside a record")
        found = np.frombuffer(body, kind, many, at)
        at += many * kind.itemsize
        return found

    for row in range(count):
        if schema.label is LabelKind.BINARY:
            labels[row] = take("u1", 1)[0] != 0
        else:
            labels[row : row + 1].view(np.uint32)[:] = take("u4", 1)
        for number in schema.dense:
            bits = take("u4", 1) if number.kind is DenseKind.FLOAT32 else take("u2", 1).astype(np.uint32) << 16
            dense[number.name][row] = bits[0]
        for ids in schema.ids:
            if ids.is_list:
                lengths[ids.name][row] = length = int(take(f"u{ids.length_bytes}", 1)[0])
                if length > ids.length:
                    raise RecordError(f"{ids.name} has {length} ids; allowed: at most {ids.length}")
            else:
                lengths[ids.name][row] = ids.length
                values[ids.name].append(take(ids.dtype, ids.length).astype(np.int64))
        for ids in schema.lists:
            values[ids.name].append(take(ids.dtype, int(lengths[ids.name][row])).astype(np.int64))
    if at != len(body):
        raise RecordError(f"{len(body) - at} bytes behind the last record")
    columns: dict[str, ColumnValues] = {name: bits.view(np.float32) for name, bits in dense.items()}
    for name, found in values.items():
        columns[name] = Ragged(lengths[name], np.concatenate([np.zeros(0, np.int64), *found]))
    return Rows(labels=labels, columns=columns)


def _append(parts: list[list[bytes]], cells: NDArray[Any]) -> None:
    for part, cell in zip(parts, cells, strict=True):
        part.append(cell.tobytes())


def _check_binary(labels: NDArray[np.float32]) -> None:
    wrong = np.flatnonzero((labels != 0) & (labels != 1))
    if len(wrong):
        raise RecordError(f"row {wrong[0]}: label {labels[wrong[0]]}; allowed: 0 or 1")
