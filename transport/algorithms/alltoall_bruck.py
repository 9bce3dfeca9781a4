# SPDX-License-Identifier: Apache-2.0
"""Alltoall of equal small parts: log2(world) messages a rank instead of world - 1.

The way of a part from rank s to rank d is the number d - s (modulo world). In round k a rank passes all parts whose way
has bit k on to the rank 2**k after it. So parts travel by way of other ranks, one bit at a time, and about
log2(world) / 2 times as many bytes leave a rank (Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for
all-to-all communications in multiport message-passing systems", 1997).
"""

from __future__ import annotations

from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.elements import Dtype
from sennit.transport.plans.plan import Operand, Plan, PlanBuilder
from sennit.transport.plans.signature import BRUCK, Kind, signature


def alltoall_bruck(*, world: int, rank: int, part_bytes_max: int, item_bytes: int, type_code: int = Dtype.U8) -> Plan:
    """Count: the elements of a part, `part_bytes_max` at most.

    Buffers: `[input, output]`.
    """
    levels = [[way for way in range(world) if way >> level & 1] for level in range((world - 1).bit_length())]
    # Twice in scratch: packed to be sent, and as they arrived.
    staged = 2 * sum(map(len, levels))
    builder = PlanBuilder(
        "alltoall by Bruck",
        world=world,
        rank=rank,
        signature=signature(Kind.ALLTOALL, type_code=type_code, root=BRUCK),
        buffer_bytes=[CountRange(0, world)] * 2,
        scratch_bytes=staged * part_bytes_max,
        count_count=max(world, staged),
        unit_bytes=item_bytes,
        equal_counts=True,
    )
    scratch, one_part = 2, CountRange(0, 1)
    # Where the part of each way is, and the step that brought it there.
    places = {way: Operand(0, CountRange(0, (rank + way) % world)) for way in range(world)}
    came: dict[int, int] = {}

    def copy(way: int, buffer: int, parts_before: int) -> int:
        after = [came[way]] if way in came else []
        return builder.copy(places[way], buffer, CountRange(0, parts_before), one_part, after=after)

    packed = 0
    for level, moved in enumerate(levels):
        bit, size_bytes = 1 << level, CountRange(0, len(moved))
        arrived = packed + len(moved)
        packs = [copy(way, scratch, packed + at) for at, way in enumerate(moved)]
        builder.send((rank + bit) % world, level, Operand(scratch, CountRange(0, packed)), size_bytes, after=packs)
        taken = builder.recv((rank - bit) % world, level, scratch, CountRange(0, arrived), size_bytes)
        for at, way in enumerate(moved):
            places[way], came[way] = Operand(scratch, CountRange(0, arrived + at)), taken
            if way < 2 * bit:
                copy(way, 1, (rank - way) % world)
        packed = arrived + len(moved)
    copy(0, 1, rank)
    return builder.build()
