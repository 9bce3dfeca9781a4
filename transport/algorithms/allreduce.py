# SPDX-License-Identifier: Apache-2.0
"""Allreduce: every rank gets the fold of all ranks' vectors.

In one shot every rank sends the whole vector to all and folds all vectors, which suits small ones. Else vectors are cut
into `world` shares. One rank folds each share and sends the result to all (fold.py). Then each rank sends
2 (world-1)/world of the vector, which is the minimum (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms",
2009). With several ranks on each host, hosts can make partial sums first.

A rank may give several leaves of the tree, or the partial sums of its nodes. Then equal leaves give the same bits in a
world of any size.
"""

from __future__ import annotations

from sennit.transport.algorithms.fold import Fold, Layout, Share, add_fold
from sennit.transport.algorithms.one_shot import add_one_shot
from sennit.transport.algorithms.ranges import DEFAULT_CHUNK_BYTES, check_chunk, chunks, shares
from sennit.transport.elements import Dtype, ReduceOp, accumulator, check_reducible
from sennit.transport.errors import ArgumentError
from sennit.transport.hosts import Hosts
from sennit.transport.plan import MAX_LOAN_BYTES, Plan, PlanBuilder
from sennit.transport.signature import Kind, signature
from sennit.transport.tree import given_spans


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
) -> Plan:
    """Buffers: `[data]` in place, else `[input, output]`; `elements` of `dtype` each.

    One shot runs with two ranks or more, and vectors of at most MAX_LOAN_BYTES. With two `hosts` or more, these make
    partial sums. With `leaves`, the buffers are `[input, output]`, and the input holds the leaves `leaves_of(rank,
    world, leaves)`, one after another; `partial`: the sums of their nodes, in the accumulator's type (`given_spans`).
    Raises ArgumentError if there are fewer leaves than ranks, or if PREMUL_SUM is to scale partial sums.
    """
    check_reducible(dtype, op)
    check_chunk(chunk_bytes)
    size_bytes = elements * dtype.item_bytes
    layout = Layout(hosts or Hosts.equal(world, 1), world if leaves is None else leaves, partial=partial)
    if partial and op is ReduceOp.PREMUL_SUM:
        raise ArgumentError("PREMUL_SUM of partial sums; allowed: SUM, of leaves that were scaled before")
    given = given_spans(rank, world, layout.leaves, partial=partial)
    given_bytes = (accumulator(dtype) if partial else dtype).item_bytes * elements * len(given)
    in_place = in_place and leaves is None
    # For leaves, sizes of messages tell apart what the low bits do not.
    root, summed = (0, elements) if leaves is None else (1 + (leaves - 1) % 255, elements * leaves)
    builder = PlanBuilder(
        "allreduce" if hosts is None else "hierarchical allreduce",
        world=world,
        rank=rank,
        signature=signature(Kind.ALLREDUCE, type_code=dtype, op=op, root=root, elements=summed),
        buffer_bytes=[size_bytes] if in_place else [given_bytes, size_bytes],
        leaves=leaves,
    )
    result = 0 if in_place else 1
    if one_shot and leaves is None and world > 1 and size_bytes <= MAX_LOAN_BYTES:
        add_one_shot(builder, world=world, rank=rank, size_bytes=size_bytes, result=result, dtype=dtype, op=op)
        return builder.build()
    chunk_bytes = layout.chunk_bytes(dtype, chunk_bytes)
    parts = shares(elements, world, dtype.item_bytes)
    add_fold(
        builder,
        Fold(
            rank=rank,
            dtype=dtype,
            op=op,
            layout=layout,
            shares=[Share(buffer=0, offset=part.offset, chunks=chunks(part.size_bytes, chunk_bytes)) for part in parts],
            elements=elements,
            result_buffer=result,
            result_offsets=[part.offset for part in parts],
            gather=True,
            in_place=in_place,
        ),
    )
    return builder.build()
