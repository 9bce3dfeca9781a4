# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter by recursive halving (halving.py): log2(world) peers a rank."""

from __future__ import annotations

from collections.abc import Sequence

from sennit.transport.algorithms.halving import Halving, add_halving, cut_units
from sennit.transport.algorithms.leaves import Leaves
from sennit.transport.algorithms.ranges import (
    DEFAULT_CHUNK_BYTES,
    buffer_sizes,
    check_chunk,
    check_counts,
    check_world,
    places,
)
from sennit.transport.plans.elements import Dtype, ReduceOp, check_reducible
from sennit.transport.plans.plan import Plan, PlanBuilder
from sennit.transport.plans.signature import Kind, signature


def reduce_scatter_halving(
    *,
    world: int,
    rank: int,
    counts: Sequence[int],
    dtype: Dtype,
    op: ReduceOp,
    list_input: bool = False,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Plan:
    """Share j has `counts[j]` elements. Two ranks or more.

    Buffers: `[input, output]`, or `[input0, .., output]` with `list_input`. The output may be the memory of this
    rank's input share.
    """
    check_reducible(dtype, op)
    check_chunk(chunk_bytes)
    check_counts(counts, world)
    check_world(world)
    inputs = buffer_sizes(counts, dtype.item_bytes, list_input)
    builder = PlanBuilder(
        "reduce_scatter by halving",
        world=world,
        rank=rank,
        signature=signature(Kind.REDUCE_SCATTER, type_code=dtype, op=op, elements=sum(counts)),
        buffer_bytes=[*inputs, counts[rank] * dtype.item_bytes],
    )
    parts = places(counts, dtype.item_bytes, list_input)
    first = sum(counts[:rank])
    add_halving(
        builder,
        Halving(
            leaves=Leaves(world),
            rank=rank,
            dtype=dtype,
            op=op,
            units=cut_units(list(enumerate(parts)), dtype, chunk_bytes),
            result=lambda unit: (len(inputs), (unit.position - first) * dtype.item_bytes),
            scratch=len(inputs) + 1,
            chunk_bytes=chunk_bytes,
            gather=False,
            in_place=False,
        ),
    )
    return builder.build()
