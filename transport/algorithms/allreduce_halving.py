# SPDX-License-Identifier: Apache-2.0
"""Allreduce by recursive halving and doubling (halving.py): log2(world) peers a rank, and twice as many rounds."""

from __future__ import annotations

from sennit.transport.algorithms.halving import Halving, Unit, add_halving
from sennit.transport.algorithms.ranges import DEFAULT_CHUNK_BYTES, check_chunk, chunks, shares
from sennit.transport.elements import Dtype, ReduceOp, accumulator, check_reducible
from sennit.transport.errors import ArgumentError
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
    if world < 2:
        raise ArgumentError(f"world {world}; allowed: 2 or more")
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
            units=_units(world, elements, dtype, chunk_bytes),
            result=lambda unit: (result, unit.offset),
            scratch=result + 1,
            chunk_bytes=chunk_bytes,
            gather=True,
            in_place=in_place,
        ),
    )
    return builder.build()


def _units(world: int, elements: int, dtype: Dtype, chunk_bytes: int) -> list[Unit]:
    """Shares lie in the order of their ranks' reversed bits: what a rank keeps in a round is then one half."""
    bits = (world - 1).bit_length()
    order = sorted(range(world), key=lambda rank: int(f"{rank:0{bits}b}"[::-1], 2))
    if not elements:
        return [Unit(share=0, buffer=0, offset=0, position=0, count=0)]
    unit_elements = chunk_bytes // accumulator(dtype).item_bytes
    found = []
    for share, part in zip(order, shares(elements, world, dtype.item_bytes), strict=True):
        for piece in chunks(part.size_bytes, unit_elements * dtype.item_bytes) if part.size_bytes else []:
            offset = part.offset + piece.offset
            count = piece.size_bytes // dtype.item_bytes
            found.append(Unit(share=share, buffer=0, offset=offset, position=offset // dtype.item_bytes, count=count))
    return found
