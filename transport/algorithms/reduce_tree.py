# SPDX-License-Identifier: Apache-2.0
"""Reduce along a binomial tree (halving.py with the root as the only owner): log2(world) rounds, by chunks.

The root receives log2(world) vectors instead of world - 1.
"""

from __future__ import annotations

from sennit.transport.algorithms.halving import Halving, add_halving, cut_units, piece_units
from sennit.transport.algorithms.leaves import Leaves
from sennit.transport.algorithms.ranges import DEFAULT_CHUNK_BYTES, Part, check_chunk, check_root, check_world
from sennit.transport.algorithms.vector import Vector
from sennit.transport.plans.elements import Dtype, ReduceOp, accumulator, check_reducible
from sennit.transport.plans.plan import Plan, PlanBuilder
from sennit.transport.plans.signature import Kind, signature


def reduce_tree(
    *,
    world: int,
    rank: int,
    elements: int,
    dtype: Dtype,
    op: ReduceOp,
    root: int,
    in_place: bool = True,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    counted: bool = False,
) -> Plan:
    """Buffers: at the root `[data]` in place, else `[input, output]`; elsewhere `[input]`, which is not changed.

    Two ranks or more. `counted` as of `allreduce`.
    """
    check_reducible(dtype, op)
    check_chunk(chunk_bytes)
    check_root(root, world)
    check_world(world)
    size_bytes = elements * dtype.item_bytes
    result = 1 if rank == root and not in_place else 0
    builder = PlanBuilder(
        "reduce along a tree",
        world=world,
        rank=rank,
        signature=signature(Kind.REDUCE, type_code=dtype, op=op, root=root, elements=0 if counted else elements),
        buffer_bytes=[size_bytes] * (result + 1),
    )
    unit_bytes = chunk_bytes // accumulator(dtype).item_bytes * dtype.item_bytes
    vector = Vector(builder, elements=elements, item_bytes=dtype.item_bytes, counted=counted, piece_bytes=unit_bytes)
    if vector.is_counted:
        units = piece_units([(root, vector.shares[0])], dtype)
    else:
        units = cut_units([(root, Part(0, 0, size_bytes))], dtype, chunk_bytes)
    add_halving(
        builder,
        Halving(
            leaves=Leaves(world),
            rank=rank,
            dtype=dtype,
            op=op,
            units=units,
            result=lambda unit: (result, unit.offset),
            scratch=result + 1,
            chunk_bytes=chunk_bytes,
            gather=False,
            in_place=in_place,
        ),
    )
    return builder.build()
