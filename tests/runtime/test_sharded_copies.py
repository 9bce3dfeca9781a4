# SPDX-License-Identifier: Apache-2.0
"""How often a step of sharded tables copies what it moves: once between ranks of a host, twice over UDP.

Beside that, lookups write sums and the gradients of the model are read, once each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(120)

CASES = "sharded_copy_cases.py"
FLOATS = 4 * 8 * 64 * 256
"""Bytes of a rank's bags, and of their gradients."""
# Messages of a step that tell numbers of ids, and barriers.
SMALL = 4_096
PACKET_BYTES = 10_000
# What was sent after a lost packet comes out of order, and is copied.
WINDOW_PACKETS = 64


@pytest.mark.parametrize("world", [2, 4])
def test_a_host_copies_once(kept_world: Callable[..., Any], world: int) -> None:
    for found in kept_world(world).run(CASES, "step", placement="table_wise"):
        sent, transport = sum(found["sent"].values()), found["transport"]
        # Peers write straight into what the model reads: nothing goes through a ring.
        assert transport.get("shm_fragments_sent", 0) == 0, {k: v for k, v in transport.items() if "shm" in k}
        assert transport["shm_placements_sent"] > 0
        assert found["symmetric"]
        assert sent <= transport["shm_bytes_sent"] <= sent + SMALL
        assert found["sent"]["sums"] == FLOATS // world * (world - 1)
        # No operator of torch copies a sum. Gradients, which autograd makes one by one, are read into one vector.
        assert found["forward"] == 0
        assert found["backward"] == FLOATS


def test_udp_copies_twice(kept_world: Callable[..., Any]) -> None:
    """The kernel copies from the sender's memory, and into the receiver's."""
    found = kept_world(2, "udp").run(CASES, "step", placement="table_wise")
    for one in found:
        sent, transport = sum(one["sent"].values()), one["transport"]
        # A rank that has no core for a while makes its peers send again, at any time.
        again = transport.get("retransmitted_packets", 0)
        assert sent <= transport["data_bytes_sent"] <= sent + SMALL + again * PACKET_BYTES
        assert transport["placed_in_place"] > 20 * max(transport.get("placed_by_copy", 0) - again * WINDOW_PACKETS, 0)
        assert one["forward"] == 0
        assert one["backward"] == FLOATS


def test_results_of_replicas_are_written_in_place(kept_world: Callable[..., Any]) -> None:
    """Half of what each of two ranks sends is a result, which the peer's gradients hold without another copy."""
    for transport in kept_world(2).run(CASES, "replicas"):
        assert transport["shm_placements_sent"] >= transport.get("shm_fragments_sent", 0) > 0
