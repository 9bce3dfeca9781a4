# SPDX-License-Identifier: Apache-2.0
"""Rank 0 of two, with the udp port. This process also plays rank 1: it reads adverts and sends any packet."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import ModuleType
from typing import Final, Self

import numpy as np

from sennit.transport import _core
from sennit.transport.oracle import roce
from sennit.transport.plans.plan import PlanBuilder
from sennit.transport.plans.plan_codec import encode

from .packets import PAYLOAD_BYTES, Aim, Datagram
from .sockets import Sockets

DEADLINE_S: Final = 30.0
WINDOW_BYTES: Final = 1 << 20
QPN: Final = 0x1234
QPN_BYTES: Final = 4
SLOTS: Final = 4_095
GUARD_BYTES: Final = 4_096
GUARD: Final = 0xA5
COUNTED: Final = (
    "truncated", "bad_opcode", "bad_version", "bad_partition", "bad_pad", "oversized", "bad_length", "unknown_qpn",
    "bad_key", "bad_range", "bad_slot", "bad_icrc", "bad_control", "duplicate_packets",
)  # fmt: skip


class UdpTarget:
    """Opens one message at a time, of `sizes` bytes per packet, with guard bytes around it."""

    def __init__(self, peer: ModuleType, sockets: Sockets) -> None:
        """`peer` is the package of that name, which decodes offers and controls."""
        self._sockets = sockets
        self._controls = peer.controls
        self._core = _core.Communicator(0, 2, timeout_s=DEADLINE_S, seed=1)
        ours = self._core.udp_open(
            [(sockets.remote_address, "")],
            path_count=1,
            path_policy="round_robin",
            congestion="fixed",
            window_bytes=WINDOW_BYTES,
        )
        listening, self._qpn = _read_offer(ours + self._core.offer_for(1), peer.offer)
        sockets.aim(listening)
        address, port = sockets.local
        theirs = peer.offer.Offer(
            flags=0,
            rank=1,
            size=2,
            address=address,
            port=port,
            payload_max=PAYLOAD_BYTES,
            receive_window_bytes=WINDOW_BYTES,
            source_ports=(port,),
            queue_pairs=(QPN,),
        )
        self._core.connect([("self", b""), ("udp", theirs.pack())])
        self._messages = 0
        self._ended: Aim | None = None
        before = self.open([bytes(PAYLOAD_BYTES), bytes(PAYLOAD_BYTES)], 0)
        for aim in before:
            self.send(aim.datagram())
        self.close(before)

    def open(self, payloads: Sequence[bytes], psn: int) -> list[Aim]:
        """Posts the receive of a message of these packets. Returns the correct place of each packet."""
        size_bytes = sum(map(len, payloads))
        self._memory = np.full(size_bytes + 2 * GUARD_BYTES, GUARD, np.uint8)
        builder = PlanBuilder(
            "conformance", world=2, rank=0, signature=self._messages, buffer_bytes=[self._memory.size]
        )
        builder.recv(1, 0, 0, GUARD_BYTES, size_bytes)
        plan = _core.Plan(encode(builder.build()))
        self._operation = self._core.post(plan, [self._memory], timeout_s=DEADLINE_S, background=True)
        address, rkey, advertised_bytes = self._advert()
        assert advertised_bytes == size_bytes
        aims = [
            Aim(
                qpn=self._qpn,
                psn=psn + index,
                address=address + index * PAYLOAD_BYTES,
                rkey=rkey,
                immediate=(self._messages % SLOTS + 1) << 20 | index,
                payload=payload,
                region_bytes=size_bytes - index * PAYLOAD_BYTES,
                ended=self._ended,
            )
            for index, payload in enumerate(payloads)
        ]
        self._before = self._counters()
        return aims

    def send(self, datagram: Datagram) -> None:
        self._sockets.send(datagram)

    def close(self, aims: Sequence[Aim]) -> tuple[bytes, dict[str, int]]:
        """Waits for the message. By then all packets sent before it have been read. Returns its bytes and the counters.

        Fails if any byte around it has changed.
        """
        self._operation.wait(DEADLINE_S)
        self._messages += 1
        self._ended = aims[0]
        assert (self._memory[:GUARD_BYTES] == GUARD).all()
        assert (self._memory[-GUARD_BYTES:] == GUARD).all()
        now = self._counters()
        counted = {name: now[name] - self._before[name] for name in COUNTED if now[name] != self._before[name]}
        return self._memory[GUARD_BYTES:-GUARD_BYTES].tobytes(), counted

    def _counters(self) -> dict[str, int]:
        counters = self._core.counters()
        return {name: counters[name] for name in COUNTED}

    def _advert(self) -> tuple[int, int, int]:
        """Returns address, key and size of the memory that rank 0 offers for the newest message."""
        while True:
            packet = roce.Packet.pull(self._sockets.receive(DEADLINE_S))
            control = self._controls.Control.unpack(packet.payload)
            for number, advert in enumerate(control.adverts, control.advert_first):
                if number == self._messages:
                    return advert.address, advert.rkey, advert.part_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._core.abort("the test is over")
        self._core.shutdown(0.0)


def _read_offer(packed: bytes, offer: ModuleType) -> tuple[int, int]:
    """Returns rank 0's listening port, and its queue pair for rank 1. Rank 0 has one rail and one path."""
    _, _, _, _, port, _, _ = offer.RAIL.unpack_from(packed, offer.HEADER.size)
    (qpn,) = struct.unpack_from("<I", packed, len(packed) - QPN_BYTES)
    return port, qpn
