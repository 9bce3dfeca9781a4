# SPDX-License-Identifier: Apache-2.0
"""Allgather: every rank gets every rank's part, sent straight to where it belongs."""

from __future__ import annotations

from collections.abc import Sequence

from sennit.transport.algorithms.ranges import (
    buffer_sizes,
    check_counts,
    copy_local,
    peers_after,
    peers_before,
    places,
)
from sennit.transport.elements import Dtype
from sennit.transport.plan import Operand, Plan, PlanBuilder
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
) -> Plan:
    """Rank j gives `counts[j]` elements.

    Buffers: `[input, output]`, or `[input, output0, ..]` with `list_output`; `in_place` leaves `input` out,
    because the own part is already in the output.
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
    source = Operand(own_buffer, own_part.offset) if in_place else Operand(0)
    for peer in peers_after(rank, world):
        builder.send(peer, 0, source, own_bytes)
    for peer in peers_before(rank, world):
        buffer, part = outputs[peer]
        builder.recv(peer, 0, buffer, part.offset, part.size_bytes)
    if not in_place:
        copy_local(builder, 0, 0, own_buffer, own_part.offset, own_bytes)
    return builder.build()
