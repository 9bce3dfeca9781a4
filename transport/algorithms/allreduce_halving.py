# SPDX-License-Identifier: Apache-2.0
"""Allreduce by recursive halving and doubling (halving.py): log2(world) peers a rank, and twice as many rounds."""

from __future__ import annotations

from sennit.transport.algorithms.halving import Halving, add_halving, cut_units
from sennit.transport.algorithms.ranges import DEFAULT_CHUNK_BYTES, Part, check_chunk, check_world, shares
from sennit.transport.elements import Dtype, ReduceOp, check_reducible
from sennit.transport.plan import Plan, PlanBuilder
from sennit.transport.signature import Kind, signature


def allreduce_halving(
    *,
    world: int,
    rank: int,
    elements: int,
    dtype: Dtype,
    op: ReduceOp,
    in_place: bool = True,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Plan:
    """Buffers: `[data]` in place, else `[input, output]`; `elements` of `dtype` each. Two ranks or more."""
    check_reducible(dtype, op)
    check_chunk(chunk_bytes)
    check_world(world)
    size_bytes = elements * dtype.item_bytes
    builder = PlanBuilder(
        "allreduce by halving",
        world=world,
        rank=rank,
        signature=signature(Kind.ALLREDUCE, type_code=dtype, op=op, elements=elements),
        buffer_bytes=[size_bytes] if in_place else [size_bytes] * 2,
    )
    result = 0 if in_place else 1
    add_halving(
        builder,
        Halving(
            world=world,
            rank=rank,
            dtype=dtype,
            op=op,
            units=cut_units(_parts(world, elements, dtype.item_bytes), dtype, chunk_bytes),
            result=lambda unit: (result, unit.offset),
            scratch=result + 1,
            chunk_bytes=chunk_bytes,
            gather=True,
            in_place=in_place,
        ),
    )
    return builder.build()


def _parts(world: int, elements: int, item_bytes: int) -> list[tuple[int, Part]]:
    """Shares lie in the order of their ranks' reversed bits: what a rank keeps in a round is then one half."""
    if not elements:
        return [(0, Part(0, 0, 0))]
    bits = (world - 1).bit_length()
    order = sorted(range(world), key=lambda rank: int(f"{rank:0{bits}b}"[::-1], 2))
    cut = shares(elements, world, item_bytes)
    return [(rank, Part(0, part.offset, part.size_bytes)) for rank, part in zip(order, cut, strict=True)]
