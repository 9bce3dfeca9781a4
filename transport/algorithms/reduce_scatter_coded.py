# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter with a codec: the first half of the coded allreduce. Results are not coded, because they stay.

Rank j gets fold(Q(share j of rank 0), Q(share j of rank 1), ...). Blocks begin where shares do. Element i of rank r's
vector has the logical index r · elements + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from sennit.transport.algorithms.allreduce_coded import CodedFold, add_coded_fold
from sennit.transport.algorithms.coded_parts import DEFAULT_CHUNK_ELEMENTS
from sennit.transport.algorithms.leaves import Leaves
from sennit.transport.algorithms.ranges import Range, check_counts
from sennit.transport.coding import Coding
from sennit.transport.elements import Dtype, ReduceOp, check_reducible
from sennit.transport.errors import ArgumentError
from sennit.transport.plan import Plan, PlanBuilder
from sennit.transport.signature import Kind, coded, signature


def reduce_scatter_coded(
    *,
    world: int,
    rank: int,
    counts: Sequence[int],
    dtype: Dtype,
    op: ReduceOp,
    coding: Coding,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
) -> Plan:
    """Share j has `counts[j]` elements of `dtype`: F32, F16 or BF16. Buffers: `[input, output]`.

    Raises ArgumentError for PREMUL_SUM of 16-bit elements, whose decoded numbers are partial sums.
    """
    check_reducible(dtype, op)
    check_counts("counts", counts, world)
    if op is ReduceOp.PREMUL_SUM and dtype is not Dtype.F32:
        raise ArgumentError(f"PREMUL_SUM of {dtype.name} with a codec; allowed: F32")
    elements = sum(counts)
    builder = PlanBuilder(
        "coded reduce_scatter",
        world=world,
        rank=rank,
        signature=coded(signature(Kind.REDUCE_SCATTER, type_code=dtype, op=op), coding, *counts),
        buffer_bytes=[elements * dtype.item_bytes, counts[rank] * dtype.item_bytes],
    )
    shares = [Range(low, count) for low, count in zip(accumulate(counts, initial=0), counts, strict=False)]
    fold = CodedFold(
        rank=rank,
        leaves=Leaves(world),
        elements=elements,
        shares=shares,
        dtype=dtype,
        op=op,
        coding=coding,
        result_buffer=1,
        chunk_elements=chunk_elements,
        gather=False,
    )
    add_coded_fold(builder, fold)
    return builder.build()
