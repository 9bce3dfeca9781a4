# SPDX-License-Identifier: Apache-2.0
"""Decides the verdict on a datagram. The reference for ebpf/include/feed.h (docs/reference/records.md)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from sennit.offload._native import packet_checksum
from sennit.offload.records import HEADER, MAGIC, VERSION, Header


class Verdict(enum.IntEnum):
    """Every datagram gets exactly one verdict. `enum feed_verdict` has the same numbers."""

    ACCEPTED = 0
    TRUNCATED = 1
    FOREIGN = 2
    WRONG_VERSION = 3
    WRONG_SCHEMA = 4
    WRONG_SESSION = 5
    OVERSIZED = 6
    MALFORMED = 7
    DUPLICATE = 8
    OUT_OF_SEQUENCE = 9
    NO_CREDIT = 10
    BUSY = 11
    CORRUPT = 12


@dataclass(kw_only=True, slots=True)
class FeedCounters:
    """Datagrams and records received, counted by name."""

    datagrams: dict[Verdict, int] = field(default_factory=lambda: dict.fromkeys(Verdict, 0))
    records: int = 0
    """Records in accepted datagrams."""

    filtered: int = 0
    """Accepted records that the plan did not keep."""

    body_bytes: int = 0
    """Body bytes of accepted datagrams."""

    def as_mapping(self) -> Mapping[str, int]:
        counted = {verdict.name.lower(): number for verdict, number in self.datagrams.items()}
        return {**counted, "records": self.records, "filtered": self.filtered, "body_bytes": self.body_bytes}


def check_header(datagram: bytes, *, schema_id: int, session: int, batch_rows: int) -> Verdict | Header:
    """Returns the parsed header, or the verdict that refuses the datagram."""
    if len(datagram) < HEADER.size:
        return Verdict.TRUNCATED
    magic, version, flags, schema, session_found, batch, row, records, body_bytes, checksum = HEADER.unpack_from(
        datagram
    )
    if magic != MAGIC:
        return Verdict.FOREIGN
    if version != VERSION:
        return Verdict.WRONG_VERSION
    if schema != schema_id:
        return Verdict.WRONG_SCHEMA
    if session_found != session:
        return Verdict.WRONG_SESSION
    if HEADER.size + body_bytes != len(datagram):
        return Verdict.TRUNCATED if HEADER.size + body_bytes > len(datagram) else Verdict.OVERSIZED
    if checksum != packet_checksum(datagram):
        return Verdict.CORRUPT
    if flags or not records or row + records > batch_rows:
        return Verdict.MALFORMED
    return Header(schema_id=schema, session=session, batch=batch, row=row, records=records, body_bytes=body_bytes)


def check_sequence(header: Header, *, open_batch: int, next_row: int) -> Verdict:
    """Compares a packet with the slot's batch and the next row that it expects. Batch numbers wrap at 2^32."""
    ahead = (header.batch - open_batch + (1 << 31)) % (1 << 32) - (1 << 31)
    if ahead < 0:
        return Verdict.DUPLICATE
    if ahead > 0:
        return Verdict.NO_CREDIT
    if header.row < next_row:
        return Verdict.DUPLICATE
    return Verdict.OUT_OF_SEQUENCE if header.row > next_row else Verdict.ACCEPTED
