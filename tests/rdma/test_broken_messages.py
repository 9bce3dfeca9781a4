# SPDX-License-Identifier: Apache-2.0
"""A defect of rdma_rxe (docs/upstream): the effect of one lost packet of a longer message on an unreliable queue pair.

Because of it, no message of ours has more than one packet. These tests fail on a kernel without the defect.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from sennit.testbed.vm import runner
from sennit.transport.oracle.roce import ROCE_UDP_PORT

pytestmark = pytest.mark.rdma

IS_PATCHED = any(name.startswith("0001-") for name in os.environ.get(runner.PATCHES_VARIABLE, "").split(":"))
PACKET_BYTES = 4_096
# IBTA 9.2.1
SEND_FIRST, SEND_LAST, SEND_ONLY, WRITE_FIRST, WRITE_LAST_IMMEDIATE = 0x20, 0x22, 0x24, 0x26, 0x29
WITNESSES = 16
either_queue = pytest.mark.parametrize("shared_queue", [False, True], ids=["own receives", "shared receives"])


@pytest.fixture
def sockets(conformance: ModuleType) -> Iterator[Callable[[], Any]]:
    """Makes sockets that send to rxe1 as rxe0."""
    with contextlib.ExitStack() as stack:
        peer, own = conformance.rxe_target.addresses(6)
        yield lambda: stack.enter_context(conformance.sockets.Sockets(peer, peer, own))


def wait_for_others(conformance: ModuleType, endpoint: ModuleType, sockets: Any) -> None:
    """Sends packets to another queue pair after all others, and waits until they have arrived."""
    with conformance.rxe_target.RxeTarget(endpoint, sockets, 6, shared_queue=False) as other:
        (aim,) = other.open([bytes(PACKET_BYTES)], 0)
        for _ in range(WITNESSES):
            other.send(aim.datagram())
            other.completions(aim.immediate)
        other.close([aim])


@either_queue
def test_a_write_that_lost_a_packet_ends_the_queue_pair(
    conformance: ModuleType, endpoint: ModuleType, sockets: Callable[[], Any], shared_queue: bool
) -> None:
    with conformance.rxe_target.RxeTarget(endpoint, sockets(), 6, shared_queue=shared_queue) as target:
        aims = target.open([bytes(PACKET_BYTES)] * 3, 0)
        target.send(aims[0].datagram(opcode=WRITE_FIRST, length=3 * PACKET_BYTES, immediate=None))
        target.send(aims[2].datagram(opcode=WRITE_LAST_IMMEDIATE, address=None))  # the middle one is lost
        for aim in aims * 4:
            target.send(aim.datagram(psn=3))
        if IS_PATCHED:
            for aim in aims * 4:
                assert target.completions(aim.immediate) == [("success", aim.immediate, PACKET_BYTES)]
        else:
            wait_for_others(conformance, endpoint, sockets())
        target.close(aims)


@either_queue
def test_a_send_that_lost_a_packet_costs_the_next_one_or_all(
    conformance: ModuleType, endpoint: ModuleType, sockets: Callable[[], Any], shared_queue: bool
) -> None:
    make = conformance.packets
    with contextlib.ExitStack() as stack:
        near, far = (
            stack.enter_context(
                endpoint.Endpoint(
                    device, qp_type="UC", ip_version=6, size_bytes=4 * PACKET_BYTES, shared_queue=shared_queue
                )
            )
            for device in range(2)
        )
        far.connect(near)
        far.expect(8, size_bytes=4 * PACKET_BYTES)
        sender = sockets()
        sender.aim(ROCE_UDP_PORT)

        def send(opcode: int, psn: int, size_bytes: int) -> None:
            head = make.BTH.pack(opcode, 0, 0xFFFF, far.qp.qp_num, psn)
            sender.send(make.Datagram(body=head + bytes(size_bytes), payload=bytes(size_bytes)))

        send(SEND_FIRST, 0, PACKET_BYTES)
        send(SEND_LAST, 2, PACKET_BYTES)  # the middle one is lost
        sizes = [100, 104, 108]
        for psn, size_bytes in enumerate(sizes, 3):
            send(SEND_ONLY, psn, size_bytes)
        # A shared receive is returned in place of the packet that shows that the message is broken.
        error = [("remote invalidate request error", 0)] if shared_queue else []
        lost = (1 if shared_queue else 0) if IS_PATCHED else (len(sizes) if shared_queue else 1)
        expected = error + [("success", size_bytes) for size_bytes in sizes[lost:]]
        found = [
            (done.status, done.size_bytes if done.status == "success" else 0) for done in far.completions(len(expected))
        ]
        assert found == expected
        wait_for_others(conformance, endpoint, sockets())
        assert far.idle()
