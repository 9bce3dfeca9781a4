# SPDX-License-Identifier: Apache-2.0
"""Allgather: every rank gets every rank's part, sent straight to where it belongs."""

from __future__ import annotations

from collections.abc import Sequence

from sennit.transport.algorithms.ranges import (
    Range,
    buffer_sizes,
    check_counts,
    copy_local,
    peers_after,
    peers_before,
    places,
    recv_part,
    send_part,
)
from sennit.transport.elements import Dtype
from sennit.transport.plan import Plan, PlanBuilder
from sennit.transport.signature import Kind, signature


def allgather(
    *,
    world: int,
    rank: int,
    counts: Sequence[int],
    item_bytes: int,
    type_code: int = Dtype.U8,
    in_place: bool = False,
    list_output: bool = False,
    segment_bytes: int | None = None,
) -> Plan:
    """Rank j gives `counts[j]` elements.

    Buffers: `[input, output]`, or `[input, output0, ..]` with `list_output`. `in_place` leaves `input` out, because
    this rank's part is already in the output. `segment_bytes` cuts messages (`ranges.segments`).
    """
    check_counts("counts", counts, world)
    own_bytes = counts[rank] * item_bytes
    builder = PlanBuilder(
        "allgather",
        world=world,
        rank=rank,
        signature=signature(Kind.ALLGATHER, type_code=type_code, elements=sum(counts)),
        buffer_bytes=[*([] if in_place else [own_bytes]), *buffer_sizes(counts, item_bytes, list_output)],
    )
    outputs = places(counts, item_bytes, 0 if in_place else 1, list_output)
    own_buffer, own_part = outputs[rank]
    source, sent_part = (own_buffer, own_part) if in_place else (0, Range(0, own_bytes))
    for peer in peers_after(rank, world):
        send_part(builder, peer, source, sent_part, segment_bytes)
    for peer in peers_before(rank, world):
        buffer, part = outputs[peer]
        recv_part(builder, peer, buffer, part, segment_bytes)
    if not in_place:
        copy_local(builder, 0, 0, own_buffer, own_part.offset, own_bytes)
    return builder.build()
