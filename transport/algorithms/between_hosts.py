# SPDX-License-Identifier: Apache-2.0
"""Allreduce and reduce-scatter that code between hosts alone (fold_between_hosts.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from sennit.transport.algorithms.allreduce_coded import shares_of
from sennit.transport.algorithms.coded_parts import DEFAULT_CHUNK_ELEMENTS, chunk_limit, cut
from sennit.transport.algorithms.fold import Fold, Share
from sennit.transport.algorithms.fold_between_hosts import NodeLayout, add_fold_between_hosts
from sennit.transport.algorithms.leaves import allreduce_builder
from sennit.transport.algorithms.ranges import Range, check_counts
from sennit.transport.errors import ArgumentError
from sennit.transport.plans.coding import Coding
from sennit.transport.plans.elements import Dtype, ReduceOp, check_reducible
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import MAX_LOAN_BYTES, Plan, PlanBuilder, Recv, Send
from sennit.transport.plans.signature import Kind, coded, signature


def allreduce_between_hosts(
    *,
    world: int,
    rank: int,
    hosts: Hosts,
    elements: int,
    dtype: Dtype,
    op: ReduceOp,
    coding: Coding,
    in_place: bool = True,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
    leaves: int | None = None,
) -> Plan:
    """Buffers: those of `allreduce_builder`. `dtype` is F32, F16 or BF16; the core refuses others.

    `coding.between_hosts` is set. Chunks have at most `chunk_elements`, but at least a block. Raises ArgumentError if
    there are fewer leaves than ranks.
    """
    layout = NodeLayout(hosts, leaves)
    builder, result = allreduce_builder(
        "allreduce coded between hosts",
        layout,
        rank=rank,
        elements=elements,
        dtype=dtype,
        op=op,
        in_place=in_place,
        coding=coding,
    )
    parts = shares_of(elements, world, coding)
    fold = Fold(
        rank=rank,
        dtype=dtype,
        op=op,
        layout=layout,
        shares=_cut(parts, dtype, _chunk_limit(layout, coding, chunk_elements)),
        elements=elements,
        result_buffer=result,
        result_offsets=[part.offset * dtype.item_bytes for part in parts],
        gather=True,
        in_place=result == 0,
    )
    add_fold_between_hosts(builder, fold, coding)
    return _numbered(builder.build())


def reduce_scatter_between_hosts(
    *,
    world: int,
    rank: int,
    hosts: Hosts,
    counts: Sequence[int],
    dtype: Dtype,
    op: ReduceOp,
    coding: Coding,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
) -> Plan:
    """Share j has `counts[j]` elements of `dtype`: F32, F16 or BF16. Buffers: `[input, output]`.

    `coding.between_hosts` is set. Chunks: see `allreduce_between_hosts`.
    """
    check_reducible(dtype, op)
    check_counts(counts, world)
    layout = NodeLayout(hosts)
    builder = PlanBuilder(
        "reduce_scatter coded between hosts",
        world=world,
        rank=rank,
        signature=coded(signature(Kind.REDUCE_SCATTER, type_code=dtype, op=op), coding, *counts),
        buffer_bytes=[sum(counts) * dtype.item_bytes, counts[rank] * dtype.item_bytes],
    )
    parts = [Range(low, count) for low, count in zip(accumulate(counts, initial=0), counts, strict=False)]
    fold = Fold(
        rank=rank,
        dtype=dtype,
        op=op,
        layout=layout,
        shares=_cut(parts, dtype, _chunk_limit(layout, coding, chunk_elements)),
        elements=sum(counts),
        result_buffer=1,
        result_offsets=[0] * world,
        gather=False,
        in_place=False,
    )
    add_fold_between_hosts(builder, fold, coding)
    return _numbered(builder.build())


def _numbered(plan: Plan) -> Plan:
    """Gives the messages of each pair the slots 0, 1, ... in list order, which is the same at both ends.

    So the first one has the slot of the first one of a rank that codes everywhere, and that rank is refused at once.
    """
    counts: dict[tuple[type, int], int] = defaultdict(int)
    steps = list(plan.steps)
    for number, step in enumerate(steps):
        if isinstance(step, Send | Recv):
            pair = type(step), step.peer
            steps[number] = step._replace(slot=counts[pair])
            counts[pair] += 1
    return plan._replace(steps=tuple(steps))


def _cut(parts: Sequence[Range], dtype: Dtype, most: int) -> list[Share]:
    """From elements to bytes."""
    item_bytes = dtype.item_bytes
    return [
        Share(
            buffer=0,
            offset=part.offset * item_bytes,
            chunks=[
                Range((chunk.offset - part.offset) * item_bytes, chunk.size_bytes * item_bytes)
                for chunk in cut(part, most)
            ],
        )
        for part in parts
    ]


def _chunk_limit(layout: NodeLayout, coding: Coding, chunk_elements: int) -> int:
    """The most elements of a chunk: also what is not coded must fit into a loan."""
    widest = max(len(nodes) for rank in range(layout.world) for nodes in layout.messages(rank, rank).values())
    fitting = MAX_LOAN_BYTES // (widest * Dtype.F32.item_bytes)
    if fitting < coding.unit:
        raise ArgumentError(f"blocks of {coding.block} and {widest} nodes in a message; allowed: {fitting} elements")
    return chunk_limit(coding, max(min(chunk_elements, fitting), 1) if chunk_elements > 0 else chunk_elements)
