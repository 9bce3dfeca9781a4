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
PACKET_BYTES = 20_480
# What was sent after a lost packet comes out of order, and is copied.
WINDOW_PACKETS = 64


@pytest.mark.parametrize(
    ("world", "placement", "rows", "columns"),
    [
        (2, "table_wise", 1, 1),
        (4, "table_wise", 1, 1),
        (4, "row_wise", 4, 1),
        (4, "column_wise", 1, 4),
        (4, "grid", 2, 2),
    ],
)
def test_a_host_copies_once(
    kept_world: Callable[..., Any], world: int, placement: str, rows: int, columns: int
) -> None:
    shards = {"row_shards": rows, "column_shards": columns}
    for found in kept_world(world).run(CASES, "step", placement=placement, **shards):
        sent, transport = sum(found["sent"].values()), found["transport"]
        # Peers write straight into what the model reads: nothing goes through a ring.
        assert transport.get("shm_fragments_sent", 0) == 0, {k: v for k, v in transport.items() if "shm" in k}
        assert transport["shm_placements_sent"] > 0
        assert sent <= transport["shm_bytes_sent"] <= sent + SMALL
        # A rank with row shards sends sums of its own rows.
        assert found["sent"]["sums"] == rows * FLOATS // world * (world - 1)
        check_own_copies(found, rows, columns)
        # What columns are put together in is not what others write into.
        assert found["symmetric"] == (columns == 1)


def check_own_copies(found: dict[str, Any], rows: int, columns: int) -> None:
    """No operator of torch copies a sum, but where columns of a bag are put together. Gradients, which autograd makes
    one by one, are read into one vector, which has those of a bag once for each row shard."""
    assert found["forward"] == (FLOATS if columns > 1 else 0)
    assert found["backward"] == rows * FLOATS


@pytest.mark.parametrize(
    ("placement", "rows", "columns"), [("table_wise", 1, 1), ("row_wise", 2, 1), ("column_wise", 1, 2)]
)
def test_udp_copies_twice(kept_world: Callable[..., Any], placement: str, rows: int, columns: int) -> None:
    """The kernel copies from the sender's memory, and into the receiver's."""
    shards = {"row_shards": rows, "column_shards": columns}
    for one in kept_world(2, "udp").run(CASES, "step", placement=placement, **shards):
        sent, transport = sum(one["sent"].values()), one["transport"]
        # A rank that has no core for a while makes its peers send again, at any time.
        again = transport.get("retransmitted_packets", 0)
        assert sent <= transport["data_bytes_sent"] <= sent + SMALL + again * PACKET_BYTES
        assert transport["placed_in_place"] > 10 * max(transport.get("placed_by_copy", 0) - again * WINDOW_PACKETS, 0)
        check_own_copies(one, rows, columns)


def test_results_of_replicas_are_written_in_place(kept_world: Callable[..., Any]) -> None:
    """Half of what each of two ranks sends is a result, which the peer's gradients hold without another copy."""
    for transport in kept_world(2).run(CASES, "replicas"):
        assert transport["shm_placements_sent"] >= transport.get("shm_fragments_sent", 0) > 0
