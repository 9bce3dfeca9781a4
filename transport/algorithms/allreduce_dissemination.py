# SPDX-License-Identifier: Apache-2.0
"""Allreduce of tiny vectors in worlds of many ranks: log2(world) messages a rank instead of world - 1.

Every rank gathers all vectors by dissemination and folds them by itself. In round k it tells the rank 2**k before it
what it has: its own vector and those of the ranks after it, 2**k in all (Bruck, Ho, Kipnis, Upfal and Weathersby,
"Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997). As many bytes leave
a rank as in one shot.
"""

from __future__ import annotations

from sennit.transport.algorithms.ranges import check_world
from sennit.transport.elements import Dtype, ReduceOp, check_reducible
from sennit.transport.plan import Operand, Plan, PlanBuilder
from sennit.transport.signature import Kind, signature


def allreduce_dissemination(
    *, world: int, rank: int, elements: int, dtype: Dtype, op: ReduceOp, in_place: bool = True
) -> Plan:
    """Buffers: `[data]` in place, else `[input, output]`; `elements` of `dtype` each. Two ranks or more."""
    check_reducible(dtype, op)
    check_world(world)
    size_bytes = elements * dtype.item_bytes
    result = 0 if in_place else 1
    builder = PlanBuilder(
        "allreduce by dissemination",
        world=world,
        rank=rank,
        signature=signature(Kind.ALLREDUCE, type_code=dtype, op=op, elements=elements),
        buffer_bytes=[size_bytes] * (result + 1),
    )
    scratch = result + 1
    # The vector of rank (rank + i) % world is at i * size_bytes.
    builder.reserve_scratch(world * size_bytes)
    have = [builder.copy(Operand(0), scratch, 0, size_bytes)]
    known = 1
    for slot in range((world - 1).bit_length()):
        more = min(known, world - known)
        builder.send((rank - known) % world, slot, Operand(scratch), more * size_bytes, after=have)
        came = builder.recv((rank + known) % world, slot, scratch, known * size_bytes, more * size_bytes)
        have.append(came)
        known += more
    if size_bytes:
        operands = [Operand(scratch, (peer - rank) % world * size_bytes) for peer in range(world)]
        builder.reduce(operands, result, 0, size_bytes, dtype=dtype, op=op, after=have)
    return builder.build()
