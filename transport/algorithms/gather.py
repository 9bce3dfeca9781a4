# SPDX-License-Identifier: Apache-2.0
"""Gather: the root gets every rank's part, straight from each."""

from __future__ import annotations

from collections.abc import Sequence

from sennit.transport.algorithms.ranges import (
    Range,
    buffer_sizes,
    check_counts,
    check_root,
    copy_local,
    peers_after,
    places,
    recv_part,
    send_part,
)
from sennit.transport.elements import Dtype
from sennit.transport.plan import Plan, PlanBuilder
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
    segment_bytes: int | None = None,
) -> Plan:
    """Rank j gives `counts[j]` elements. Ranks other than the root use only their own entry.

    Buffers: at the root `[input, output]`, or `[input, output0, ..]` with `list_output`; elsewhere `[input]`.
    `segment_bytes` cuts messages (`ranges.segments`).
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
        send_part(builder, root, 0, Range(0, own_bytes), segment_bytes)
        return builder.build()
    outputs = places(counts, item_bytes, 1, list_output)
    for peer in peers_after(rank, world):
        buffer, part = outputs[peer]
        recv_part(builder, peer, buffer, part, segment_bytes)
    buffer, part = outputs[rank]
    copy_local(builder, 0, 0, buffer, part.offset, own_bytes)
    return builder.build()
