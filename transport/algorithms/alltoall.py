# SPDX-License-Identifier: Apache-2.0
"""Alltoall: rank i's part j becomes rank j's part i.

Parts may be uneven or empty. Empty parts are sent too, so that ranks that disagree about splits find out.
"""

from __future__ import annotations

from sennit.transport.algorithms.ranges import (
    copy_part,
    counted_buffers,
    counted_parts,
    peers_after,
    peers_before,
    recv_part,
    send_part,
)
from sennit.transport.plans.elements import Dtype
from sennit.transport.plans.plan import Plan, PlanBuilder
from sennit.transport.plans.signature import Kind, signature


def alltoall(
    *,
    world: int,
    rank: int,
    item_bytes: int,
    type_code: int = Dtype.U8,
    list_input: bool = False,
    list_output: bool = False,
) -> Plan:
    """Counts: the elements that go to rank 0, 1, .., then those that come from rank 0, 1, ..

    Buffers: `[input, output]`. With `list_input` or `list_output`, `world` buffers replace that one.
    """
    input_bytes = counted_buffers(world, first_count=0, in_list=list_input)
    builder = PlanBuilder(
        "alltoall",
        world=world,
        rank=rank,
        signature=signature(Kind.ALLTOALL, type_code=type_code),
        buffer_bytes=[*input_bytes, *counted_buffers(world, first_count=world, in_list=list_output)],
        count_count=2 * world,
        unit_bytes=item_bytes,
    )
    inputs = counted_parts(world, first_count=0, first_buffer=0, in_list=list_input)
    outputs = counted_parts(world, first_count=world, first_buffer=len(input_bytes), in_list=list_output)
    for peer in peers_after(rank, world):
        send_part(builder, peer, inputs[peer])
    for peer in peers_before(rank, world):
        recv_part(builder, peer, outputs[peer])
    copy_part(builder, inputs[rank], outputs[rank])
    return builder.build()
