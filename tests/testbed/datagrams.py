# SPDX-License-Identifier: Apache-2.0
"""Numbered datagrams through a plane, and an account of what arrived: checks that the switch's counters are true."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from sennit.testbed.topology.impairment import ImpairmentCounters
from sennit.testbed.topology.planes import Planes
from sennit.testbed.topology.switch import Impairer

# linux/udp.h, linux/in6.h, asm-generic/socket.h
UDP_SEGMENT: Final = 103
IPV6_RECVTCLASS: Final = 66
IPV6_TCLASS: Final = 67
SO_SNDBUFFORCE: Final = 32
SO_RCVBUFFORCE: Final = 33
ECT0: Final = 2
CONGESTION_EXPERIENCED: Final = 3
BUFFER_BYTES: Final = 128 << 20
NUMBER_BYTES: Final = 8
DEADLINE_S: Final = 30.0
LOOK_S: Final = 0.005


@dataclass
class Account:
    """What a receiver saw of `sent` numbered datagrams, and what the switch reports about them."""

    sent: int
    order: list[int] = field(default_factory=list)
    """Numbers in order of arrival."""
    damaged: list[int] = field(default_factory=list)
    marked: list[int] = field(default_factory=list)
    counters: ImpairmentCounters | None = None

    @property
    def switch(self) -> ImpairmentCounters:
        assert self.counters is not None
        return self.counters

    @property
    def missing(self) -> set[int]:
        return set(range(self.sent)) - set(self.order)

    @property
    def repeated(self) -> list[int]:
        return [number for number, times in Counter(self.order).items() if times == 2]

    @property
    def late(self) -> list[int]:
        """Datagrams that arrived after a higher number."""
        found, highest = [], -1
        for number in self.order:
            if number < highest:
                found.append(number)
            highest = max(highest, number)
        return found


def open_socket(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    made.setsockopt(socket.IPPROTO_IPV6, IPV6_TCLASS, ECT0)
    made.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVTCLASS, 1)
    made.bind((address, 0))
    return made


@contextlib.contextmanager
def one_processor() -> Iterator[None]:
    """Keeps this thread on one processor, because packets from two would overtake each other."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def expected_arrivals(counters: ImpairmentCounters) -> int:
    gone = counters.dropped + counters.blackholed + counters.held - counters.released
    return counters.packets - gone + counters.duplicated


def send_datagrams(
    planes: Planes,
    count: int,
    *,
    source: int = 0,
    target: int = 1,
    plane: int = 0,
    size_bytes: int = 1_000,
    segments: int = 1,
    arrivals: int | None = None,
) -> Account:
    """Sends `count` datagrams, `segments` per call (GSO), and receives until the switch's count or `arrivals` is
    reached.

    Additional arrivals are received too. netem cannot report what will come, so there it receives until the queue is
    empty.
    """
    body = bytes(index * 7 & 0xFF for index in range(size_bytes - NUMBER_BYTES))
    account = Account(count)
    is_counted = planes.impairer is Impairer.BPF
    before = planes.counters(source, plane) if is_counted else None
    with (
        planes.within(source, open_socket, planes.addresses(source)[plane]) as sender,
        planes.within(target, open_socket, planes.addresses(target)[plane]) as receiver,
    ):
        if segments > 1:
            sender.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, size_bytes)
        with one_processor():
            for first in range(0, count, segments):
                batch = range(first, min(first + segments, count))
                datagrams = b"".join(struct.pack("!Q", number) + body for number in batch)
                sender.sendto(datagrams, receiver.getsockname())
        deadline_s = time.monotonic() + DEADLINE_S
        wanted = 0 if arrivals is None else arrivals
        if before is not None:
            account.counters = planes.counters(source, plane) - before
            wanted = expected_arrivals(account.counters) if arrivals is None else arrivals
        elif arrivals is None:
            while planes.netem_counters(source, plane).waiting and time.monotonic() < deadline_s:
                time.sleep(LOOK_S)
        while True:
            enough = len(account.order) >= wanted
            receiver.settimeout(0 if enough else max(deadline_s - time.monotonic(), 0.001))
            try:
                data, ancillary, _, _ = receiver.recvmsg(65_536, 64)
            except (BlockingIOError, TimeoutError):
                break
            (number,) = struct.unpack_from("!Q", data)
            account.order.append(number)
            if data[NUMBER_BYTES:] != body:
                account.damaged.append(number)
            traffic_class = struct.unpack("i", ancillary[0][2])[0]
            if traffic_class & 3 == CONGESTION_EXPERIENCED:
                account.marked.append(number)
    return account
