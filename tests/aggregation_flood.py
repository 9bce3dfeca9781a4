# SPDX-License-Identifier: Apache-2.0
"""Hostile packets for an aggregator: junk, and forged leaves."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import numpy as np

from sennit.doctor.capabilities import UDP_SEGMENT
from tests.aggregation_wire import LEAF, Packet

# linux/udp.h before Linux 6.9: UDP_MAX_SEGMENTS
BATCH_PACKETS = 64
STRIPES = bytes(32)
LEAST_S = 30.0
COUNTED = ("foreign", "wrong_version", "corrupt", "unknown_job")
"""The names under which an aggregator counts them."""


def hostile_packets(job: int, seed: int) -> list[bytes]:
    """A batch: of other protocols, of another version, broken, and leaves of this job with another key."""
    rng = np.random.default_rng(seed)
    leaf = Packet(kind=LEAF, job=job, key=int(rng.integers(1, 1 << 62)), stripes=STRIPES)
    packets = []
    for number in range(BATCH_PACKETS):
        packet = bytearray(replace(leaf, block=number, leaf=number % 2).pack())
        if number % 4 == 0:
            packet = bytearray(rng.bytes(len(packet)))
            packet[0] = 0
        elif number % 4 == 1:
            packet[2] = 9
        elif number % 4 == 2:
            packet[-1] ^= 1
        packets.append(bytes(packet))
    return packets


class Flood:
    """Sends them through a connected socket, as long as its `with` block lasts. One call sends a batch."""

    def __init__(self, out: socket.socket, job: int, seed: int = 1, pause_s: float = 0.0, least: int = 0) -> None:
        """`pause_s`: between two batches. Without, as many as a core can send.

        `least`: so many are sent, though the block ends before, unless that takes longer than LEAST_S.
        """
        packets = hostile_packets(job, seed)
        self._batch = b"".join(packets)
        self._out = out
        self._out.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, len(packets[0]))
        self._pause_s, self._least = pause_s, least
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._send, name="flood")
        self.sent = 0

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _send(self) -> None:
        end_s = time.monotonic() + LEAST_S
        while not self._ends.wait(self._pause_s) or (self.sent < self._least and time.monotonic() < end_s):
            try:
                self._out.send(self._batch)
            except (BlockingIOError, ConnectionRefusedError):  # the path is full, or the aggregator has ended
                continue
            self.sent += BATCH_PACKETS
