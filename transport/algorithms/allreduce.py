# SPDX-License-Identifier: Apache-2.0
"""Allreduce: every rank gets the fold of all ranks' vectors.

In one shot every rank sends the whole vector to all and folds all vectors, which suits small ones. Else vectors are cut
into `world` shares. One rank folds each share and sends the result to all (fold.py). Then each rank sends
2 (world-1)/world of the vector, which is the minimum (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms",
2009). With several ranks on each host, hosts can make partial sums first.

A rank may give several leaves of the tree, or the partial sums of its nodes (leaves.py).
"""

from __future__ import annotations

from sennit.transport.algorithms.blocks import Blocks
from sennit.transport.algorithms.fold import Fold, Layout, Share, add_fold
from sennit.transport.algorithms.leaves import allreduce_builder
from sennit.transport.algorithms.ranges import DEFAULT_CHUNK_BYTES, check_chunk, peers_after, peers_before
from sennit.transport.algorithms.vector import WHOLE, Vector
from sennit.transport.plans.elements import Dtype, ReduceOp, accumulator
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import MAX_LOAN_BYTES, Operand, Plan, PlanBuilder


def allreduce(
    *,
    world: int,
    rank: int,
    elements: int,
    dtype: Dtype,
    op: ReduceOp,
    in_place: bool = True,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    one_shot: bool = False,
    hosts: Hosts | None = None,
    leaves: int | None = None,
    partial: bool = False,
    counted: bool = False,
) -> Plan:
    """Buffers: those of `allreduce_builder`. With `counted`, which needs one leaf a rank, the plan serves vectors of 1
    to `elements` elements and takes their number as its count.

    One shot runs with two ranks or more, where what a rank gives fits a message of MAX_LOAN_BYTES. With two `hosts` or
    more, these make partial sums. Raises ArgumentError if there are fewer leaves than ranks.
    """
    check_chunk(chunk_bytes)
    layout = Layout(hosts or Hosts.equal(world, 1), leaves, partial=partial)
    builder, result = allreduce_builder(
        "allreduce" if hosts is None else "hierarchical allreduce",
        layout,
        rank=rank,
        elements=elements,
        dtype=dtype,
        op=op,
        in_place=in_place,
        counted=counted,
    )
    blocks = Blocks(layout, rank=rank, elements=elements, dtype=dtype, op=op, result=result)
    if one_shot and world > 1 and max(blocks.sizes) <= MAX_LOAN_BYTES:
        blocks.cut(Vector(builder, elements=elements, item_bytes=dtype.item_bytes, counted=counted))
        _add_one_shot(builder, blocks, world=world, rank=rank, result=result)
        return builder.build()
    chunk_bytes = layout.chunk_bytes(dtype, chunk_bytes)
    vector = Vector(
        builder,
        elements=elements,
        item_bytes=dtype.item_bytes,
        counted=counted,
        shares=world,
        # A rank alone lends nothing.
        piece_bytes=chunk_bytes if world > 1 or not counted else WHOLE,
        partial_item_bytes=accumulator(dtype).item_bytes,
    )
    add_fold(
        builder,
        Fold(
            rank=rank,
            dtype=dtype,
            op=op,
            layout=layout,
            shares=[Share(buffer=0, offset=0, chunks=pieces) for pieces in vector.shares],
            elements=elements,
            result_buffer=result,
            result_offsets=[0] * world,
            gather=True,
            in_place=result == 0,
        ),
    )
    return builder.build()


def _add_one_shot(builder: PlanBuilder, blocks: Blocks, *, world: int, rank: int, result: int) -> None:
    """Every rank sends its block, of at most MAX_LOAN_BYTES, to all and folds all of them: one round."""
    own, made = Operand(0), list[int]()
    if not blocks.is_given:
        own = Operand(result + 1, builder.reserve_scratch(blocks.sizes[rank]))
        made = blocks.make(builder, own.offset)
    sends = [builder.send(peer, 0, own, blocks.sizes[rank], after=made) for peer in peers_after(rank, world)]
    if not blocks.sizes[rank]:
        for peer in peers_before(rank, world):
            builder.recv(peer, 0, result, 0, 0)
        return
    starts = [own] * world
    for peer in peers_before(rank, world):
        starts[peer] = Operand(builder.loan(peer, 0, blocks.sizes[peer]), 0, True)
    # In place, the result overwrites what is sent.
    blocks.fold(builder, starts, after=sends if result == 0 else made)
