# SPDX-License-Identifier: Apache-2.0
"""Allreduce by recursive halving and doubling (halving.py): log2(world) peers a rank, and twice as many rounds."""

from __future__ import annotations

from sennit.transport.algorithms.halving import Halving, add_halving, cut_units, piece_units
from sennit.transport.algorithms.leaves import Leaves, allreduce_builder
from sennit.transport.algorithms.ranges import DEFAULT_CHUNK_BYTES, Part, check_chunk, check_world, shares
from sennit.transport.algorithms.vector import Vector
from sennit.transport.plans.elements import Dtype, ReduceOp, accumulator
from sennit.transport.plans.plan import Plan


def allreduce_halving(
    *,
    world: int,
    rank: int,
    elements: int,
    dtype: Dtype,
    op: ReduceOp,
    in_place: bool = True,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    leaves: int | None = None,
    partial: bool = False,
    counted: bool = False,
) -> Plan:
    """Buffers: those of `allreduce_builder`; `counted` as of `allreduce`. Two ranks or more."""
    check_chunk(chunk_bytes)
    check_world(world)
    given = Leaves(world, leaves, partial=partial)
    builder, result = allreduce_builder(
        "allreduce by halving",
        given,
        rank=rank,
        elements=elements,
        dtype=dtype,
        op=op,
        in_place=in_place,
        counted=counted,
    )
    chunk_bytes = max(chunk_bytes // int(max(given.widths())), accumulator(dtype).item_bytes)
    unit_bytes = chunk_bytes // accumulator(dtype).item_bytes * dtype.item_bytes
    vector = Vector(
        builder, elements=elements, item_bytes=dtype.item_bytes, counted=counted, shares=world, piece_bytes=unit_bytes
    )
    if vector.is_counted:
        units = piece_units(zip(_order(world), vector.shares, strict=True), dtype)
    else:
        units = cut_units(_parts(world, elements, dtype.item_bytes), dtype, chunk_bytes)
    add_halving(
        builder,
        Halving(
            leaves=given,
            rank=rank,
            dtype=dtype,
            op=op,
            elements=elements,
            units=units,
            result=lambda unit: (result, unit.offset),
            scratch=result + 1,
            chunk_bytes=chunk_bytes,
            gather=True,
            in_place=result == 0,
        ),
    )
    return builder.build()


def _order(world: int) -> list[int]:
    """Shares lie in the order of their ranks' reversed bits: what a rank keeps in a round is then one half."""
    bits = (world - 1).bit_length()
    return sorted(range(world), key=lambda rank: int(f"{rank:0{bits}b}"[::-1], 2))


def _parts(world: int, elements: int, item_bytes: int) -> list[tuple[int, Part]]:
    if not elements:
        return [(0, Part(0, 0, 0))]
    cut = shares(elements, world, item_bytes)
    return [(rank, Part(0, part.offset, part.size_bytes)) for rank, part in zip(_order(world), cut, strict=True)]
