# SPDX-License-Identifier: Apache-2.0
"""`sennit bench feed`: what one core of a feeder delivers, for 26 ids and 13 dense features per record.

The core packs the records of random samples, sends them over a virtual link, and runs the plan's XDP program on them,
which happens in the sender's time. Python's reference packs the same records for comparison.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from sennit.ebpf.links import XdpMode, attach_xdp
from sennit.offload._native import RecordSender
from sennit.offload.batches import BatchLayout
from sennit.offload.columns import Ragged
from sennit.offload.interfaces import own_ends
from sennit.offload.record_store import Columns, IdColumn, RecordStore
from sennit.offload.records import HEADER, Rows, encode_packets, encode_records
from sennit.offload.xdp import XdpReceiver
from sennit.runtime.calibrate.machine import describe, one_core
from sennit.testbed.bench.samples.offload import DENSE, TABLES, median_ns, shapes
from sennit.testbed.topology import Planes

SHAPE: Final = "26 ids hashed, 13 clamped"
BATCH_ROWS: Final = 4096
PYTHON_ROWS: Final = 1024
# Datagrams of a batch in flight, as a trainer orders them.
WINDOW_PACKETS: Final = 48
MTUS: Final = (1500, 3506)
IP_UDP_BYTES: Final = 48
SESSION: Final = 1
UDP_PORT: Final = 4800
DEADLINE_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """The rate of one way to do one thing."""

    what: str
    records_a_packet: int
    ns_a_record: float

    @property
    def records_per_s(self) -> float:
        return 1e9 / self.ns_a_record


def columns(count: int, seed: int) -> Columns:
    rng = np.random.default_rng(seed)
    return Columns(
        labels=rng.integers(0, 2, count).astype(np.float32),
        dense=rng.standard_normal((count, DENSE)).astype(np.float32),
        ids=tuple(IdColumn(values=rng.integers(0, 1 << 31, count).astype(np.int32)) for _ in range(TABLES)),
    )


def run(*, records: int, batches: int, rounds: int, seed: int) -> list[Result]:
    """Holds `records` in memory and sends `batches` random batches of them in each round, on one core."""
    plan = shapes()[SHAPE]
    schema = plan.schema
    order = np.random.default_rng(seed).permutation(records)
    given = columns(records, seed)
    with one_core():
        began_s = time.perf_counter()
        store = RecordStore.encode(schema, given)
        encode_ns = (time.perf_counter() - began_s) / records * 1e9
        body = MTUS[0] - IP_UDP_BYTES - HEADER.size
        in_packet = body // store.extent.record_bytes
        some = order[:PYTHON_ROWS]
        rows = Rows(
            labels=given.labels[some],
            columns={
                **{part.name: np.ascontiguousarray(given.dense[some, n]) for n, part in enumerate(schema.dense)},
                **{
                    part.name: Ragged(np.ones(len(some), np.int32), column.values[some].astype(np.int64))
                    for part, column in zip(schema.ids, given.ids, strict=True)
                },
            },
        )

        def pack() -> list[bytes]:
            encoded = encode_records(schema, rows)
            return encode_packets(schema, encoded, session=SESSION, batch=0, body_max_bytes=body)

        sender = store.sender(session=SESSION, body_max_bytes=body)
        if sender.packets(some, 0, 0) != pack():
            raise RuntimeError("the native core packs something else than the reference: run tests/offload")
        results = [
            Result(
                what="packed in Python", records_a_packet=in_packet, ns_a_record=median_ns(pack, rounds) / len(some)
            ),
            Result(what="encoded, once a data set", records_a_packet=in_packet, ns_a_record=encode_ns),
        ]
        layout = BatchLayout(plan=plan, batch_rows=BATCH_ROWS)
        for mtu in MTUS:
            results += _sent(layout, store, order, mtu, batches, rounds)
        store.close()
    return results


def _sent(
    layout: BatchLayout, store: RecordStore, order: NDArray[np.int64], mtu: int, batches: int, rounds: int
) -> list[Result]:
    sender = store.sender(session=SESSION, body_max_bytes=mtu - IP_UDP_BYTES - HEADER.size)
    in_packet = (mtu - IP_UDP_BYTES - HEADER.size) // store.extent.record_bytes
    parts = [order[first : first + BATCH_ROWS] for first in range(0, batches * BATCH_ROWS, BATCH_ROWS)]

    def pack() -> None:
        for number, part in enumerate(parts):
            sender.packets(part, number, 0)

    pack_ns = median_ns(pack, rounds) / (batches * BATCH_ROWS)
    with (
        Planes(hosts=2, planes=1, mtu=mtu) as planes,
        XdpReceiver(layout, session=SESSION, udp_port=UDP_PORT) as receiver,
    ):
        interface, address = planes.interfaces(1)[0], planes.addresses(1)[0]
        receiver.receive_at(planes.within(1, own_ends, interface))
        link = planes.within(1, lambda: attach_xdp(receiver.program, socket.if_nametoindex(interface), XdpMode.NATIVE))
        outgoing = planes.within(0, lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
        with link, outgoing:
            outgoing.connect((address, UDP_PORT))
            outgoing.setblocking(False)
            numbers = iter(range(1 << 32))

            def send() -> None:
                for part in parts:
                    _send_batch(sender, outgoing.fileno(), part, next(numbers), receiver)

            send_ns = median_ns(send, rounds) / (batches * BATCH_ROWS)
    return [
        Result(what=f"packed, MTU {mtu:,}", records_a_packet=in_packet, ns_a_record=pack_ns),
        Result(what=f"packed, sent and taken by XDP, MTU {mtu:,}", records_a_packet=in_packet, ns_a_record=send_ns),
    ]


def _send_batch(sender: RecordSender, fd: int, part: NDArray[np.int64], batch: int, receiver: XdpReceiver) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    row = 0
    while row < len(part):
        row, _, failure = sender.send(fd, part, batch, row, WINDOW_PACKETS)
        if failure not in (0, errno.EAGAIN):
            raise OSError(failure, os.strerror(failure))
        if row == len(part):
            row = receiver.rows_taken(batch)
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"batch {batch}: {receiver.rows_taken(batch)} of {len(part)} records in {DEADLINE_S} s")
    receiver.release(batch)


def render(results: list[Result], console: Console) -> None:
    table = Table("one core", "records a packet", "ns a record", "records/s")
    for result in results:
        table.add_row(
            result.what, str(result.records_a_packet), f"{result.ns_a_record:,.0f}", f"{result.records_per_s:,.0f}"
        )
    console.print(table)


def as_json(results: list[Result]) -> dict[str, Any]:
    found = [{**asdict(result), "records_per_s": result.records_per_s} for result in results]
    return {"machine": describe(), "results": found}
