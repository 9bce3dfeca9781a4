# SPDX-License-Identifier: Apache-2.0
"""`sennit bench offload --end-to-end`: from packets on a link to columns that torch sees, on one processor.

An XDP program sends the packets of a batch over a veth cable between two namespaces. Each receiver takes them on the
same processor, in turn. Lost packets are sent again and counted. Every column of every batch is compared with the
reference, outside the timed part.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from sennit.ebpf.loader import RunTimes
from sennit.errors import SennitError
from sennit.offload.batches import Batch, BatchLayout
from sennit.offload.host_receiver import HostReceiver
from sennit.offload.records import HEADER, encode_packets, encode_records
from sennit.runtime.calibrate.machine import describe, one_core
from sennit.testbed.bench.samples.ingest_peers import LoopPeer, NativePeer, Peer, PythonPeer, XdpPeer, attached
from sennit.testbed.bench.samples.offload import FIRST_ROWS, rows_of, shapes
from sennit.testbed.bench.samples.record_source import FrameSink, RecordSource
from sennit.testbed.topology import cable

# The largest packet that native XDP takes on a veth interface.
MTU_BYTES: Final = 3506
BATCH_ROWS: Final = 4095  # 195 packets of 21 records
RECORDS_A_PACKET: Final = (1, 21)
UDP_PORT: Final = 4810
SESSION: Final = 1
SHAPE: Final = "26 ids modulo, 13 clamped"
STALL_S: Final = 0.2
SAMPLE_TIMEOUT_S: Final = 30.0
LOAD: Final = "load alone"


class BenchError(SennitError):
    """Nothing arrives, or the received columns are wrong."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One receiver with one packet size."""

    peer: str
    records_a_packet: int
    records_per_s: float
    """The median over rounds, load included."""

    lowest_per_s: float
    highest_per_s: float
    ns_a_record: float
    without_load_ns: float
    """The time without the load, which is measured alone with a program that drops it."""

    program_ns: float | None
    """The part spent in the receiver's BPF program, by the kernel's statistics. Includes reading the clock."""

    times_xdp: float
    """How many times as fast XDP is."""

    packets: int
    lost_packets: int
    """Packets sent again, over all rounds."""


def run(*, rounds: int, batches: int, seed: int) -> list[Measured]:
    """Takes `rounds` samples of each peer, in turn, of `batches` batches each."""
    with one_core():
        return [
            measured
            for per_packet in RECORDS_A_PACKET
            for measured in _measure(per_packet, rounds=rounds, batches=batches, seed=seed)
        ]


def _measure(per_packet: int, *, rounds: int, batches: int, seed: int) -> list[Measured]:
    plan = shapes()[SHAPE]
    layout = BatchLayout(plan=plan, batch_rows=BATCH_ROWS)
    records = encode_records(plan.schema, rows_of(plan.schema, BATCH_ROWS, np.random.default_rng(seed)))
    body_bytes = per_packet * plan.schema.fixed_bytes
    datagrams = encode_packets(plan.schema, records, session=SESSION, batch=0, body_max_bytes=body_bytes)
    with HostReceiver(layout, session=SESSION, sketch=None) as reference:
        for datagram in datagrams:
            reference.deliver(datagram)
        expected = reference.batch(0)
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(cable.Cable(mtu_bytes=MTU_BYTES))
        peers = [
            XdpPeer(layout, UDP_PORT, session=SESSION),
            NativePeer(layout, UDP_PORT + 1, link, session=SESSION),
            LoopPeer(layout, UDP_PORT + 2, link, first_rows=FIRST_ROWS),
            PythonPeer(layout, UDP_PORT + 3, link, packet_bytes=HEADER.size + body_bytes),
        ]
        source = stack.enter_context(RecordSource(datagrams, link, batches))
        samplers = [Sampler(stack.enter_context(peer), source) for peer in peers]
        sink = stack.enter_context(FrameSink())
        load_s: list[float] = []
        times_s: dict[str, list[float]] = {peer.name: [] for peer in peers}
        for measured in range(-1, rounds):  # the first round warms up
            with attached(link, sink.program):
                took_s = link.within(cable.NEAR, samplers[0].load, batches)
                if measured >= 0:
                    load_s.append(took_s)
            for sampler in samplers:
                with sampler.peer.listening(link):
                    took_s = link.within(cable.NEAR, sampler.sample, batches, expected)
                    if measured >= 0:
                        times_s[sampler.peer.name].append(took_s)
        program_ns = _program_ns(link, samplers[0], batches, expected)
        return results_of(per_packet, batches, load_s, times_s, samplers, program_ns)


