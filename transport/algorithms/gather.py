# SPDX-License-Identifier: Apache-2.0
"""Gather: the root gets every rank's part, straight from each."""

from __future__ import annotations

from collections.abc import Sequence

from sennit.transport.algorithms.ranges import (
    buffer_sizes,
    check_counts,
    check_root,
    copy_local,
    peers_after,
    places,
)
from sennit.transport.elements import Dtype
from sennit.transport.plan import Operand, Plan, PlanBuilder
from sennit.transport.signature import Kind, signature


def gather(
    *,
    world: int,
    rank: int,
    counts: Sequence[int],
    item_bytes: int,
    root: int,
    type_code: int = Dtype.U8,
    list_output: bool = False,
) -> Plan:
    """Rank j gives `counts[j]` elements; ranks other than the root look at their own entry only.

    Buffers: at the root `[input, output]`, or `[input, output0, ..]` with `list_output`; elsewhere `[input]`.
    """
    check_counts("counts", counts, world)
    check_root(root, world)
    own_bytes = counts[rank] * item_bytes
    builder = PlanBuilder(
        "gather",
        world=world,
        rank=rank,
        signature=signature(Kind.GATHER, type_code=type_code, root=root),
        buffer_bytes=[own_bytes, *(buffer_sizes(counts, item_bytes, list_output) if rank == root else [])],
    )
    if rank != root:
        builder.send(root, 0, Operand(0), own_bytes)
        return builder.build()
    outputs = places(counts, item_bytes, 1, list_output)
    for peer in peers_after(rank, world):
        buffer, part = outputs[peer]
        builder.recv(peer, 0, buffer, part.offset, part.size_bytes)
    buffer, part = outputs[rank]
    copy_local(builder, 0, 0, buffer, part.offset, own_bytes)
    return builder.build()
