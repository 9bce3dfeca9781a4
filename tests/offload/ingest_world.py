# SPDX-License-Identifier: Apache-2.0
"""Feeders, one rank, and a network that loses, delays and repeats, simulated in virtual time: a run takes ms."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sennit.offload.batches import BatchLayout
from sennit.offload.columns import Ragged
from sennit.offload.host_receiver import HostReceiver
from sennit.offload.ingest.feeder import Outgoing, Window
from sennit.offload.ingest.leases import Leases
from sennit.offload.ingest.protocol import Message, Send, Taken
from sennit.offload.ingest.record_supply import Part
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.records import Rows, encode_packets, encode_records
from sennit.offload.schema import Ids, Schema

SCHEMA = Schema(ids=(Ids(name="sample"),))
PLAN = FeaturePlan(schema=SCHEMA, sparse=(Sparse(column="sample"),))
SESSION = 7
POLL_S = 0.001
LOOK_S = 0.0005


@dataclass(kw_only=True)
class Behaviour:
    """The behaviour of a feeder."""

    joins_s: float = 0.0
    dies_s: float = float("inf")
    """From then on the feeder sends nothing. The rank learns of its death a little later."""

    falls_silent_s: float = float("inf")
    """From then on the feeder sends nothing, but stays connected."""

    think_s: float = 0.0
    """Time that the feeder takes to make a batch."""

    records_in_packet: int = 4


@dataclass(kw_only=True)
class Network:
    """The network's treatment of datagrams. Control messages are only delayed."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay_s: float = 0.0002
    jitter_s: float = 0.0
    """Packets are reordered if this is more than the time between two packets."""

    packet_s: float = 0.0
    """The time that the slowest link takes for a packet. Further packets queue before it."""

    queue_packets: int = 0


@dataclass
class _Feeder:
    behaviour: Behaviour
    outgoing: dict[int, Outgoing] = field(default_factory=dict)
    ready_s: float = 0.0


