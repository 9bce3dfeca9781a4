# SPDX-License-Identifier: Apache-2.0
"""Broadcast: a binomial tree, log2(world) messages deep.

Messages are cut into segments, so that all levels work at once.
"""

from __future__ import annotations

from typing import Final

from sennit.transport.algorithms.ranges import check_root, chunks
from sennit.transport.elements import Dtype
from sennit.transport.errors import ArgumentError
from sennit.transport.plan import Operand, Plan, PlanBuilder
from sennit.transport.signature import Kind, signature

# Large enough that a step's cost is negligible, small enough that 64 MiB fill a tree of several levels.
DEFAULT_SEGMENT_BYTES: Final = 1_048_576


def broadcast(
    *,
    world: int,
    rank: int,
    elements: int,
    item_bytes: int,
    root: int,
    type_code: int = Dtype.U8,
    segment_bytes: int | None = None,
) -> Plan:
    """Buffers: `[data]`, read at the root and written elsewhere. `segment_bytes` cuts messages; default: by `world`."""
    check_root(root, world)
    if segment_bytes is not None and segment_bytes < 1:
        raise ArgumentError(f"segment_bytes {segment_bytes}; allowed: 1 or more")
    size_bytes = elements * item_bytes
    builder = PlanBuilder(
        "broadcast",
        world=world,
        rank=rank,
        signature=signature(Kind.BROADCAST, type_code=type_code, root=root, elements=elements),
        buffer_bytes=[size_bytes],
    )
    parent, children = _tree(world, rank, root)
    if segment_bytes is None:
        # Two ranks have no levels to overlap, and the transport itself cuts a message into packets.
        segment_bytes = DEFAULT_SEGMENT_BYTES if world > 2 else max(size_bytes, 1)
    for slot, part in enumerate(chunks(size_bytes, segment_bytes)):
        after: tuple[int, ...] = ()
        if parent is not None:
            after = (builder.recv(parent, slot, 0, part.offset, part.size_bytes),)
        for child in children:
            builder.send(child, slot, Operand(0, part.offset), part.size_bytes, after=after)
    return builder.build()


def _tree(world: int, rank: int, root: int) -> tuple[int | None, list[int]]:
    """Returns the parent (None at the root) and the children, the largest subtree first."""
    place = (rank - root) % world
    bit = 1
    while bit < world and not place & bit:
        bit <<= 1
    parent = (place - bit + root) % world if place else None
    children: list[int] = []
    while bit > 1:
        bit >>= 1
        if place + bit < world:
            children.append((place + bit + root) % world)
    return parent, children
