# SPDX-License-Identifier: Apache-2.0
"""One rank of a group of two, with a native peer: its part in rendezvous, its messages, its progress."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

import numpy as np

from .controls import ECHO, PROBE_ECHO, Control, Echo, Flag
from .messages import Eager, Header, Kind, eager_max_bytes
from .offer import EAGER_SLOTS, FLAG_DEVICE, Offer
from .queues import BUFFER_BYTES, RECEIVES, SOURCE_PORT_MIN, Arrival, Queues, Region
from .queues import Kind as ArrivalKind
from .receiving import Memory, Receiving
from .sending import Packet, Sending, Transfer

ROCE_PORT: Final = 4_791
# A probe of a trial (docs/reference/wire.md, Trial).
TRIAL_IMMEDIATE: Final = 0xFFFF_FFFF
# Half of the receive buffers are for data.
RECEIVE_WINDOW_PACKETS: Final = RECEIVES // 2
# Packets in flight. Few, because on a single processor nothing is acknowledged while this rank runs.
SEND_WINDOW_PACKETS: Final = 32
# Send buffers that data leaves free for controls.
SENDS_SPARED: Final = 4
CONTROL_MIN_BYTES: Final = 1_024
LAST_WORDS: Final = 3
DEADLINE_S: Final = 30.0


class Incoming:
    """An expected message. `data` is set when `is_done`."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.array = np.zeros(header.size_bytes, np.uint8)
        self.memory: Memory | None = None
        self.region: Region | None = None
        self.is_done = False

    @property
    def data(self) -> bytes:
        return self.array.tobytes()


class _Heard:
    """What arrived over a path."""

    def __init__(self) -> None:
        self.immediate = 0
        self.at_s = 0.0
        self.count = 0
        self.is_news = False


