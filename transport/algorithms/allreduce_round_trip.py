# SPDX-License-Identifier: Apache-2.0
"""Allreduce inside a host, in place: every share makes a round trip to the rank that folds it.

As in the direct algorithm, rank j folds share j. But it has the vectors of the others as loans that come back: the fold
writes its result over them, and no result is sent. In symmetric memory nothing is copied at all: rank j folds the
shares where they are and writes the result to the same places. In other memory a share is copied to a block and back.
"""

from __future__ import annotations

from itertools import zip_longest

from sennit.transport.algorithms.leaves import Leaves, allreduce_builder
from sennit.transport.algorithms.ranges import DEFAULT_CHUNK_BYTES, check_chunk, peers_after, peers_before
from sennit.transport.algorithms.vector import Vector
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.plan import Operand, Plan


def allreduce_round_trip(
    *,
    world: int,
    rank: int,
    elements: int,
    dtype: Dtype,
    op: ReduceOp,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    counted: bool = False,
) -> Plan:
    """Buffers: `[data]`, `elements` of `dtype`; `counted` as of `allreduce`. Needs shared memory between all ranks."""
    check_chunk(chunk_bytes)
    builder, data = allreduce_builder(
        "allreduce by round trips",
        Leaves(world),
        rank=rank,
        elements=elements,
        dtype=dtype,
        op=op,
        in_place=True,
        round_trips=True,
        counted=counted,
    )
    vector = Vector(
        builder,
        elements=elements,
        item_bytes=dtype.item_bytes,
        counted=counted,
        shares=world,
        piece_bytes=chunk_bytes,
    )
    # Chunk by chunk, so that a rank folds while it lends.
    for slot, of_ranks in enumerate(zip_longest(*vector.shares)):
        for peer in peers_after(rank, world):
            if of_ranks[peer] is not None:
                offset, size_bytes = of_ranks[peer].offset, of_ranks[peer].size_bytes
                # The message of an empty share only shows the signature.
                builder.send(peer, slot, Operand(data, offset), size_bytes, comes_back=size_bytes != 0)
        if of_ranks[rank] is None:
            continue
        offset, size_bytes = of_ranks[rank].offset, of_ranks[rank].size_bytes
        if size_bytes == 0:
            for peer in peers_before(rank, world):
                builder.recv(peer, slot, data, offset, 0)
            continue
        operands = [Operand(data, offset)] * world
        for peer in peers_before(rank, world):
            operands[peer] = Operand(builder.loan(peer, slot, size_bytes, comes_back=True), is_view=True)
        builder.reduce(operands, data, offset, size_bytes, dtype=dtype, op=op, comes_back=world > 1)
    return builder.build()
