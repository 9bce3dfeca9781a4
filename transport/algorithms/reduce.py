# SPDX-License-Identifier: Apache-2.0
"""Reduce: the root gets the fold of all ranks' vectors; the others only send (fold.py with one share)."""

from __future__ import annotations

from sennit.transport.algorithms.fold import Fold, Layout, Share, add_fold
from sennit.transport.algorithms.ranges import DEFAULT_CHUNK_BYTES, check_chunk, check_root
from sennit.transport.algorithms.vector import WHOLE, Vector
from sennit.transport.plans.elements import Dtype, ReduceOp, check_reducible
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Plan, PlanBuilder
from sennit.transport.plans.signature import Kind, signature


def reduce(
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

    `counted` as of `allreduce`.
    """
    check_reducible(dtype, op)
    check_chunk(chunk_bytes)
    check_root(root, world)
    size_bytes = elements * dtype.item_bytes
    own_output = rank == root and not in_place
    builder = PlanBuilder(
        "reduce",
        world=world,
        rank=rank,
        signature=signature(Kind.REDUCE, type_code=dtype, op=op, root=root, elements=0 if counted else elements),
        buffer_bytes=[size_bytes] * (2 if own_output else 1),
    )
    # A rank alone lends nothing.
    piece_bytes = chunk_bytes if world > 1 or not counted else WHOLE
    vector = Vector(builder, elements=elements, item_bytes=dtype.item_bytes, counted=counted, piece_bytes=piece_bytes)
    add_fold(
        builder,
        Fold(
            rank=rank,
            dtype=dtype,
            op=op,
            layout=Layout(Hosts.equal(world, 1)),
            shares=[
                Share(buffer=0, offset=0, chunks=vector.shares[0] if owner == root else ()) for owner in range(world)
            ],
            result_buffer=1 if own_output else 0,
            result_offsets=[0] * world,
            gather=False,
            in_place=in_place,
        ),
    )
    return builder.build()
