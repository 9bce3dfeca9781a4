# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter: rank j gets the fold of everyone's share j (fold.py without the way back)."""

from __future__ import annotations

from collections.abc import Sequence

from sennit.transport.algorithms.fold import Fold, Layout, Share, add_fold
from sennit.transport.algorithms.ranges import (
    DEFAULT_CHUNK_BYTES,
    buffer_sizes,
    check_chunk,
    check_counts,
    chunks,
    places,
)
from sennit.transport.plans.elements import Dtype, ReduceOp, check_reducible
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Plan, PlanBuilder
from sennit.transport.plans.signature import Kind, signature


def reduce_scatter(
    *,
    world: int,
    rank: int,
    counts: Sequence[int],
    dtype: Dtype,
    op: ReduceOp,
    list_input: bool = False,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    hosts: Hosts | None = None,
) -> Plan:
    """Share j has `counts[j]` elements.

    Buffers: `[input, output]`, or `[input0, .., output]` with `list_input`. The output may be the memory of this rank's
    input share. With `hosts`, of two or more, these make partial sums.
    """
    check_reducible(dtype, op)
    check_chunk(chunk_bytes)
    check_counts(counts, world)
    inputs = buffer_sizes(counts, dtype.item_bytes, list_input)
    builder = PlanBuilder(
        "reduce_scatter" if hosts is None else "hierarchical reduce_scatter",
        world=world,
        rank=rank,
        signature=signature(Kind.REDUCE_SCATTER, type_code=dtype, op=op, elements=sum(counts)),
        buffer_bytes=[*inputs, counts[rank] * dtype.item_bytes],
    )
    layout = Layout(hosts or Hosts.equal(world, 1))
    chunk_bytes = layout.chunk_bytes(dtype, chunk_bytes)
    add_fold(
        builder,
        Fold(
            rank=rank,
            dtype=dtype,
            op=op,
            layout=layout,
            shares=[
                Share(buffer=part.buffer, offset=part.offset, chunks=chunks(part.size_bytes, chunk_bytes))
                for part in places(counts, dtype.item_bytes, list_input)
            ],
            result_buffer=len(inputs),
            result_offsets=[0] * world,
            gather=False,
            in_place=False,
        ),
    )
    return builder.build()
