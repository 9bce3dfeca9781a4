# SPDX-License-Identifier: Apache-2.0
"""The operation of the wire format crosses from device to device, on reliable and unreliable queue pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.rdma

Pair = Callable[..., tuple[Any, Any]]
# Around the packet sizes of 1,024 and 4,096, one byte, and many packets.
SIZES = (1, 1023, 1024, 1025, 4095, 4096, 4097, 65_536, 1 << 20)
LAST_PSN = (1 << 24) - 1


@pytest.mark.parametrize("ip_version", [4, 6])
@pytest.mark.parametrize("qp_type", ["RC", "UC"])
def test_bytes_and_immediate_arrive(pair: Pair, rng: np.random.Generator, qp_type: str, ip_version: int) -> None:
    near, far = pair(qp_type, ip_version=ip_version, size_bytes=max(SIZES))
    for size_bytes in SIZES:
        sent, untouched = rng.bytes(size_bytes), bytes(max(SIZES) - size_bytes)
        immediate = int(rng.integers(1 << 32))
        far.memory.write(bytes(max(SIZES)), max(SIZES))
        near.memory.write(sent, size_bytes)
        far.expect()
        near.write(far, size_bytes, immediate)
        (done,) = near.completions(1)
        assert done.status == "success"
        (arrived,) = far.completions(1)
        assert (arrived.status, arrived.immediate, arrived.size_bytes) == ("success", immediate, size_bytes)
        assert far.memory.read(max(SIZES), 0) == sent + untouched


@pytest.mark.parametrize("qp_type", ["RC", "UC"])
def test_both_directions_at_once_keep_their_order(pair: Pair, qp_type: str) -> None:
    messages = 32
    near, far = pair(qp_type)
    for end in (near, far):  # an unreliable message without a receive is lost
        end.expect(messages)
    for end, peer in ((near, far), (far, near)):
        for number in range(messages):
            end.write(peer, 64, number)
    for end in (near, far):
        received = [entry.immediate for entry in end.completions(2 * messages) if entry.received]
        assert received == list(range(messages))


@pytest.mark.parametrize("qp_type", ["RC", "UC"])
def test_packet_numbers_wrap(pair: Pair, qp_type: str) -> None:
    messages = 8
    near, far = pair(qp_type, first_psn=LAST_PSN - messages // 2)
    far.expect(messages)
    for number in range(messages):
        near.write(far, 1, number)
    assert [entry.immediate for entry in far.completions(messages)] == list(range(messages))