class Sampler:
    """Sends batches through one peer. Call it at the near end."""

    def __init__(self, peer: Peer, source: RecordSource) -> None:
        self.peer, self.source = peer, source
        self.lost_packets = self.packets = 0
        self._batch = 0

    def load(self, batches: int) -> float:
        """Returns the seconds to send the packets of a batch to nobody."""
        self.source.prepare(0)
        start = time.perf_counter()
        for batch in range(batches):
            self.source.send(self.peer.udp_port, batch, 0, self.source.count)
        return (time.perf_counter() - start) / batches

    def sample(self, batches: int, expected: Batch) -> float:
        """Returns the seconds of a batch from its first packet to its columns."""
        total_s = 0.0
        self.source.prepare(self._batch)
        for _ in range(batches):
            start = time.perf_counter()
            self._send()
            found = self.peer.batch(self._batch)
            total_s += time.perf_counter() - start
            _compare(self.peer.name, found, expected)
            self.peer.release(self._batch)
            self._batch += 1
        return total_s / batches

    def _send(self) -> None:
        """Sends the batch in bursts of the size that suits the peer, and repeats lost packets."""
        per_packet = BATCH_ROWS // self.source.count
        deadline_s = time.monotonic() + SAMPLE_TIMEOUT_S
        begin = 0
        while begin < self.source.count:
            end = min(begin + self.peer.packets_at_a_time, self.source.count)
            self.source.send(self.peer.udp_port, self._batch, begin, end)
            self.packets += end - begin
            rows = self._wait(end * per_packet, deadline_s)
            begin = rows // per_packet
            self.lost_packets += end - begin

    def _wait(self, rows: int, deadline_s: float) -> int:
        """Returns the rows that arrived: all of `rows`, or fewer when nothing more comes."""
        taken, progress_s = 0, time.monotonic()
        while (found := self.peer.take(self._batch)) < rows:
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise BenchError(f"{self.peer.name}: {found} of {rows} rows within {SAMPLE_TIMEOUT_S:g} s")
            if found > taken:
                taken, progress_s = found, now_s
            elif now_s - progress_s > STALL_S:
                break
        return found


def _compare(name: str, found: Batch, expected: Batch) -> None:
    pairs: list[tuple[NDArray[Any], NDArray[Any]]]
    pairs = [(found.labels, expected.labels), (found.dense, expected.dense), (found.lengths, expected.lengths)]
    pairs += zip(found.values, expected.values, strict=True)
    if not all(np.array_equal(one, other) for one, other in pairs):
        raise BenchError(f"{name}: the columns of a batch differ from the reference's")


def _program_ns(link: cable.Cable, sampler: Sampler, batches: int, expected: Batch) -> float:
    """Time of the XDP receiver's program per record."""
    assert isinstance(sampler.peer, XdpPeer)
    with RunTimes(), sampler.peer.listening(link):
        before = sampler.peer.receiver.program.statistics()
        link.within(cable.NEAR, sampler.sample, batches, expected)
        after = sampler.peer.receiver.program.statistics()
    return (after.run_time_ns - before.run_time_ns) / (batches * BATCH_ROWS)


def results_of(
    per_packet: int,
    batches: int,
    load_s: list[float],
    times_s: Mapping[str, list[float]],
    samplers: list[Sampler],
    program_ns: float,
) -> list[Measured]:
    ns = 1e9 / BATCH_ROWS
    load_ns = statistics.median(load_s) * ns
    xdp_s = statistics.median(times_s[XdpPeer.name])
    found = []
    for name, times in [(LOAD, load_s), *times_s.items()]:
        sampler = next((sampler for sampler in samplers if sampler.peer.name == name), None)
        middle_s = statistics.median(times)
        found.append(
            Measured(
                peer=name,
                records_a_packet=per_packet,
                records_per_s=BATCH_ROWS / middle_s,
                lowest_per_s=BATCH_ROWS / max(times),
                highest_per_s=BATCH_ROWS / min(times),
                ns_a_record=middle_s * ns,
                without_load_ns=middle_s * ns - load_ns,
                program_ns=program_ns if name == XdpPeer.name else None,
                times_xdp=middle_s / xdp_s,
                packets=sampler.packets if sampler else len(load_s) * batches * BATCH_ROWS // per_packet,
                lost_packets=sampler.lost_packets if sampler else 0,
            )
        )
    return found


def render(results: list[Measured], console: Console) -> None:
    table = Table(
        "records a packet",
        "",
        "M records/s",
        "lowest to highest",
        "ns a record",
        "less the load",
        "BPF",
        "XDP is",
        "lost",
    )
    for result in results:
        table.add_row(
            str(result.records_a_packet),
            result.peer,
            f"{result.records_per_s / 1e6:.2f}",
            f"{result.lowest_per_s / 1e6:.2f} to {result.highest_per_s / 1e6:.2f}",
            f"{result.ns_a_record:.0f}",
            f"{result.without_load_ns:.0f}",
            "" if result.program_ns is None else f"{result.program_ns:.0f}",
            f"{result.times_xdp:.1f} times",
            f"{result.lost_packets} of {result.packets}",
        )
    console.print(table)


def as_json(results: list[Measured]) -> dict[str, Any]:
    return {"machine": describe(), "results": [asdict(result) for result in results]}
