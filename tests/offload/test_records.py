# SPDX-License-Identifier: Apache-2.0
"""Records: the golden packets of docs/reference/records.md, every truncation, and values that do not fit a schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.offload._native import packet_checksum
from sennit.offload.admission import Verdict, check_header, check_sequence
from sennit.offload.columns import Ragged
from sennit.offload.errors import RecordError
from sennit.offload.records import HEADER, Header, Rows, decode_records, encode_packets, encode_records, sealed
from sennit.offload.schema import Dense, DenseKind, Ids, Schema
from tests.offload.agreement import assert_same_bits, assert_same_column
from tests.offload.strategies import random_rows, schemas

DOCUMENT = json.loads((Path(__file__).parents[1] / "vectors" / "records.json").read_text())


def rows_of(vector: dict[str, Any]) -> Rows:
    columns: dict[str, Any] = {
        name: np.array([float(value) for value in values], np.float32) for name, values in vector["dense"].items()
    }
    for name, rows in vector["ids"].items():
        flat = np.array([value for row in rows for value in row], np.int64)
        columns[name] = Ragged(np.array([len(row) for row in rows], np.int32), flat)
    return Rows(labels=np.array(vector["labels"], np.float32), columns=columns)


def assert_same_rows(found: Rows, expected: Rows) -> None:
    assert_same_bits(found.labels, expected.labels, "labels")
    assert found.columns.keys() == expected.columns.keys()
    for name, column in found.columns.items():
        assert_same_column(column, expected.columns[name], name)


@pytest.mark.parametrize("vector", DOCUMENT["vectors"], ids=["little", "big"])
def test_golden_packets(vector: dict[str, Any]) -> None:
    schema, packet, expected = Schema.from_json(vector["schema"]), bytes.fromhex(vector["packet"]), rows_of(vector)
    header = check_header(packet, schema_id=schema.schema_id, session=DOCUMENT["session"], batch_rows=16)
    assert isinstance(header, Header)
    assert (header.batch, header.row) == (DOCUMENT["batch"], DOCUMENT["row"])
    assert_same_rows(decode_records(schema, packet[HEADER.size :], header.records), expected)
    records = encode_records(schema, expected)
    made = encode_packets(
        schema, records, session=DOCUMENT["session"], batch=DOCUMENT["batch"], row=DOCUMENT["row"], body_max_bytes=1400
    )
    assert made == [packet]


def test_the_checksum_is_xxh64_with_zeros_in_its_place() -> None:
    packet = bytes(range(24)) + b"whatever" + bytes(range(69))
    assert packet_checksum(packet) == 0x173AE6A98D16EA6C
    assert packet_checksum(sealed(packet)) == packet_checksum(packet)
    with pytest.raises(ValueError, match="a packet of 31 bytes; allowed: 32 or more"):
        packet_checksum(packet[:31])


@given(schema=schemas(), content=st.integers(0, 1 << 32), count=st.integers(1, 9))
def test_what_is_encoded_is_decoded(schema: Schema, content: int, count: int) -> None:
    rows = random_rows(schema, count, np.random.default_rng(content))
    body = b"".join(encode_records(schema, rows))
    assert_same_rows(decode_records(schema, body, count), rows)
    for wrong in (body[:-1], body + b"\0"):
        with pytest.raises(RecordError):
            decode_records(schema, wrong, count)


@given(junk=st.binary(max_size=120))
def test_junk_has_a_verdict(junk: bytes) -> None:
    found = check_header(junk, schema_id=1, session=2, batch_rows=8)
    assert isinstance(found, Verdict)


def test_batches_count_modulo_their_width() -> None:
    header = Header(schema_id=0, session=0, batch=1, row=4, records=1, body_bytes=0)
    assert check_sequence(header, open_batch=(1 << 32) - 1, next_row=0) is Verdict.NO_CREDIT
    assert check_sequence(header, open_batch=3, next_row=0) is Verdict.DUPLICATE
    assert check_sequence(header, open_batch=1, next_row=5) is Verdict.DUPLICATE
    assert check_sequence(header, open_batch=1, next_row=3) is Verdict.OUT_OF_SEQUENCE
    assert check_sequence(header, open_batch=1, next_row=4) is Verdict.ACCEPTED


@pytest.mark.parametrize(
    ("schema", "columns", "message"),
    [
        (Schema(ids=(Ids(name="a", width_bytes=1),)), {"a": Ragged(np.ones(1, np.int32), np.array([256]))}, "id 256"),
        (Schema(ids=(Ids(name="a"),)), {"a": Ragged(np.zeros(1, np.int32), np.zeros(0, np.int64))}, "a has 0 ids"),
        (
            Schema(ids=(Ids(name="a", length=2, is_list=True),)),
            {"a": Ragged(np.full(1, 3, np.int32), np.zeros(3, np.int64))},
            "a has 3 ids; allowed: at most 2",
        ),
        (
            Schema(dense=(Dense(name="x", kind=DenseKind.BFLOAT16),)),
            {"x": np.array([0.1], np.float32)},
            "no bfloat16",
        ),
        (Schema(dense=(Dense(name="x"),)), {}, "no dense column 'x'"),
    ],
)
def test_what_does_not_fit_is_named(schema: Schema, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        encode_records(schema, Rows(labels=np.zeros(1, np.float32), columns=columns))
