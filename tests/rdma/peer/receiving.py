# SPDX-License-Identifier: Apache-2.0
"""The receiving half of a flow: credits, the eager stream, and the part of a control that reports both."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from .controls import Advert, BadControl, Control, Flag, Sack
from .messages import Eager, Header
from .numbers import (
    CREDIT_MAX_PACKETS,
    CREDITS_OPEN_MAX,
    EAGER_SLOT,
    INDEX_BITS,
    credit_of_slot,
    first_zero,
    nearest,
    packet_count,
    split_immediate,
)

UNLIMITED_PACKETS: Final = 1 << 30
ADVERT_RETRY_S: Final = 0.05


@dataclass(kw_only=True, eq=False)
class Memory:
    """Destination of a message."""

    header: Header
    address: int
    rkey: int
    open_parts: int = 0
    is_advertised: bool = False

    @property
    def is_full(self) -> bool:
        return self.is_advertised and self.open_parts == 0


@dataclass(kw_only=True, eq=False)
class _Credit:
    memory: Memory
    advert: Advert
    packets: int
    present: int = 0
    is_complete: bool = False


class Receiving:
    """Has no device and no clock: arrivals and times are arguments."""

    def __init__(self, payload_max: int, eager_slots: int) -> None:
        self._payload_max = payload_max
        self._eager_slots = eager_slots
        self._credits: dict[int, _Credit] = {}  # open credits by number
        self._waiting: deque[tuple[Memory, Advert]] = deque()  # for a place among the open credits
        self._completed_below = 0
        self._next_credit = 0
        self._seen_below = 0  # adverts below this have reached the peer
        self._advert_next = 0  # the first advert to send, or to send again
        self._adverts_sent_s = 0.0
        self._bulk_packets = 0
        self._granted = 0
        self.grant_packets = UNLIMITED_PACKETS
        """Packets that may be sent beyond those that have arrived."""
        self._eager: dict[int, Eager] = {}  # arrived after a gap
        self._eager_below = 0

    def advertise(self, memory: Memory) -> None:
        """Opens one credit for each 16,384 packets. The first advert tells the message."""
        part_max_bytes = CREDIT_MAX_PACKETS * self._payload_max
        size_bytes = memory.header.size_bytes
        memory.is_advertised = True
        for offset in range(0, max(size_bytes, 1), part_max_bytes):
            advert = Advert(
                address=memory.address + offset,
                rkey=memory.rkey,
                part_bytes=min(size_bytes - offset, part_max_bytes),
                message=memory.header if offset == 0 else None,
            )
            self._waiting.append((memory, advert))
            memory.open_parts += 1
        self._open_credits()

    def on_bulk(self, immediate: int, size_bytes: int) -> bool:
        """Returns False for a packet outside adverts or grant. The device has already placed it."""
        slot, index = split_immediate(immediate)
        number = credit_of_slot(slot, self._completed_below)
        if slot == EAGER_SLOT or number >= self._next_credit:
            return False
        credit = self._credits.get(number)
        if credit is None or credit.present >> index & 1:
            return True
        left_bytes = credit.advert.part_bytes - index * self._payload_max
        if index >= credit.packets or size_bytes != min(left_bytes, self._payload_max):
            return False
        credit.present |= 1 << index
        self._bulk_packets += 1
        if self._bulk_packets > self._granted:
            return False
        self._seen_below = max(self._seen_below, number + 1)
        if first_zero(credit.present) == credit.packets:
            credit.is_complete = True
            credit.memory.open_parts -= 1
            while self._completed_below in self._credits and self._credits[self._completed_below].is_complete:
                del self._credits[self._completed_below]
                self._completed_below += 1
            self._open_credits()
        return True

    def on_eager(self, immediate: int, payload: bytes) -> list[Eager] | None:
        """Returns the messages that are next in order; None for a packet that is not of the eager window."""
        number = nearest(immediate, INDEX_BITS, self._eager_below)
        if number >= self._eager_below + self._eager_slots:
            return None
        if number < self._eager_below or number in self._eager:
            return []
        message = Eager.unpack(payload, number)
        if message is None:
            return None
        self._eager[number] = message
        ready = []
        while self._eager_below in self._eager:
            ready.append(self._eager.pop(self._eager_below))
            self._eager_below += 1
        return ready

    def on_control(self, control: Control) -> None:
        """Reads what the peer reports about adverts. Raises BadControl before it changes anything."""
        seen_below = nearest(control.credits_seen, 32, self._seen_below)
        if seen_below > self._next_credit:
            raise BadControl(f"{seen_below} adverts have arrived, of {self._next_credit}")
        self._seen_below = max(self._seen_below, seen_below)
        if Flag.ADVERT_GAP in control.flags:
            self._advert_next = self._seen_below

    def is_advert_due(self, now_s: float) -> bool:
        return self._first_advert(now_s) < self._next_credit

    def state(self, now_s: float, room_bytes: int) -> dict[str, Any]:
        """Returns the fields of a control, with as many adverts and SACK entries as fit."""
        self._granted = max(self._granted, self._bulk_packets + self.grant_packets)
        ahead = (1 << number - self._completed_below - 1 for number in self._complete_beyond())
        fields: dict[str, Any] = {
            "completed_below": self._completed_below,
            "done": sum(ahead),
            "eager_received": self._eager_below,
            "eager_consumed": self._eager_below,  # each message is consumed at once
            "eager": sum(1 << number - self._eager_below - 1 for number in self._eager),
            "granted": self._granted,
        }
        room_bytes -= len(Control(**fields).pack())
        sacks = [
            Sack(credit=number, first_missing=first_zero(credit.present), bitmap=credit.present)
            for number, credit in self._credits.items()
            if credit.present and not credit.is_complete
        ]
        fields["sacks"], room_bytes = _fitting(sacks, room_bytes)
        first = self._first_advert(now_s)
        fields["advert_first"] = first
        adverts = [self._credits[number].advert for number in range(first, self._next_credit)]
        fields["adverts"], _ = _fitting(adverts, room_bytes)
        if fields["adverts"]:
            self._advert_next = first + len(fields["adverts"])
            self._adverts_sent_s = now_s
        return fields

    def _first_advert(self, now_s: float) -> int:
        """Returns the first advert to send. Adverts that the peer has not seen after a while are sent again."""
        is_overdue = now_s > self._adverts_sent_s + ADVERT_RETRY_S
        return self._seen_below if is_overdue else max(self._advert_next, self._seen_below)

    def _complete_beyond(self) -> list[int]:
        return [number for number, credit in self._credits.items() if credit.is_complete]

    def _open_credits(self) -> None:
        while self._waiting and self._next_credit < self._completed_below + CREDITS_OPEN_MAX:
            memory, advert = self._waiting.popleft()
            packets = packet_count(advert.part_bytes, self._payload_max)
            self._credits[self._next_credit] = _Credit(memory=memory, advert=advert, packets=packets)
            self._next_credit += 1


def _fitting(entries: list[Any], room_bytes: int) -> tuple[tuple[Any, ...], int]:
    fitting = []
    for entry in entries:
        size_bytes = len(entry.pack())
        if size_bytes > room_bytes:
            break
        fitting.append(entry)
        room_bytes -= size_bytes
    return tuple(fitting), room_bytes
