# SPDX-License-Identifier: Apache-2.0
"""netem on a link affects RoCE packets: they cross a cable, and the kernel's counters show the effect."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from sennit.testbed.vm import links

pytestmark = pytest.mark.rdma

Pair = Callable[..., tuple[Any, Any]]
Netem = Callable[[int, str], None]
NEAR, FAR = 0, 1
MESSAGES = 16


def lost_packets(device: int) -> int:
    shown = subprocess.run(
        ["tc", "-s", "qdisc", "show", "dev", links.netdev(device)],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout
    return int(shown.partition("(dropped ")[2].partition(",")[0])


def test_an_unreliable_message_that_is_lost_stays_lost(pair: Pair, netem: Netem, endpoint: ModuleType) -> None:
    near, far = pair("UC")
    far.expect(MESSAGES + 1)
    netem(NEAR, "loss 100%")
    # Read in this order, because the kernel renews counters some milliseconds after a read.
    received = endpoint.counter(FAR, "rcvd_pkts")
    sent = endpoint.counter(NEAR, "sent_pkts")
    for number in range(MESSAGES):
        near.write(far, 1024, number)
    # The sender cannot notice the loss.
    assert [done.status for done in near.completions(MESSAGES)] == ["success"] * MESSAGES
    endpoint.until(lambda: lost_packets(NEAR) == MESSAGES, lambda: f"{lost_packets(NEAR)} drops to be {MESSAGES}")
    endpoint.until(
        lambda: endpoint.counter(NEAR, "sent_pkts") - sent == MESSAGES, lambda: f"{MESSAGES} packets to be counted"
    )
    assert endpoint.counter(FAR, "rcvd_pkts") == received
    assert far.idle()
    netem(NEAR, "loss 0%")
    near.write(far, 1024, MESSAGES)
    assert [done.immediate for done in far.completions(1)] == [MESSAGES]


def test_a_reliable_message_that_is_lost_is_sent_again(pair: Pair, netem: Netem, endpoint: ModuleType) -> None:
    near, far = pair("RC")
    far.expect()
    netem(NEAR, "loss 100%")
    near.write(far, 1024, 7)
    endpoint.until(lambda: lost_packets(NEAR) >= 1, lambda: "a drop")
    assert far.idle()
    netem(NEAR, "loss 0%")
    assert [done.immediate for done in far.completions(1)] == [7]
    assert [done.status for done in near.completions(1)] == ["success"]


def test_a_repeated_packet_is_delivered_once(pair: Pair, netem: Netem, endpoint: ModuleType) -> None:
    near, far = pair("RC")
    netem(NEAR, "duplicate 100%")
    far.expect(2 * MESSAGES)
    repeated = endpoint.counter(FAR, "duplicate_request")
    for number in range(MESSAGES):
        near.write(far, 1024, number)
        assert [done.immediate for done in far.completions(1)] == [number]
        assert [done.status for done in near.completions(1)] == ["success"]
    endpoint.until(
        lambda: endpoint.counter(FAR, "duplicate_request") - repeated >= MESSAGES,
        lambda: "all duplicates to be counted",
    )
    assert far.idle()


def test_a_corrupted_packet_never_changes_what_arrives(pair: Pair, netem: Netem, endpoint: ModuleType) -> None:
    near, far = pair("UC")
    payload = random.Random(1).randbytes(4096)
    untouched = bytes(len(payload))
    near.memory.write(payload, len(payload))
    far.memory.write(untouched, len(untouched))
    far.expect(MESSAGES + 1)
    # netem flips one bit of each packet, in the headers or in the payload. Some 80 of 33,000 bits are in fields that no
    # checksum covers (the address of the Ethernet source, reserved bits of the BTH): such a packet arrives, unchanged.
    netem(NEAR, "corrupt 100%")
    for number in range(MESSAGES):
        near.write(far, len(payload), number)
    near.completions(MESSAGES)
    netem(NEAR, "corrupt 0%")
    near.write(far, 0, MESSAGES)
    arrived: list[int] = []
    while MESSAGES not in arrived:
        arrived += [done.immediate for done in far.completions(1)]
    assert len(arrived) <= MESSAGES // 2
    assert far.memory.read(len(payload), 0) == (untouched if arrived == [MESSAGES] else payload)
