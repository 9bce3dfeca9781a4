# SPDX-License-Identifier: Apache-2.0
"""Alltoall of equal small parts: log2(world) messages a rank instead of world - 1.

In round k a rank passes on, to the rank 2**k after it, all parts whose way has bit k: from rank s to rank d it is d - s
(modulo world). So parts travel by way of other ranks, one bit at a time, and about log2(world) / 2 times as many bytes
leave a rank (Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in
multiport message-passing systems", 1997).
"""

from __future__ import annotations

from sennit.transport.elements import Dtype
from sennit.transport.plan import Operand, Plan, PlanBuilder
from sennit.transport.signature import Kind, signature


def alltoall_bruck(*, world: int, rank: int, elements: int, item_bytes: int, type_code: int = Dtype.U8) -> Plan:
    """Buffers: `[input, output]`, each `world` parts of `elements` elements."""
    part_bytes = elements * item_bytes
    builder = PlanBuilder(
        "alltoall by Bruck",
        world=world,
        rank=rank,
        signature=signature(Kind.ALLTOALL, type_code=type_code, elements=elements),
        buffer_bytes=[world * part_bytes] * 2,
    )
    scratch = 2
    # Where the part of each way is, and the step that brought it there.
    places = {way: Operand(0, (rank + way) % world * part_bytes) for way in range(world)}
    came: dict[int, int] = {}

    def copy(way: int, buffer: int, offset: int) -> list[int]:
        if not part_bytes:
            return []
        after = [came[way]] if way in came else []
        return [builder.copy(places[way], buffer, offset, part_bytes, after=after)]

    for level in range((world - 1).bit_length()):
        bit = 1 << level
        moved = [way for way in range(world) if way & bit]
        size_bytes = len(moved) * part_bytes
        packed, arrived = builder.reserve_scratch(size_bytes), builder.reserve_scratch(size_bytes)
        packs = [step for at, way in enumerate(moved) for step in copy(way, scratch, packed + at * part_bytes)]
        builder.send((rank + bit) % world, level, Operand(scratch, packed), size_bytes, after=packs)
        taken = builder.recv((rank - bit) % world, level, scratch, arrived, size_bytes)
        for at, way in enumerate(moved):
            places[way], came[way] = Operand(scratch, arrived + at * part_bytes), taken
            if way < 2 * bit:
                copy(way, 1, (rank - way) % world * part_bytes)
    copy(0, 1, rank * part_bytes)
    return builder.build()