class Peer:
    """A rank that makes progress only during calls: `progress`, or `until` a condition holds."""

    def __init__(self, *, rank: int, paths: int) -> None:
        self.rank = rank
        self.other = 1 - rank
        self._path_count = paths
        self._stack = ExitStack()
        self._heard: dict[int, _Heard] = {}
        self._expected: dict[int, deque[Incoming]] = {}  # by message key
        self._arrived: dict[int, deque[Eager]] = {}  # not expected yet
        self._placing: list[Incoming] = []
        self._is_control_due = False
        self._turn = 0
        self.is_peer_closed = False
        self.paths_echoed: set[int] = set()
        """The paths over which the peer has received something."""
        self.counters: Counter[str] = Counter()

    # The interface of an endpoint that rendezvous.connect uses.

    def verbs_open(self, addresses: Sequence[str], /, **settings: object) -> bytes:
        (address,) = addresses
        self.queues = self._stack.enter_context(Queues(address, self._path_count))
        ports = range(SOURCE_PORT_MIN + 1, SOURCE_PORT_MIN + 1 + self._path_count)
        self._offer = Offer(
            flags=FLAG_DEVICE,
            rank=self.rank,
            size=2,
            address=address,
            port=ROCE_PORT,
            payload_max=self.queues.payload_max,
            receive_window_bytes=RECEIVE_WINDOW_PACKETS * BUFFER_BYTES,
            source_ports=tuple(ports),
            queue_pairs=self.queues.numbers,
        )
        return self._offer.pack_for_all()

    def offer_for(self, rank: int, /) -> bytes:
        return self._offer.pack_for_reader()

    # It answers no probes of a trial. The record that it leaves in the store says that all is well.

    def begin_trial(self, routes: Sequence[tuple[str, bytes]], /) -> None: ...

    def try_network(self, limit_s: float, /) -> bool:
        return True

    def is_tried(self, rank: int, /) -> bool:
        return True

    def is_perfect(self, rank: int, /) -> bool:
        return True

    def trial_message(self, rank: int, /) -> bytes:
        raise NotImplementedError

    def learn_trial(self, rank: int, message: bytes, /) -> None: ...

    def tried_paths(self, rank: int, /) -> list[tuple[str, int, str, int, int, int, int, int, int, bool, str]]:
        return []

    def trial_payload_bytes(self, rank: int, /) -> int:
        return 0

    def trial_payload_max_bytes(self, rank: int, /) -> int:
        return 0

    def give_up(self, reason: str, /) -> None: ...

    def connect(self, routes: Sequence[tuple[str, bytes]], /) -> None:
        theirs = Offer.unpack(routes[self.other][1])
        paths = min(self._path_count, len(theirs.source_ports))
        if paths != self._path_count:
            raise ValueError(f"the native rank has {paths} paths, this one {self._path_count}")
        self.payload_max = min(self._offer.payload_max, theirs.payload_max)
        window_packets = min(theirs.receive_window_bytes // self.payload_max, SEND_WINDOW_PACKETS)
        self.sending = Sending(payload_max=self.payload_max, window_packets=window_packets, eager_slots=EAGER_SLOTS)
        self.receiving = Receiving(self.payload_max, EAGER_SLOTS)
        self.queues.connect(theirs.address, theirs.queue_pairs[:paths], self._offer.source_ports, self.payload_max)

    # Messages.

    def send(self, header: Header, data: bytes, *, is_requested: bool) -> Transfer | None:
        """Sends a message. Returns None if it is eager.

        `is_requested`: the receiver advertises memory for a bulk message only after a request.
        """
        if len(data) <= eager_max_bytes(self.payload_max):
            self.sending.push(Eager(Kind.DATA, header, data))
            return None
        if is_requested:
            self.sending.push(Eager(Kind.REQUEST, header, b""))
        return self.sending.transfer(header, data)

    def receive(self, header: Header, *, is_requested: bool) -> Incoming:
        """Expects a message. `is_requested`: advertises memory for a bulk message when the sender asks, else now."""
        incoming = Incoming(header)
        arrived = self._arrived.get(header.key)
        if arrived:
            self._deliver(incoming, arrived.popleft())
        elif is_requested or header.size_bytes <= eager_max_bytes(self.payload_max):
            self._expected.setdefault(header.key, deque()).append(incoming)
        else:
            self._advertise(incoming)
        return incoming

    def _advertise(self, incoming: Incoming) -> None:
        incoming.region = Region(self.queues, incoming.array)
        incoming.memory = Memory(header=incoming.header, address=incoming.region.address, rkey=incoming.region.rkey)
        self._placing.append(incoming)
        self.receiving.advertise(incoming.memory)

    def _deliver(self, incoming: Incoming, message: Eager) -> None:
        if message.header != incoming.header:
            raise ValueError(f"expected {incoming.header}, there is {message.header}")
        if message.kind is Kind.REQUEST:
            self._advertise(incoming)
        else:
            incoming.array[:] = np.frombuffer(message.data, np.uint8)
            incoming.is_done = True

    # Progress.

    def progress(self) -> bool:
        """Handles everything that is due. Returns False if there was nothing."""
        now_s = time.monotonic()
        arrivals = self.queues.poll()
        for arrival in arrivals:
            self._on_arrival(arrival, now_s)
        for incoming in [one for one in self._placing if one.memory is not None and one.memory.is_full]:
            assert incoming.region is not None
            incoming.region.close()  # closed before the data is handed over, so late copies find no key
            incoming.is_done = True
            self._placing.remove(incoming)
        sent = 0
        while self.queues.sends_free > SENDS_SPARED and (packet := self.sending.take(now_s)) is not None:
            self._send(packet)
            sent += 1
        if self._is_control_due or self.receiving.is_advert_due(now_s):
            self.send_control(now_s)
        return bool(arrivals or sent)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"waited {DEADLINE_S:g} s for {what}; {dict(self.counters)}")
            if not self.progress():
                os.sched_yield()  # lets the kernel's threads and the native engine run on a single processor

    def _on_arrival(self, arrival: Arrival, now_s: float) -> None:
        self.counters[arrival.kind.name.lower()] += 1
        if arrival.kind is ArrivalKind.CONTROL:
            self._on_control(arrival, now_s)
            return
        if arrival.kind is ArrivalKind.REFUSED:
            return
        if arrival.kind is ArrivalKind.EAGER and arrival.immediate == TRIAL_IMMEDIATE:
            return
        self._hear(arrival.path, arrival.immediate, now_s)
        if arrival.kind is ArrivalKind.BULK:
            if not self.receiving.on_bulk(arrival.immediate, arrival.size_bytes):
                raise ValueError(f"immediate {arrival.immediate:#x}, {arrival.size_bytes} bytes: may not be sent")
            return
        messages = self.receiving.on_eager(arrival.immediate, arrival.payload)
        if messages is None:
            raise ValueError(f"eager packet {arrival.immediate:#x} is ahead of what may be sent")
        for message in messages:
            expected = self._expected.get(message.header.key)
            if expected:
                self._deliver(expected.popleft(), message)
            else:
                self._arrived.setdefault(message.header.key, deque()).append(message)

    def _on_control(self, arrival: Arrival, now_s: float) -> None:
        control = Control.unpack(arrival.payload)
        if Flag.ABORT in control.flags:
            raise ConnectionAbortedError(control.reason)
        self.paths_echoed |= {echo.path for echo in control.echoes}
        self.receiving.on_control(control)
        self.sending.on_control(control)
        if Flag.PROBE in control.flags:
            self._hear(arrival.path, PROBE_ECHO | control.probe_number, now_s)
        if Flag.ANSWER in control.flags:
            self._is_control_due = True
        if Flag.GOODBYE in control.flags:
            self.is_peer_closed = True

    def _hear(self, path: int, immediate: int, now_s: float) -> None:
        heard = self._heard.setdefault(path, _Heard())
        heard.immediate, heard.at_s, heard.is_news = immediate, now_s, True
        heard.count += 1
        self._is_control_due = True

    def _send(self, packet: Packet) -> None:
        path = self._next_path()
        if packet.rkey is None:
            self.queues.send_with_immediate(path, packet.payload, packet.immediate)
        else:
            self.queues.write_with_immediate(path, packet.payload, packet.immediate, packet.address, packet.rkey)

    @property
    def paths_heard(self) -> set[int]:
        """The paths over which data or a probe has arrived."""
        return set(self._heard)

    def send_control(self, now_s: float, flags: Flag = Flag.NONE) -> None:
        """Sends a control with the current state."""
        echoes = []
        for path, heard in self._heard.items():
            if heard.is_news:
                held_us = int((now_s - heard.at_s) * 1e6)
                echoes.append(Echo(path=path, immediate=heard.immediate, delay_us=held_us, received=heard.count))
                heard.is_news = False
        if self.sending.has_advert_gap:
            flags |= Flag.ADVERT_GAP
        room_bytes = max(self.payload_max, CONTROL_MIN_BYTES) - ECHO.size * len(echoes)
        state = self.receiving.state(now_s, room_bytes)
        control = Control(flags=flags, credits_seen=self.sending.credits_seen, echoes=tuple(echoes), **state)
        self.queues.send(self._next_path(), control.pack())
        self._is_control_due = False
        self.counters["controls_sent"] += 1

    def _next_path(self) -> int:
        self._turn += 1
        return self._turn % self._path_count

    def close(self) -> None:
        """Says goodbye, as often as the specification requires."""
        for _ in range(LAST_WORDS):
            self.until(lambda: self.queues.sends_free > 0, "a free buffer")
            self.send_control(time.monotonic(), Flag.GOODBYE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
