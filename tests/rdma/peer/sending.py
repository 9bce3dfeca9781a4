# SPDX-License-Identifier: Apache-2.0
"""The sending half of a flow, which writes the peer's memory: sends packets, reads acknowledgements, retransmits.

Recovery is as simple as possible: a packet that is not acknowledged after a while is sent again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from .controls import Advert, BadControl, Control
from .messages import Eager, Header
from .numbers import (
    EAGER_SLOT,
    bits_of,
    immediate_of,
    nearest,
    packet_count,
    slot_of_credit,
)

RESEND_S: Final = 0.1
# How far after a credit's first missing packet a SACK entry reaches (docs/reference/wire.md, "Control payload").
REACH_PACKETS: Final = 1_984
EAGER_STREAM: Final = -1  # takes the place of a credit's number


@dataclass(frozen=True, kw_only=True)
class Packet:
    """A packet to send. An eager packet has no `rkey`."""

    immediate: int
    payload: bytes
    address: int = 0
    rkey: int | None = None


@dataclass(kw_only=True, eq=False)
class Transfer:
    """A bulk message in progress. `is_sent`: the peer has all of it."""

    header: Header
    data: bytes
    offered_bytes: int = 0
    acknowledged_bytes: int = 0

    @property
    def is_sent(self) -> bool:
        return self.acknowledged_bytes == self.header.size_bytes


@dataclass(kw_only=True, eq=False)
class _Credit:
    advert: Advert
    header: Header
    offset: int
    packets: int
    transfer: Transfer | None = None
    next_unsent: int = 0


class Sending:
    """Has no device and no clock: controls and times are arguments, packets are results."""

    def __init__(self, *, payload_max: int, window_packets: int, eager_slots: int) -> None:
        self._payload_max = payload_max
        self._window_packets = window_packets
        self._eager_slots = eager_slots
        self._outstanding: dict[tuple[int, int], float] = {}  # (credit, packet) -> when it was sent, oldest first
        self._eager: dict[int, bytes] = {}  # payloads not acknowledged yet
        self._eager_next = 0
        self._eager_sent = 0
        self._eager_acked_below = 0
        self._eager_consumed = 0
        self._early: dict[int, Advert] = {}  # adverts that arrived before their predecessors
        self._seen_below = 0
        self._completed_below = 0
        self._credits: dict[int, _Credit] = {}  # advertised, but not complete
        self._newest: _Credit | None = None
        self._wanted: dict[Header, deque[Transfer]] = {}  # waiting for adverts
        self._offered: dict[Header, deque[int]] = {}  # first credits of messages that have not been sent yet
        self._to_send: deque[int] = deque()
        self._granted = 0
        self._sent_packets = 0
        self.resent = 0

    @property
    def credits_seen(self) -> int:
        return self._seen_below

    @property
    def eager_sent(self) -> int:
        """Returns the number of the next eager packet."""
        return self._eager_sent

    @property
    def has_advert_gap(self) -> bool:
        return bool(self._early)

    @property
    def is_idle(self) -> bool:
        return not self._outstanding and not self._eager

    def push(self, message: Eager) -> None:
        self._eager[self._eager_next] = message.pack(self._eager_next)
        self._eager_next += 1

    def transfer(self, header: Header, data: bytes) -> Transfer:
        """Begins a bulk message. Its packets go where the peer's advert says, as soon as the advert arrives."""
        made = Transfer(header=header, data=data)
        self._wanted.setdefault(header, deque()).append(made)
        offered = self._offered.get(header)
        if offered:
            self._bind(offered.popleft())
        return made

    def take(self, now_s: float) -> Packet | None:
        """Returns the next packet to send now, if any."""
        if self._outstanding:
            oldest = next(iter(self._outstanding))
            if now_s > self._outstanding[oldest] + RESEND_S:
                self.resent += 1
                return self._packet(*oldest, now_s)
        if len(self._outstanding) >= self._window_packets:
            return None
        if self._eager_sent < min(self._eager_next, self._eager_consumed + self._eager_slots):
            self._eager_sent += 1
            return self._packet(EAGER_STREAM, self._eager_sent - 1, now_s)
        while self._to_send:
            number = self._to_send[0]
            credit = self._credits.get(number)
            if credit is None or credit.next_unsent == credit.packets:
                self._to_send.popleft()
                continue
            missing = min((index for of, index in self._outstanding if of == number), default=credit.next_unsent)
            if self._sent_packets >= self._granted or credit.next_unsent > missing + REACH_PACKETS:
                return None
            credit.next_unsent += 1
            self._sent_packets += 1
            return self._packet(number, credit.next_unsent - 1, now_s)
        return None

    def on_control(self, control: Control) -> None:
        """Reads acknowledgements and adverts. Raises BadControl for impossible ones."""
        eager_below = nearest(control.eager_received, 32, self._eager_acked_below)
        completed_below = nearest(control.completed_below, 32, self._completed_below)
        if eager_below > self._eager_sent or completed_below > self._seen_below:
            raise BadControl(f"{eager_below} eager packets of {self._eager_sent}, {completed_below} credits")
        for index in [
            *range(self._eager_acked_below, eager_below),
            *(eager_below + 1 + i for i in bits_of(control.eager)),
        ]:
            self._eager.pop(index, None)
            self._outstanding.pop((EAGER_STREAM, index), None)
        self._eager_acked_below = max(self._eager_acked_below, eager_below)
        self._eager_consumed = max(self._eager_consumed, nearest(control.eager_consumed, 32, self._eager_consumed))
        more = (control.granted - self._granted) % (1 << 32)
        self._granted += more if more < 1 << 31 else 0
        for sack in control.sacks:
            number = nearest(sack.credit, 32, self._completed_below)
            for key in [key for key in self._outstanding if key[0] == number]:
                if key[1] < sack.first_missing or sack.bitmap >> key[1] & 1:
                    del self._outstanding[key]
        done = [completed_below + 1 + i for i in bits_of(control.done)]
        for number in [*range(self._completed_below, completed_below), *done]:
            self._complete(number)
        self._completed_below = max(self._completed_below, completed_below)
        self._take_adverts(control)

    def _take_adverts(self, control: Control) -> None:
        first = nearest(control.advert_first, 32, self._seen_below)
        for number, advert in enumerate(control.adverts, first):
            if number >= self._seen_below:
                self._early[number] = advert
        while self._seen_below in self._early:
            self._accept(self._seen_below, self._early.pop(self._seen_below))
            self._seen_below += 1

    def _accept(self, number: int, advert: Advert) -> None:
        before = self._newest
        packets = packet_count(advert.part_bytes, self._payload_max)
        if advert.message is not None:
            self._newest = _Credit(advert=advert, header=advert.message, offset=0, packets=packets)
        elif before is not None:
            offset = before.offset + before.advert.part_bytes
            self._newest = _Credit(advert=advert, header=before.header, offset=offset, packets=packets)
        else:
            raise BadControl("an advert that continues no message")
        credit = self._credits[number] = self._newest
        if advert.message is None:
            if before is not None and before.transfer is not None:
                self._start(number, before.transfer)
        elif self._wanted.get(credit.header):
            self._bind(number)
        else:
            self._offered.setdefault(credit.header, deque()).append(number)

    def _bind(self, number: int) -> None:
        """Assigns a credit, and the credits that continue it, to the oldest message that waits for one."""
        transfer = self._wanted[self._credits[number].header].popleft()
        self._start(number, transfer)
        while (number := number + 1) in self._credits and self._credits[number].advert.message is None:
            self._start(number, transfer)

    def _start(self, number: int, transfer: Transfer) -> None:
        self._credits[number].transfer = transfer
        self._to_send.append(number)

    def _complete(self, number: int) -> None:
        credit = self._credits.pop(number, None)
        if credit is None:
            return
        if credit.transfer is None or credit.next_unsent != credit.packets:
            raise BadControl(f"credit {number} is complete, of which {credit.next_unsent} packets were sent")
        credit.transfer.acknowledged_bytes += credit.advert.part_bytes
        for index in range(credit.packets):
            self._outstanding.pop((number, index), None)

    def _packet(self, number: int, index: int, now_s: float) -> Packet:
        self._outstanding.pop((number, index), None)
        self._outstanding[number, index] = now_s  # newest, so it comes last
        if number == EAGER_STREAM:
            return Packet(immediate=immediate_of(EAGER_SLOT, index), payload=self._eager[index])
        credit = self._credits[number]
        assert credit.transfer is not None
        at = index * self._payload_max
        low = credit.offset + at
        high = min(low + self._payload_max, credit.offset + credit.advert.part_bytes)
        return Packet(
            immediate=immediate_of(slot_of_credit(number), index),
            payload=credit.transfer.data[low:high],
            address=credit.advert.address + at,
            rkey=credit.advert.rkey,
        )
