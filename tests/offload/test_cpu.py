# SPDX-License-Identifier: Apache-2.0
"""The target `cpu` behind a socket: what arrives over loopback is in the batch, and errors name what is wrong."""

from __future__ import annotations

import errno
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sennit.offload.admission import Verdict
from sennit.offload.batches import BatchLayout
from sennit.offload.cpu import CpuReceiver
from sennit.offload.host_receiver import HostReceiver
from sennit.offload.operators import Clamp, FirstX, KeepLength, KeepRange, Sample, SigridHash
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.records import encode_packets, encode_records
from sennit.offload.schema import ByteOrder, Dense, DenseKind, Ids, LabelKind, Schema
from tests.offload.agreement import assert_same_batch
from tests.offload.strategies import random_rows

SESSION = 77
BATCH_ROWS = 200
DEADLINE_S = 30.0
PLAN = FeaturePlan(
    schema=Schema(
        dense=(Dense(name="x"), Dense(name="y", kind=DenseKind.BFLOAT16)),
        ids=(Ids(name="user", width_bytes=8), Ids(name="seen", length=300, is_list=True, width_bytes=2)),
        label=LabelKind.FLOAT32,
        byte_order=ByteOrder.BIG,
    ),
    columns={
        "cheap": Clamp(column="x", low=0.0, high=1.0),
        "recent": FirstX(column="seen", count=5),
        "rows": SigridHash(column="recent", salt=1, max_value=1000),
    },
    dense=("cheap", "y"),
    sparse=(Sparse(column="rows", rows=1000), Sparse(column="user")),
    keep=(
        Sample(fraction=0.9, seed=5),
        KeepRange(column="x", low=-2.0, high=2.0),
        KeepLength(column="seen", least=1, most=290),
    ),
)
LAYOUT = BatchLayout(plan=PLAN, batch_rows=BATCH_ROWS, slots=2)


@pytest.fixture
def receiver() -> Iterator[CpuReceiver]:
    with CpuReceiver(LAYOUT, session=SESSION) as found:
        yield found


def packets_of(batch: int, rng: np.random.Generator, body_max_bytes: int = 1400) -> list[bytes]:
    records = encode_records(PLAN.schema, random_rows(PLAN.schema, BATCH_ROWS, rng))
    return encode_packets(PLAN.schema, records, session=SESSION, batch=batch, body_max_bytes=body_max_bytes)


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_batches_come_from_a_socket(
    receiver: CpuReceiver, rng: np.random.Generator, family: socket.AddressFamily, address: str
) -> None:
    port = receiver.listen(address)
    with HostReceiver(LAYOUT, session=SESSION) as expected, socket.socket(family, socket.SOCK_DGRAM) as sender:
        for batch in range(5):
            for packet in packets_of(batch, rng):
                for datagram in (packet[:30], packet, b""):
                    sender.sendto(datagram, (address, port))
                    expected.deliver(datagram)
                wait_until(lambda: receiver.counters() == expected.counters())
            assert receiver.rows_taken(batch) == BATCH_ROWS
            assert_same_batch(receiver.batch(batch), expected.batch(batch))
            receiver.release(batch)
            expected.release(batch)
    assert receiver.kernel_drops == 0


def test_packets_of_one_send_are_taken_apart(receiver: CpuReceiver, rng: np.random.Generator) -> None:
    """UDP_SEGMENT at the sender and UDP_GRO at the receiver put many datagrams in one system call."""
    record = packets_of(0, rng, body_max_bytes=3000)[0]
    # The datagrams count as foreign. Only their size matters here.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.IPPROTO_UDP, 103, 500)  # UDP_SEGMENT (linux/udp.h)
        sender.sendto(b"\0" * 4700 + record[:30], ("127.0.0.1", receiver.listen("127.0.0.1")))
    wait_until(lambda: receiver.counters().datagrams[Verdict.FOREIGN] == 10)


def test_a_batch_stays_when_its_slot_is_released(receiver: CpuReceiver, rng: np.random.Generator) -> None:
    for packet in packets_of(0, rng):
        receiver.deliver(packet)
    batch = receiver.batch(0)
    columns: list[NDArray[Any]] = [batch.labels, batch.dense, batch.lengths, *batch.values]
    kept = [column.copy() for column in columns]
    receiver.release(0)
    for packet in packets_of(2, rng):
        receiver.deliver(packet)
    receiver.batch(2)
    receiver.close()
    for column, copy in zip(columns, kept, strict=True):
        np.testing.assert_array_equal(column, copy)


def test_what_cannot_be_listened_at_is_named(receiver: CpuReceiver) -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1 port 9 is not an address of this machine") as refused:
        receiver.listen("192.0.2.1", 9)
    assert refused.value.errno == errno.EADDRNOTAVAIL
    with pytest.raises(ValueError, match='"nowhere" is not an IPv4 or IPv6 address'):
        receiver.listen("nowhere")
    with pytest.raises(ValueError, match="port 65536; allowed: 0 to 65535"):
        receiver.listen("127.0.0.1", 65536)
    with pytest.raises(ValueError, match="receive buffer of 0 bytes; allowed: 1 to 1073741823"):
        receiver.listen("127.0.0.1", receive_buffer_bytes=0)
    port = receiver.listen("127.0.0.1")
    with pytest.raises(ValueError, match=f"listens already, at port {port}"):
        receiver.listen("127.0.0.1")
    with CpuReceiver(LAYOUT, session=SESSION) as other, pytest.raises(OSError, match="taken by another process"):
        other.listen("127.0.0.1", port)


def test_the_port_is_free_once_the_receiver_is_closed(receiver: CpuReceiver) -> None:
    port = receiver.listen("127.0.0.1")
    receiver.close()
    receiver.close()
    with CpuReceiver(LAYOUT, session=SESSION) as other:
        assert other.listen("127.0.0.1", port) == port


def test_a_small_receive_buffer_is_told(receiver: CpuReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    class Granted:
        port, receive_buffer_bytes = 4800, 212_992

        def stop(self, timeout_ms: int) -> None:
            pass

    monkeypatch.setattr("sennit.offload.cpu.SocketReader", lambda *_: Granted())
    with pytest.warns(RuntimeWarning, match="grants a receive buffer of 212992 of 33554432 bytes"):
        receiver.listen("127.0.0.1")


def test_what_was_asked_for_is_no_warning(receiver: CpuReceiver) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        receiver.listen("127.0.0.1", receive_buffer_bytes=1 << 16)
