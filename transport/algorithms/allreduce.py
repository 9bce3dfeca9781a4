# SPDX-License-Identifier: Apache-2.0
"""Allreduce: every rank gets the fold of all ranks' vectors.

In one shot every rank sends the whole vector to all and folds all vectors, which suits small ones. Else vectors are cut
into `world` shares. One rank folds each share and sends the result to all (fold.py). Then each rank sends
2 (world-1)/world of the vector, which is the minimum (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms",
2009). With several ranks on each host, hosts can make partial sums first (host_fold.py).
"""

from __future__ import annotations

from sennit.transport.algorithms.fold import Fold, Share, add_fold
from sennit.transport.algorithms.host_fold import add_host_fold, host_chunk_bytes
from sennit.transport.algorithms.one_shot import add_one_shot
from sennit.transport.algorithms.ranges import DEFAULT_CHUNK_BYTES, check_chunk, chunks, shares
from sennit.transport.elements import Dtype, ReduceOp, check_reducible
from sennit.transport.hosts import Hosts
from sennit.transport.plan import MAX_LOAN_BYTES, Plan, PlanBuilder
from sennit.transport.signature import Kind, signature


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
) -> Plan:
    """Buffers: `[data]` in place, else `[input, output]`; `elements` of `dtype` each.

    One shot runs with two ranks or more, and vectors of at most MAX_LOAN_BYTES. With two `hosts`
    or more, these make partial sums.
    """
    check_reducible(dtype, op)
    check_chunk(chunk_bytes)
    size_bytes = elements * dtype.item_bytes
    builder = PlanBuilder(
        "allreduce" if hosts is None else "allreduce by hosts",
        world=world,
        rank=rank,
        signature=signature(Kind.ALLREDUCE, type_code=dtype, op=op, elements=elements),
        buffer_bytes=[size_bytes] if in_place else [size_bytes] * 2,
    )
    result = 0 if in_place else 1
    if one_shot and world > 1 and size_bytes <= MAX_LOAN_BYTES:
        add_one_shot(builder, world=world, rank=rank, size_bytes=size_bytes, result=result, dtype=dtype, op=op)
        return builder.build()
    parts = shares(elements, world, dtype.item_bytes)
    if hosts is not None:
        chunk_bytes = host_chunk_bytes(hosts, dtype, chunk_bytes)
    fold = Fold(
        world=world,
        rank=rank,
        dtype=dtype,
        op=op,
        shares=[Share(buffer=0, offset=part.offset, chunks=chunks(part.size_bytes, chunk_bytes)) for part in parts],
        result_buffer=result,
        result_offsets=[part.offset for part in parts],
        gather=True,
        in_place=in_place,
    )
    if hosts is None:
        add_fold(builder, fold)
    else:
        add_host_fold(builder, fold, hosts)
    return builder.build()