class IngestWorld:
    """One run of `sizes` batches. `run` returns the samples that were trained on, batch by batch."""

    def __init__(
        self,
        sizes: list[int],
        feeders: list[Behaviour],
        network: Network,
        *,
        seed: int,
        slots: int = 2,
        first_batch: int = 0,
        window_packets: int = 8,
        step_s: float = 0.0,
    ) -> None:
        self.now_s = 0.0
        self.random = random.Random(seed)
        self.sizes, self.network, self.step_s = sizes, network, step_s
        self.receiver = HostReceiver(BatchLayout(plan=PLAN, batch_rows=max(sizes), slots=slots), session=SESSION)
        for batch in range(max(0, first_batch - slots), first_batch):
            self.receiver.release(batch)
        self.leases = Leases(
            sizes.__getitem__, first_batch=first_batch, batch_count=len(sizes), slots=slots, now_s=self.now_s
        )
        self.first_batch = first_batch
        self.feeders = {number: _Feeder(behaviour) for number, behaviour in enumerate(feeders, 1)}
        self.windows = {number: Window(window_packets) for number in self.feeders}
        self.link_free_s = 0.0
        self.packets_sent = 0
        self.trained: list[list[int]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def run(self, until_s: float) -> list[list[int]]:
        """Ends when all batches are trained on, or at the virtual time `until_s`."""
        for number, feeder in self.feeders.items():
            self._at(feeder.behaviour.joins_s, lambda number=number: self.leases.join(number, self.now_s))  # type: ignore[misc]
            self._at(feeder.behaviour.dies_s + 0.01, lambda number=number: self.leases.leave(number, self.now_s))  # type: ignore[misc]
            self._at(feeder.behaviour.joins_s, lambda number=number: self._pump(number))  # type: ignore[misc]
        self._at(0.0, self._poll)
        self._at(0.0, self._train)
        while self._events and self.now_s <= until_s and len(self.trained) < len(self.sizes) - self.first_batch:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            for number, message in self.leases.drain():
                self._at(self.now_s + self.network.delay_s, lambda n=number, m=message: self._obey(n, m))  # type: ignore[misc]
        return self.trained

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        if time_s < float("inf"):
            heapq.heappush(self._events, (time_s, next(self._serial), event))

    def _poll(self) -> None:
        for batch in list(self.leases.awaited()):
            taken, ahead = self.receiver.rows_taken(batch), self.receiver.row_ahead(batch)
            self.leases.observe(batch, taken, ahead, self.now_s)
        self.leases.advance(self.now_s)
        self._at(self.now_s + POLL_S, self._poll)

    def _train(self) -> None:
        number = self.first_batch + len(self.trained)
        if number == len(self.sizes):
            return
        if self.leases.is_complete(number):
            self.trained.append(self.receiver.batch(number).values[0].tolist())
            self.receiver.release(number)
            self.leases.release(number, self.now_s)
        self._at(self.now_s + max(self.step_s, POLL_S), self._train)

    def _obey(self, number: int, message: Message) -> None:
        """Lets a feeder do what the real one does with the message."""
        feeder = self.feeders[number]
        if self.now_s >= feeder.behaviour.dies_s:
            return
        if isinstance(message, Send):
            if message.batch not in feeder.outgoing:
                records = np.array(expected(self.sizes, message.batch), np.int64)
                feeder.outgoing[message.batch] = Outgoing(
                    message.batch, Part("all", records), self.windows[number].following()
                )
                feeder.ready_s = max(self.now_s, feeder.ready_s) + feeder.behaviour.think_s
            feeder.outgoing[message.batch].rewind(message.row)
        elif (
            isinstance(message, Taken)
            and message.batch in feeder.outgoing
            and feeder.outgoing[message.batch].taken(message.row)
        ):
            self.windows[number] = feeder.outgoing.pop(message.batch).window

    def _pump(self, number: int) -> None:
        feeder = self.feeders[number]
        if self.now_s >= min(feeder.behaviour.dies_s, feeder.behaviour.falls_silent_s):
            return
        if self.now_s >= feeder.ready_s:
            for outgoing in feeder.outgoing.values():
                for place in range(outgoing.packets_due):
                    if outgoing.is_sent:
                        break
                    first, end = outgoing.next_row, outgoing.next_row + feeder.behaviour.records_in_packet
                    samples = outgoing.records[first:end]
                    self._send(packet(outgoing.batch, first, samples), self.now_s + place * 1e-6)
                    outgoing.sent(first + len(samples), 1)
        self._at(self.now_s + LOOK_S, lambda: self._pump(number))

    def _send(self, datagram: bytes, at_s: float) -> None:
        network, dice = self.network, self.random
        self.packets_sent += 1
        if network.packet_s:
            if self.link_free_s - at_s > network.queue_packets * network.packet_s:
                return
            at_s = self.link_free_s = max(at_s, self.link_free_s) + network.packet_s
        copies = 0 if dice.random() < network.drop else 2 if dice.random() < network.duplicate else 1
        for _ in range(copies):
            late_s = network.delay_s + dice.random() * network.jitter_s
            self._at(at_s + late_s, lambda: self.receiver.deliver(datagram))


def packet(batch: int, row: int, samples: NDArray[np.int64]) -> bytes:
    """Returns a packet with the records of these samples."""
    count = len(samples)
    rows = Rows(labels=np.zeros(count, np.float32), columns={"sample": Ragged(np.ones(count, np.int32), samples)})
    records = encode_records(SCHEMA, rows)
    (made,) = encode_packets(SCHEMA, records, session=SESSION, batch=batch, row=row, body_max_bytes=1400)
    return made


def expected(sizes: list[int], batch: int) -> list[int]:
    """Returns the samples of a batch: all samples of a run are numbered in order."""
    begin = sum(sizes[:batch])
    return list(range(begin, begin + sizes[batch]))
