# SPDX-License-Identifier: Apache-2.0
"""The end-to-end bench of feature plans: it takes its samples, sends lost packets again, and notices wrong columns."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import pytest

from sennit.ebpf.library import BpfError
from sennit.offload.batches import Batch, BatchLayout
from sennit.testbed.bench.samples import offload_end_to_end as bench
from sennit.testbed.bench.samples.ingest_peers import Peer
from sennit.testbed.bench.samples.offload import shapes
from sennit.testbed.bench.samples.record_source import FrameSink, RecordSource
from tests.extent import briefly

PACKETS = 195
PER_PACKET = bench.BATCH_ROWS // PACKETS


@pytest.mark.root
@pytest.mark.needs("bpf", "arena", "netns", "native-xdp")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("records", briefly(bench.RECORDS_A_PACKET, bench.RECORDS_A_PACKET[1:]))
def test_every_way_takes_all_records_of_every_batch(records: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "RECORDS_A_PACKET", (records,))
    results = bench.run(rounds=1, batches=2, seed=3)
    names = [bench.LOAD, "XDP", "cpu", "C loop", "Python"]
    assert [(result.records_a_packet, result.peer) for result in results] == [(records, name) for name in names]
    for result in results:
        # Two batches of the warm-up round, two of the counted round. XDP sends two more for its statistics.
        sent = {bench.LOAD: 2, "XDP": 6}.get(result.peer, 4) * bench.BATCH_ROWS // result.records_a_packet
        assert result.packets - result.lost_packets == sent
        assert 0 < result.lowest_per_s <= result.records_per_s <= result.highest_per_s
        assert (result.program_ns is not None) == (result.peer == "XDP")


@pytest.mark.root
@pytest.mark.needs("bpf", "arena")
def test_frames_that_the_kernel_does_not_take_are_named() -> None:
    with FrameSink() as sink, pytest.raises(BpfError, match="program drop_frame: 4 live frames of 13 bytes"):
        sink.program.send(bytes(13), 4)


class Source:
    """Sends nothing, but records what it was asked to send."""

    count = PACKETS

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.prepared: list[int] = []

    def prepare(self, first: int) -> None:
        assert not self.asked, "packets are made while others are timed"
        self.prepared.append(first)

    def send(self, udp_port: int, batch: int, begin: int, end: int) -> None:
        self.asked.append((batch, begin, end))


class LossyPeer(Peer):
    """Loses the last packets of each send, the first time."""

    name = "lossy"
    packets_at_a_time = 100

    def __init__(self, source: Source, found: Batch) -> None:
        super().__init__(BatchLayout(plan=shapes()[bench.SHAPE], batch_rows=bench.BATCH_ROWS), 0)
        self._source, self._found = source, found
        self.lost = [3, 0, 0, 50, 0]

    def take(self, batch: int) -> int:
        return PER_PACKET * (self._source.asked[-1][2] - self.lost[len(self._source.asked) - 1])

    def batch(self, number: int) -> Batch:
        return dataclasses.replace(self._found, number=number)

    def close(self) -> None:
        pass


def columns(value: float) -> Batch:
    rows: Any = np.full(3, value)
    return Batch(number=0, labels=rows, dense=rows, lengths=rows, values=(rows,))


def test_lost_packets_are_sent_again_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "STALL_S", 0.0)
    source = Source()
    sampler = bench.Sampler(LossyPeer(source, columns(1.0)), cast(RecordSource, source))
    sampler.sample(2, columns(1.0))
    assert source.prepared == [0]
    assert source.asked == [(0, 0, 100), (0, 97, 195), (1, 0, 100), (1, 100, 195), (1, 145, 195)]
    assert (sampler.packets, sampler.lost_packets) == (100 + 98 + 100 + 95 + 50, 3 + 50)


def test_no_packets_are_made_while_the_load_is_timed() -> None:
    source = Source()
    bench.Sampler(LossyPeer(source, columns(1.0)), cast(RecordSource, source)).load(2)
    assert source.prepared == [0]
    assert source.asked == [(0, 0, PACKETS), (1, 0, PACKETS)]


def test_other_columns_are_an_error() -> None:
    source = Source()
    peer = LossyPeer(source, columns(1.0))
    peer.lost = [0, 0]
    sampler = bench.Sampler(peer, cast(RecordSource, source))
    with pytest.raises(bench.BenchError, match="lossy: the columns of a batch differ"):
        sampler.sample(1, columns(2.0))
