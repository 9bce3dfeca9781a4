# SPDX-License-Identifier: Apache-2.0
"""Gather: the root gets every rank's part, straight from each."""

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


def gather(
    *,
    world: int,
    rank: int,
    item_bytes: int,
    root: int,
    type_code: int = Dtype.U8,
    list_output: bool = False,
) -> Plan:
    """Counts: the elements of rank 0, 1, .. Ranks other than the root use only their own entry.

    Buffers: at the root `[input, output]`, or `[input, output0, ..]` with `list_output`; elsewhere `[input]`.
    """
    check_root(root, world)
    own = Part(0, 0, CountRange(rank, rank + 1))
    output_bytes = counted_buffers(world, first_count=0, in_list=list_output) if rank == root else []
    builder = PlanBuilder(
        "gather",
        world=world,
        rank=rank,
        signature=signature(Kind.GATHER, type_code=type_code, root=root),
        buffer_bytes=[own.size_bytes, *output_bytes],
        count_count=world,
        unit_bytes=item_bytes,
    )
    if rank != root:
        send_part(builder, root, own)
        return builder.build()
    outputs = counted_parts(world, first_count=0, first_buffer=1, in_list=list_output)
    for peer in peers_after(rank, world):
        recv_part(builder, peer, outputs[peer])
    copy_part(builder, own, outputs[rank])
    return builder.build()
