# SPDX-License-Identifier: Apache-2.0
"""Broadcast: a binomial tree over hosts, then one inside each host. So data goes to each other host once.

Messages are cut into segments, so that all levels work at once.
"""

from __future__ import annotations

from typing import Final

from sennit.transport.algorithms.ranges import check_root
from sennit.transport.algorithms.vector import Vector
from sennit.transport.errors import ArgumentError
from sennit.transport.plans.elements import Dtype
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Operand, Plan, PlanBuilder
from sennit.transport.plans.signature import Kind, signature

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
    hosts: Hosts | None = None,
    counted: bool = False,
) -> Plan:
    """Buffers: `[data]`, read at the root and written elsewhere. `counted` as of `allreduce`.

    `segment_bytes` cuts messages; default: by `world`. `hosts` says which ranks share one; default: all of them.
    """
    check_root(root, world)
    if segment_bytes is not None and segment_bytes < 1:
        raise ArgumentError(f"segment_bytes {segment_bytes}; allowed: 1 or more")
    size_bytes = elements * item_bytes
    builder = PlanBuilder(
        "broadcast",
        world=world,
        rank=rank,
        signature=signature(Kind.BROADCAST, type_code=type_code, root=root, elements=0 if counted else elements),
        buffer_bytes=[size_bytes],
    )
    parent, children = _tree(hosts or Hosts.equal(world, 1), rank, root)
    if segment_bytes is None:
        # Two ranks have no levels to overlap, and the transport itself cuts a message into packets.
        segment_bytes = DEFAULT_SEGMENT_BYTES if world > 2 else max(size_bytes, 1)
    if counted:
        # The core cuts whole elements.
        segment_bytes = max(segment_bytes // item_bytes, 1) * item_bytes
    vector = Vector(builder, elements=elements, item_bytes=item_bytes, counted=counted, piece_bytes=segment_bytes)
    for slot, part in enumerate(vector.shares[0]):
        after: tuple[int, ...] = ()
        if parent is not None:
            after = (builder.recv(parent, slot, 0, part.offset, part.size_bytes),)
        for child in children:
            builder.send(child, slot, Operand(0, part.offset), part.size_bytes, after=after)
    return builder.build()


def _tree(hosts: Hosts, rank: int, root: int) -> tuple[int | None, list[int]]:
    """Returns the parent (None at the root) and the children, those on other hosts first, the largest subtree first.

    On each host, the rank in the root's place gets the data from another host.
    """
    host = hosts.of_rank(rank)
    span, first = hosts.spans[host], hosts.relay(host, root)
    parent, children = _binomial(span.high - span.low, rank - span.low, first - span.low)
    near = [span.low + child for child in children]
    if parent is not None:
        return span.low + parent, near
    above, below = _binomial(len(hosts.spans), host, hosts.of_rank(root))
    return None if above is None else hosts.relay(above, root), [hosts.relay(other, root) for other in below] + near


def _binomial(count: int, member: int, root: int) -> tuple[int | None, list[int]]:
    """Returns the parent (None at the root) and the children of one of `count` members, the largest subtree first."""
    place = (member - root) % count
    bit = 1
    while bit < count and not place & bit:
        bit <<= 1
    parent = (place - bit + root) % count if place else None
    children: list[int] = []
    while bit > 1:
        bit >>= 1
        if place + bit < count:
            children.append((place + bit + root) % count)
    return parent, children
