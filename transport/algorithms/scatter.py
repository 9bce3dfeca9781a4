# SPDX-License-Identifier: Apache-2.0
"""Scatter: every rank gets its part of the root's input, straight from there."""

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


def scatter(
    *,
    world: int,
    rank: int,
    counts: Sequence[int],
    item_bytes: int,
    root: int,
    type_code: int = Dtype.U8,
    list_input: bool = False,
    segment_bytes: int | None = None,
) -> Plan:
    """Rank j gets `counts[j]` elements. Ranks other than the root use only their own entry.

    Buffers: at the root `[input, output]`, or `[input0, .., output]` with `list_input`; elsewhere `[output]`.
    `segment_bytes` cuts messages (`ranges.segments`).
    """
    check_counts("counts", counts, world)
    check_root(root, world)
    own_bytes = counts[rank] * item_bytes
    input_bytes = buffer_sizes(counts, item_bytes, list_input) if rank == root else []
    builder = PlanBuilder(
        "scatter",
        world=world,
        rank=rank,
        signature=signature(Kind.SCATTER, type_code=type_code, root=root),
        buffer_bytes=[*input_bytes, own_bytes],
    )
    if rank != root:
        recv_part(builder, root, 0, Range(0, own_bytes), segment_bytes)
        return builder.build()
    inputs = places(counts, item_bytes, 0, list_input)
    for peer in peers_after(rank, world):
        buffer, part = inputs[peer]
        send_part(builder, peer, buffer, part, segment_bytes)
    buffer, part = inputs[rank]
    copy_local(builder, buffer, part.offset, len(input_bytes), 0, own_bytes)
    return builder.build()
