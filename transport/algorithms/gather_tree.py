# SPDX-License-Identifier: Apache-2.0
"""Gather along a binomial tree: log2(world) messages reach the root instead of world - 1. For small parts.

The nodes of the tree are those of tree.py over ranks. At each, one rank holds the parts of all the node's ranks, one
after another; at the nodes that the root is in, it is the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from sennit.transport.algorithms.halving import owner
from sennit.transport.algorithms.ranges import check_counts, check_root
from sennit.transport.plans.elements import Dtype
from sennit.transport.plans.plan import Operand, Plan, PlanBuilder
from sennit.transport.plans.signature import Kind, signature


def gather_tree(
    *, world: int, rank: int, counts: Sequence[int], item_bytes: int, root: int, type_code: int = Dtype.U8
) -> Plan:
    """Rank j gives `counts[j]` elements; all ranks must pass the same counts.

    Buffers: at the root `[input, output]`; elsewhere `[input]`.
    """
    check_counts(counts, world)
    check_root(root, world)
    starts = list(accumulate((count * item_bytes for count in counts), initial=0))
    own_bytes = counts[rank] * item_bytes
    builder = PlanBuilder(
        "gather along a tree",
        world=world,
        rank=rank,
        signature=signature(Kind.GATHER, type_code=type_code, root=root),
        buffer_bytes=[own_bytes, *([starts[-1]] if rank == root else [])],
    )
    # This buffer holds the parts that this rank collects, one after another: the output at the root, else scratch. The
    # first of them begins at byte `base` of the parts of all ranks.
    collected = 1
    base = 0
    if rank != root:
        first, end = _last_node(world, rank, root)
        builder.reserve_scratch(starts[end] - starts[first])
        base = starts[first]
    have: list[int] = []
    for level in range((world - 1).bit_length()):
        low = rank >> level << level
        other = low ^ (1 << level)
        if other >= world:
            continue
        taker = owner(min(low, other), level + 1, root, world)
        if taker != rank:
            size_bytes = starts[min(low + (1 << level), world)] - starts[low]
            source = Operand(collected, starts[low] - base) if have else Operand(0)
            builder.send(taker, 0, source, size_bytes, after=have)
            return builder.build()
        if not have:
            have = [builder.copy(Operand(0), collected, starts[rank] - base, own_bytes)]
        giver = owner(other, level, root, world)
        size_bytes = starts[min(other + (1 << level), world)] - starts[other]
        have.append(builder.recv(giver, 0, collected, starts[other] - base, size_bytes))
    if not have:
        builder.copy(Operand(0), collected, 0, own_bytes)
    return builder.build()


def _last_node(world: int, rank: int, root: int) -> tuple[int, int]:
    """The ranks of the largest node whose parts `rank` collects."""
    low, high = rank, rank + 1
    for level in range(1, world.bit_length() + 1):
        first = rank >> level << level
        if owner(first, level, root, world) != rank:
            break
        low, high = first, min(first + (1 << level), world)
    return low, high
