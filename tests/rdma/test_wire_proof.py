# SPDX-License-Identifier: Apache-2.0
"""The kernel's packets and ours have the same format: each accepts the other's ICRC, and other decoders accept both.

The conformance table tells how the kernel treats a wrong ICRC.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from sennit.testbed.vm import links
from sennit.transport.communicator import Communicator
from sennit.transport.config import TransportKind
from sennit.transport.oracle.roce import REFUSALS

pytestmark = pytest.mark.rdma

Pair = Callable[..., tuple[Any, Any]]
# Every pad, no payload, a full packet, and several packets.
SIZES = (0, 1, 2, 3, 4, 4_095, 4_096, 10_001)
SOURCE_PORT_MIN = 0xC000
WRITE_ONLY_IMMEDIATE, SEND_ONLY, SEND_ONLY_IMMEDIATE = 0x2B, 0x24, 0x25


def check(captures: ModuleType, frames: list[bytes]) -> None:
    for packet in captures.packets(frames):
        assert packet.computed_icrc() == packet.icrc, packet
        assert packet.source[1] >= SOURCE_PORT_MIN
    pytest.importorskip("scapy", reason="scapy is not installed (pip install scapy)")
    captures.check_with_scapy(frames)


def test_decoders_accept_what_the_kernel_sends_over_both_ip_versions(pair: Pair, captures: ModuleType) -> None:
    with captures.Tap(links.netdev(1)) as tap:
        for ip_version in (4, 6):
            near, far = pair("UC", ip_version=ip_version, size_bytes=max(SIZES))
            far.expect(len(SIZES))
            for number, size_bytes in enumerate(SIZES):
                near.write(far, size_bytes, number)
            assert [done.size_bytes for done in far.completions(len(SIZES))] == list(SIZES)
        frames = tap.frames()
    seen = list(captures.packets(frames))
    # 10,001 bytes are three packets.
    assert len(seen) == 2 * (len(SIZES) + 2)
    assert {packet.opcode for packet in seen} >= {WRITE_ONLY_IMMEDIATE}
    # The udp port cannot know this field, which the ICRC covers. Only a capture shows it.
    assert any(packet.identification for packet in seen)
    check(captures, frames)


def test_a_device_and_a_socket_accept_each_others_packets(
    mixed: ModuleType, groups: ModuleType, captures: ModuleType, endpoint: ModuleType, tmp_path: Path
) -> None:
    arrays = np.random.default_rng(0).integers(-1_000, 1_000, (2, 50_021), np.int32)
    frames: list[bytes] = []
    opcodes: dict[str, list[int]] = {mixed.NEAR_ADDRESS: [], mixed.FAR_ADDRESS: []}

    def capture() -> int:
        """Returns how many packets more than before are captured."""
        new = tap.frames()
        frames.extend(new)
        for packet in captures.packets(new):
            opcodes[packet.source[0]].append(packet.opcode)
        return len(new)

    def unaccepted() -> int:
        capture()
        accepted: int = mixed.received_packets()
        return len(opcodes[mixed.FAR_ADDRESS]) - accepted

    def unaccepted_at_rest() -> int:
        """The same, at a moment without a packet between the capture and the counter."""
        found = [unaccepted()]

        def is_at_rest() -> bool:
            found.append(unaccepted())
            return capture() == 0 and found[-1] == found[-2]

        endpoint.until(is_at_rest, lambda: f"a moment without packets, there are {len(frames)}")
        return found[-1]

    are_ready = threading.Barrier(2)

    def work(group: Communicator) -> dict[str, int]:
        # The socket tries the network while the group is made. Packets for a queue pair that is not connected yet are
        # dropped and not counted: their number is the difference here, and must stay it.
        are_ready.wait(groups.TIMEOUT_S)
        dropped = unaccepted_at_rest() if group.rank == 0 else 0
        are_ready.wait(groups.TIMEOUT_S)
        for array in (arrays, arrays[:, :100]):
            np.testing.assert_array_equal(group.allreduce(array[group.rank]), array.sum(axis=0, dtype=np.int32))
        if group.rank == 0:  # While both live: the other rank waits in the barrier.
            endpoint.until(
                lambda: unaccepted() == dropped, lambda: f"{unaccepted() - dropped} packets that are not accepted yet"
            )
        group.barrier()
        return group.counters()

    mixed.execute(f"ip -n {mixed.FAR} link set {mixed.FAR} gso_max_segs 1")  # one packet per frame
    near = groups.Seat(transport=TransportKind.VERBS, interface=mixed.NEAR, host="near")
    far = groups.Seat(transport=TransportKind.UDP, interface=mixed.FAR, host="far", namespace=mixed.FAR)
    with captures.Tap(mixed.NEAR) as tap:
        device, socket = groups.run([near, far], tmp_path, work)
    assert set(opcodes[mixed.NEAR_ADDRESS]) == {SEND_ONLY, WRITE_ONLY_IMMEDIATE}
    # The socket sends eager packets as SEND, because the device chooses their memory.
    assert set(opcodes[mixed.FAR_ADDRESS]) == {SEND_ONLY, SEND_ONLY_IMMEDIATE, WRITE_ONLY_IMMEDIATE}
    assert device["data_packets_received"] > 0
    # Our receiver checked the ICRC of each of the kernel's packets.
    assert socket["data_packets_received"] > 0
    assert {name: socket[name] for name in REFUSALS if socket[name]} == {}
    check(captures, frames)
    captures.check_with_wireshark(frames, tmp_path)
