# SPDX-License-Identifier: Apache-2.0
"""Allgather: every rank gets every rank's part, sent straight to where it belongs.

In a ring a rank sends only to the next one, and passes on what the one before sent: world - 1 rounds, and one peer.
This suits large parts where bytes to many peers at once cost more.
"""

from __future__ import annotations

from sennit.transport.algorithms.ranges import (
    Part,
    copy_part,
    counted_buffers,
    counted_parts,
    peers_after,
    peers_before,
    recv_part,
    send_part,
)
from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.elements import Dtype
from sennit.transport.plans.plan import Operand, Plan, PlanBuilder
from sennit.transport.plans.signature import RING, Kind, signature


def allgather(
    *,
    world: int,
    rank: int,
    item_bytes: int,
    type_code: int = Dtype.U8,
    in_place: bool = False,
    list_output: bool = False,
    ring: bool = False,
) -> Plan:
    """Counts: the elements of rank 0, 1, ..

    Buffers: `[input, output]`, or `[input, output0, ..]` with `list_output`. `in_place` leaves `input` out, because
    this rank's part is already in the output.
    """
    builder, own, outputs = allgather_builder(
        "allgather",
        world=world,
        rank=rank,
        mark=signature(Kind.ALLGATHER, type_code=type_code, root=RING if ring else 0),
        item_bytes=item_bytes,
        in_place=in_place,
        list_output=list_output,
    )
    if ring:
        passed, came = own, list[int]()
        for slot, origin in enumerate(peers_before(rank, world)):
            builder.send((rank + 1) % world, slot, Operand(passed.buffer, passed.offset), passed.size_bytes, after=came)
            passed = outputs[origin]
            came = [builder.recv((rank - 1) % world, slot, passed.buffer, passed.offset, passed.size_bytes)]
    else:
        for peer in peers_after(rank, world):
            send_part(builder, peer, own)
        for peer in peers_before(rank, world):
            recv_part(builder, peer, outputs[peer])
    if not in_place:
        copy_part(builder, own, outputs[rank])
    return builder.build()


def allgather_builder(
    name: str, *, world: int, rank: int, mark: int, item_bytes: int, in_place: bool, list_output: bool
) -> tuple[PlanBuilder, Part, list[Part]]:
    """A plan with the buffers of `allgather`: this rank's own part, and where each rank's part belongs."""
    own_bytes = CountRange(rank, rank + 1)
    builder = PlanBuilder(
        name,
        world=world,
        rank=rank,
        signature=mark,
        buffer_bytes=[
            *([] if in_place else [own_bytes]),
            *counted_buffers(world, first_count=0, in_list=list_output),
        ],
        count_count=world,
        unit_bytes=item_bytes,
    )
    outputs = counted_parts(world, first_count=0, first_buffer=0 if in_place else 1, in_list=list_output)
    return builder, outputs[rank] if in_place else Part(0, 0, own_bytes), outputs
