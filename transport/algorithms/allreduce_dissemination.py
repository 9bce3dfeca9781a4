# SPDX-License-Identifier: Apache-2.0
"""Allreduce of tiny vectors in worlds of many ranks: log2(world) messages a rank instead of world - 1.

Every rank gathers all blocks (blocks.py) by dissemination and folds them by itself. In round k it tells the rank 2**k
before it what it has: its own block and those of the ranks after it, 2**k in all (Bruck, Ho, Kipnis, Upfal and
Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997). As many
bytes leave a rank as in one shot.
"""

from __future__ import annotations

from itertools import accumulate

from sennit.transport.algorithms.blocks import Blocks
from sennit.transport.algorithms.leaves import Leaves, allreduce_builder
from sennit.transport.algorithms.ranges import check_world
from sennit.transport.algorithms.vector import Vector
from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.plan import Operand, Plan


def allreduce_dissemination(
    *,
    world: int,
    rank: int,
    elements: int,
    dtype: Dtype,
    op: ReduceOp,
    in_place: bool = True,
    leaves: int | None = None,
    partial: bool = False,
    counted: bool = False,
) -> Plan:
    """Buffers: those of `allreduce_builder`; `counted` as of `allreduce`. Two ranks or more."""
    check_world(world)
    given = Leaves(world, leaves, partial=partial)
    builder, result = allreduce_builder(
        "allreduce by dissemination",
        given,
        rank=rank,
        elements=elements,
        dtype=dtype,
        op=op,
        in_place=in_place,
        counted=counted,
    )
    blocks = Blocks(given, rank=rank, elements=elements, dtype=dtype, op=op, result=result)
    scratch = result + 1
    # The block of rank (rank + i) % world is at starts[i].
    starts = list(accumulate((blocks.sizes[(rank + step) % world] for step in range(world)), initial=0))
    vector = Vector(builder, elements=elements, item_bytes=dtype.item_bytes, counted=counted)
    if vector.is_counted:
        blocks.cut(vector)
        first = builder.add_counts([(0, dtype.item_bytes)] * world)
        starts = [CountRange(first, first + step) for step in range(world + 1)]
    builder.reserve_scratch(starts[-1])

    def between(low: int, high: int) -> int:
        return CountRange(first + low, first + high) if vector.is_counted else starts[high] - starts[low]

    have = blocks.make(builder, 0)
    known = 1
    for slot in range((world - 1).bit_length()):
        more = min(known, world - known)
        builder.send((rank - known) % world, slot, Operand(scratch), between(0, more), after=have)
        size_bytes = between(known, known + more)
        have.append(builder.recv((rank + known) % world, slot, scratch, starts[known], size_bytes))
        known += more
    if elements:
        blocks.fold(builder, [Operand(scratch, starts[(peer - rank) % world]) for peer in range(world)], after=have)
    return builder.build()
