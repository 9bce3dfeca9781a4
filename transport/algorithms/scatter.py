# SPDX-License-Identifier: Apache-2.0
"""Scatter: every rank gets its part of the root's input, straight from there."""

from __future__ import annotations

from sennit.transport.algorithms.ranges import (
    Part,
    check_root,
    copy_part,
    counted_buffers,
    counted_parts,
    peers_after,
    recv_part,
    send_part,
)
from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.elements import Dtype
from sennit.transport.plans.plan import Plan, PlanBuilder
from sennit.transport.plans.signature import Kind, signature


def scatter(
    *,
    world: int,
    rank: int,
    item_bytes: int,
    root: int,
    type_code: int = Dtype.U8,
    list_input: bool = False,
) -> Plan:
    """Counts: the elements for rank 0, 1, .. Ranks other than the root use only their own entry.

    Buffers: at the root `[input, output]`, or `[input0, .., output]` with `list_input`; elsewhere `[output]`.
    """
    check_root(root, world)
    input_bytes = counted_buffers(world, first_count=0, in_list=list_input) if rank == root else []
    own = Part(len(input_bytes), 0, CountRange(rank, rank + 1))
    builder = PlanBuilder(
        "scatter",
        world=world,
        rank=rank,
        signature=signature(Kind.SCATTER, type_code=type_code, root=root),
        buffer_bytes=[*input_bytes, own.size_bytes],
        count_count=world,
        unit_bytes=item_bytes,
    )
    if rank != root:
        recv_part(builder, root, own)
        return builder.build()
    inputs = counted_parts(world, first_count=0, first_buffer=0, in_list=list_input)
    for peer in peers_after(rank, world):
        send_part(builder, peer, inputs[peer])
    copy_part(builder, inputs[rank], own)
    return builder.build()
