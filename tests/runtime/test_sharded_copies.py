# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,arg-type,misc"
"""How often a step of sharded tables copies what it moves: once between ranks of a host, twice over UDP.

Beside that, lookups write sums and the gradients of the model are read, once each.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sennit.runtime.backend import communicator, is_symmetric
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import Features, ShardedEmbeddingBags, Table
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(120)
# Operators that write a tensor from another one.
COPIES = ("copy_", "clone", "cat", "index_select", "index", "gather", "contiguous", "_to_copy", "stack", "scatter_")
TABLES, DIM, EACH, SAMPLES = 8, 64, 10, 256


class Copied(TorchDispatchMode):
    """Bytes that torch's operators copy, by the type of element."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in COPIES and isinstance(result, Tensor):
            self.bytes[result.dtype] += result.nbytes
        return result


def counters() -> Counter[str]:
    return Counter(communicator().counters())


def step(rank: int, world: int, /, placement: str, **shards: int) -> dict[str, Any]:
    """What a step copies and sends, of several tables of one width, in so many `row_shards` and `column_shards`."""
    tables = [Table(name=f"t{number}", rows=1000, dim=DIM, **shards) for number in range(TABLES)]
    module = ShardedEmbeddingBags(tables, lr=0.1, placement=placement, gradients="sum")
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 1000, (TABLES * SAMPLES * EACH,), generator=generator, dtype=torch.int32)
    batch = Features(lengths=torch.full((TABLES, SAMPLES), EACH, dtype=torch.int32), values=ids)
    for _ in range(2):  # The first step makes plans and maps memory.
        sent_before, before = Counter(module.sent_bytes), counters()
        sent = module.send(batch)
        with Copied() as forward:
            found = list(module(sent).values())
        with Copied() as backward:
            torch.autograd.backward(found, [vectors.detach() for vectors in found])
        dist.barrier()
    return {
        "forward": forward.bytes[torch.float32],
        "backward": backward.bytes[torch.float32],
        "sent": dict(Counter(module.sent_bytes) - sent_before),
        "transport": dict(counters() - before),
        "symmetric": all(is_symmetric(vectors) for vectors in found),
    }


def replicas(rank: int, world: int) -> dict[str, int]:
    """What the AllReduce of gradients sends between ranks of one host."""
    module = SlicedReplicas(torch.nn.Linear(900, 900))
    for _ in range(2):
        before = counters()
        outputs = module(torch.ones(8, 900))
        module.loss(outputs.sum(1).view(-1, 8 // len(range(*module.slices.own))).sum(1)).backward()
        dist.barrier()
    return dict(counters() - before)


FLOATS = 4 * 8 * 64 * 256
"""Bytes of a rank's bags, and of their gradients."""
# Messages of a step that tell numbers of ids, and barriers.
SMALL = 4_096
PACKET_BYTES = 20_480
# What was sent after a lost packet comes out of order, and is copied.
WINDOW_PACKETS = 64
# A small message that comes before its rank waits for it is copied: numbers of ids, and which results have gradients.
EARLY_PACKETS = 4


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
def test_a_host_copies_once(kept_world: WorldFactory, world: int, placement: str, rows: int, columns: int) -> None:
    shards: dict[str, Any] = {"row_shards": rows, "column_shards": columns}
    for found in kept_world(world).run(step, placement=placement, **shards):
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
def test_udp_copies_twice(kept_world: WorldFactory, placement: str, rows: int, columns: int) -> None:
    """The kernel copies from the sender's memory, and into the receiver's."""
    shards: dict[str, Any] = {"row_shards": rows, "column_shards": columns}
    for one in kept_world(2, "udp").run(step, placement=placement, **shards):
        sent, transport = sum(one["sent"].values()), one["transport"]
        # A rank that has no core for a while makes its peers send again, at any time.
        again = transport.get("retransmitted_packets", 0)
        assert sent <= transport["data_bytes_sent"] <= sent + SMALL + again * PACKET_BYTES
        excused = again * WINDOW_PACKETS + EARLY_PACKETS
        assert transport["placed_in_place"] > 10 * max(transport.get("placed_by_copy", 0) - excused, 0)
        check_own_copies(one, rows, columns)


def test_results_of_replicas_are_written_in_place(kept_world: WorldFactory) -> None:
    """Half of what each of two ranks sends is a result, which the peer's gradients hold without another copy."""
    for transport in kept_world(2).run(replicas):
        assert transport["shm_placements_sent"] >= transport.get("shm_fragments_sent", 0) > 0
