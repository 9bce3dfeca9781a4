# SPDX-License-Identifier: Apache-2.0
"""The Python rank's two halves against each other, without a device: cases with too many packets for a VM."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

EAGER_SLOTS = 64
ROUND_S = 0.04


class Flow:
    """One direction, and a network that loses, duplicates and reorders packets in both directions."""

    def __init__(self, halves: ModuleType, rng: np.random.Generator, payload_max: int, loss: float) -> None:
        self.halves = halves
        self.rng = rng
        self.payload_max = payload_max
        self.loss = loss
        self.sending = halves.sending.Sending(payload_max=payload_max, window_packets=512, eager_slots=EAGER_SLOTS)
        self.receiving = halves.receiving.Receiving(payload_max, EAGER_SLOTS)
        self.memory = bytearray(1 << 20)
        self.delivered: list[Any] = []
        self.now_s = 0.0

    def carry(self, packets: list[Any]) -> list[Any]:
        copies = [packet for packet in packets for _ in range(1 + int(self.rng.random() < self.loss))]
        arriving = [packet for packet in copies if self.rng.random() >= self.loss]
        if self.loss:
            self.rng.shuffle(arriving)
        return arriving

    def round(self) -> None:
        self.now_s += ROUND_S
        packets = []
        while (packet := self.sending.take(self.now_s)) is not None:
            packets.append(packet)
        for packet in self.carry(packets):
            if packet.rkey is None:
                self.delivered += self.receiving.on_eager(packet.immediate, packet.payload)
                continue
            self.memory[packet.address : packet.address + len(packet.payload)] = packet.payload
            assert self.receiving.on_bulk(packet.immediate, len(packet.payload))
        controls = []
        for _ in range(8):
            controls.append(self.halves.controls.Control(**self.receiving.state(self.now_s, 4_096)).pack())
        for control in self.carry(controls):
            self.sending.on_control(self.halves.controls.Control.unpack(control))
        flags = self.halves.controls.Flag.ADVERT_GAP if self.sending.has_advert_gap else 0
        back = self.halves.controls.Control(
            flags=self.halves.controls.Flag(flags), credits_seen=self.sending.credits_seen
        ).pack()
        for control in self.carry([back]):
            self.receiving.on_control(self.halves.controls.Control.unpack(control))

    def until(self, condition: Any, rounds_max: int = 5_000) -> None:
        for _ in range(rounds_max):
            if condition():
                return
            self.round()
        pytest.fail(f"not after {rounds_max} rounds")


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_a_message_of_several_credits_arrives(halves: ModuleType, rng: np.random.Generator, loss: float) -> None:
    flow = Flow(halves, rng, payload_max=2, loss=loss)
    size_bytes = 2 * 16_384 + 2 * 700 + 1
    header = halves.messages.Header(1, 2, size_bytes)
    data = rng.bytes(size_bytes)
    memory = halves.receiving.Memory(header=header, address=64, rkey=9)
    flow.receiving.advertise(memory)
    transfer = flow.sending.transfer(header, data)
    flow.until(lambda: transfer.is_sent)
    assert memory.is_full
    assert bytes(flow.memory[64 : 64 + size_bytes]) == data


def test_slots_of_credits_come_round(halves: ModuleType, rng: np.random.Generator) -> None:
    flow = Flow(halves, rng, payload_max=8, loss=0.02)
    messages = 4_500  # there are 4,095 slots
    headers = [halves.messages.Header(key, 0, key % 9) for key in range(messages)]
    memories = [halves.receiving.Memory(header=header, address=8 * header.key, rkey=1) for header in headers]
    sent = [rng.bytes(header.size_bytes) for header in headers]
    for memory in memories:
        flow.receiving.advertise(memory)
    transfers = [flow.sending.transfer(header, data) for header, data in zip(headers, sent, strict=True)]
    flow.until(lambda: all(transfer.is_sent for transfer in transfers) and flow.sending.is_idle)
    assert all(memory.is_full for memory in memories)
    for header, data in zip(headers, sent, strict=True):
        assert bytes(flow.memory[8 * header.key : 8 * header.key + len(data)]) == data


def test_eager_messages_keep_their_order(halves: ModuleType, rng: np.random.Generator) -> None:
    flow = Flow(halves, rng, payload_max=64, loss=0.1)
    messages = [
        halves.messages.Eager(halves.messages.Kind.DATA, halves.messages.Header(key, 3, key % 20), rng.bytes(key % 20))
        for key in range(1_000)
    ]
    for message in messages:
        flow.sending.push(message)
    flow.until(lambda: flow.sending.is_idle)
    assert flow.delivered == messages


def test_an_eager_packet_of_another_lap_is_none_of_the_window(halves: ModuleType) -> None:
    receiving = halves.receiving.Receiving(64, EAGER_SLOTS)
    message = halves.messages.Eager(halves.messages.Kind.REQUEST, halves.messages.Header(1, 2, 3), b"")
    assert receiving.on_eager(0, message.pack(number=1 << 20)) is None
    assert receiving.on_eager(0, message.pack(number=0)) == [message]


def test_every_truncation_of_a_control_is_refused(halves: ModuleType) -> None:
    controls = halves.controls
    payload = controls.Control(
        done=1,
        eager=5,
        echoes=(controls.Echo(path=1, immediate=7, delay_us=9, received=3),),
        sacks=(controls.Sack(credit=4, first_missing=70, bitmap=3 << 71),),
        adverts=(controls.Advert(address=1, rkey=2, part_bytes=3, message=None),),
        reason="so",
    ).pack()
    assert controls.Control.unpack(payload).pack() == payload
    for size_bytes in range(len(payload)):
        with pytest.raises(controls.BadControl):
            controls.Control.unpack(payload[:size_bytes])
