# SPDX-License-Identifier: Apache-2.0
"""Records encoded and packed by the native core: byte for byte as records.py does it. Bad input is refused."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.offload.columns import Ragged
from sennit.offload.errors import RecordError
from sennit.offload.record_store import Columns, IdColumn, RecordStore
from sennit.offload.records import Rows, encode_packets, encode_records
from sennit.offload.schema import Dense, DenseKind, Ids, LabelKind, Schema
from tests.offload.strategies import random_rows, schemas

SESSION, BATCH = 0xA1B2C3D4, 0xFFFFFFFE
FIXED = Schema(dense=(Dense(name="x"),), ids=(Ids(name="user"), Ids(name="pair", width_bytes=2, length=2)))
JAGGED = Schema(ids=(Ids(name="seen", length=300, is_list=True),))


def columns_of(schema: Schema, rows: Rows, *, narrow: bool = False) -> Columns:
    """Returns the rows as a data set in memory has them. `narrow`: ids are int32 if they fit."""
    dense = [rows.columns[part.name] for part in schema.dense]
    columns = []
    for part in schema.ids:
        found = rows.columns[part.name]
        assert isinstance(found, Ragged)
        bounds = np.iinfo(np.int32)
        fits = not len(found.values) or bounds.min <= found.values.min() <= found.values.max() <= bounds.max
        values = found.values.astype(np.int32) if narrow and fits else found.values
        offsets = np.concatenate([[0], np.cumsum(found.lengths, dtype=np.int64)]) if part.is_list else None
        columns.append(IdColumn(values=values, offsets=offsets))
    matrix = np.ascontiguousarray(np.array(dense, np.float32).reshape(len(dense), len(rows)).T)
    return Columns(labels=rows.labels, dense=matrix, ids=tuple(columns))


@given(
    schema=schemas(),
    content=st.integers(0, 1 << 32),
    count=st.integers(1, 140),
    narrow=st.booleans(),
    body=st.sampled_from([600, 1400, 3392, 60_000]),
    data=st.data(),
)
def test_packets_are_those_of_the_reference(
    schema: Schema, content: int, count: int, narrow: bool, body: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(content)
    rows = random_rows(schema, count, rng)
    records = encode_records(schema, rows)
    store = RecordStore.encode(schema, columns_of(schema, rows, narrow=narrow))
    try:
        assert [store.record(number) for number in range(count)] == records
        order = rng.integers(0, count, data.draw(st.integers(1, 100)))
        first = data.draw(st.integers(0, len(order)))
        longest = max(len(record) for record in records)
        sender = store.sender(session=SESSION, body_max_bytes=max(body, longest))
        expected = encode_packets(
            schema,
            [records[number] for number in order[first:]],
            session=SESSION,
            batch=BATCH,
            row=first,
            body_max_bytes=max(body, longest),
        )
        assert sender.packets(order, BATCH, first) == expected
    finally:
        store.close()


def made(schema: Schema, count: int, rng: np.random.Generator) -> RecordStore:
    return RecordStore.encode(schema, columns_of(schema, random_rows(schema, count, rng)))


def test_another_process_can_map_them(rng: np.random.Generator) -> None:
    for schema in (FIXED, JAGGED):
        store = made(schema, 50, rng)
        again = RecordStore(os.dup(store.fd), store.extent)
        assert [again.record(n) for n in range(50)] == [store.record(n) for n in range(50)]
        again.close()
        with pytest.raises(RecordError, match="expected"):
            RecordStore(os.memfd_create("other"), store.extent)
        store.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A receiver on the loopback interface, and a sender connected to it."""
    with (
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind(("::1", 0))
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        sender.connect(receiver.getsockname())
        sender.setblocking(False)
        yield receiver, sender


def received(receiver: socket.socket, count: int) -> list[bytes]:
    deadline = time.monotonic() + 10.0
    found: list[bytes] = []
    while len(found) < count and select.select([receiver], [], [], max(0.0, deadline - time.monotonic()))[0]:
        found.append(receiver.recv(1 << 16))
    return found


@pytest.mark.parametrize("schema", [FIXED, JAGGED], ids=["one size", "many sizes"])
@pytest.mark.parametrize("packets_max", [1, 7, 1000])
def test_what_is_sent_arrives(
    schema: Schema, packets_max: int, pair: tuple[socket.socket, socket.socket], rng: np.random.Generator
) -> None:
    receiver, sender = pair
    store = made(schema, 100, rng)
    records = rng.permutation(100)
    native = store.sender(session=SESSION, body_max_bytes=1250)
    expected = native.packets(records, BATCH, 3)
    row, found = 3, list[bytes]()
    while row < len(records):
        row, packets, error = native.send(sender.fileno(), records, BATCH, row, packets_max)
        assert (error, packets) == (0, min(packets_max, len(expected) - len(found)))
        found += received(receiver, packets)
    assert found == expected
    store.close()


def test_one_that_does_not_listen_is_an_error_and_can_be_sent_to_again(
    pair: tuple[socket.socket, socket.socket], rng: np.random.Generator
) -> None:
    receiver, sender = pair
    store = made(FIXED, 10, rng)
    native = store.sender(session=SESSION, body_max_bytes=40)
    records = np.arange(10)
    address = receiver.getsockname()
    receiver.close()
    deadline = time.monotonic() + 10.0
    error = 0
    while not error and time.monotonic() < deadline:
        _, _, error = native.send(sender.fileno(), records, BATCH, 0, 100)
    assert os.strerror(error) == "Connection refused"
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as reborn:
        reborn.bind(address)
        native.send(sender.fileno(), records, BATCH, 0, 0)
        row = sent = 0
        while row < 10 and time.monotonic() < deadline:
            row, packets, error = native.send(sender.fileno(), records, BATCH, row, 100)
            assert error in (0, 111)
            sent += packets
        assert received(reborn, sent)[-1] == native.packets(records, BATCH, 9)[-1]
    store.close()


def test_packets_beyond_the_mtu_are_refused_with_or_without_segmentation(rng: np.random.Generator) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sender:
        sender.connect(("::1", 9))
        sender.setsockopt(socket.IPPROTO_IPV6, 23, 2)  # IPV6_MTU_DISCOVER, IPV6_PMTUDISC_DO
        sender.setsockopt(socket.IPPROTO_IPV6, 24, 1280)  # IPV6_MTU
        sender.setblocking(False)
        store = made(FIXED, 1000, rng)
        native = store.sender(session=SESSION, body_max_bytes=2000)
        row, packets, error = native.send(sender.fileno(), np.arange(1000), BATCH, 0, 100)
        assert (row, packets, os.strerror(error)) == (0, 0, "Message too long")
        store.close()


def ids(values: list[int], offsets: list[int] | None = None) -> IdColumn:
    return IdColumn(values=np.array(values, np.int64), offsets=None if offsets is None else np.array(offsets, np.int64))


USER, PAIR = ids([1, 2]), ids([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("schema", "columns", "message"),
    [
        (FIXED, (USER, ids([1, 2, 3, 70000])), "pair has the id 70000; allowed: 0 to 65535"),
        (FIXED, (ids([-1, 2]), PAIR), "user has the id -1; allowed: 0 to 4294967295"),
        (FIXED, (USER, ids([1, 2, 3])), "pair has 3 ids; expected: 2 × 2"),
        (FIXED, (ids([1, 2], [0, 1, 2]), PAIR), "user is a fixed number of ids, but its column has lists"),
        (FIXED, (USER,), "1 columns of ids; the schema has 2"),
        (JAGGED, (USER,), "seen is a list, but its column has a fixed number of ids"),
        (JAGGED, (ids([1] * 302, [0, 301, 302]),), "row 0: seen has 301 ids; allowed: at most 300"),
        (JAGGED, (ids([1, 2], [0, 2, 1]),), "row 1: seen has -1 ids"),
    ],
)
def test_ids_that_do_not_fit_are_named(schema: Schema, columns: tuple[IdColumn, ...], message: str) -> None:
    numbers = np.zeros((2, len(schema.dense)), np.float32)
    with pytest.raises(RecordError, match=message):
        RecordStore.encode(schema, Columns(labels=np.zeros(2, np.float32), dense=numbers, ids=columns))


@pytest.mark.parametrize(
    ("labels", "dense", "message"),
    [
        ([0.5, 0], [[1], [2]], "row 0: label 0.5; allowed: 0 or 1"),
        ([1, 0], [[1], [2], [3]], r"dense is \(3, 1\); expected: \(2, 1\)"),
        ([], [[]], "no rows"),
    ],
)
def test_numbers_that_do_not_fit_are_named(labels: list[float], dense: list[list[float]], message: str) -> None:
    columns = Columns(labels=np.array(labels, np.float32), dense=np.array(dense, np.float32), ids=(USER, PAIR))
    with pytest.raises(RecordError, match=message):
        RecordStore.encode(FIXED, columns)


def test_numbers_that_are_no_bfloat16_and_labels_of_any_kind() -> None:
    short = Schema(dense=(Dense(name="x", kind=DenseKind.BFLOAT16),), label=LabelKind.FLOAT32)
    labels = np.array([0.25], np.float32)
    store = RecordStore.encode(short, Columns(labels=labels, dense=np.array([[1.5]], np.float32), ids=()))
    assert store.record(0) == bytes.fromhex("0000803ec03f")
    store.close()
    with pytest.raises(RecordError, match=r"row 0: x .* is no bfloat16"):
        RecordStore.encode(short, Columns(labels=labels, dense=np.array([[0.1]], np.float32), ids=()))


def test_the_sender_refuses_what_it_cannot_send(rng: np.random.Generator) -> None:
    store = made(FIXED, 10, rng)
    with pytest.raises(ValueError, match="record 0 has 13 bytes; allowed: 12"):
        store.sender(session=1, body_max_bytes=12)
    native = store.sender(session=1)
    for wrong in ([10], [-1]):
        with pytest.raises(ValueError, match=f"record {wrong[0]}; there are 10"):
            native.packets(np.array(wrong), 0, 0)
    assert native.packets(np.arange(10), 0, 10) == []
    store.close()
