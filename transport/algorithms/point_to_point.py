# SPDX-License-Identifier: Apache-2.0
"""Send and receive: plans of one step. The tag of the operation matches them."""

from __future__ import annotations

from typing import Final

from sennit.transport.errors import ArgumentError
from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.elements import Dtype
from sennit.transport.plans.plan import ANY_PEER, Operand, Plan, PlanBuilder
from sennit.transport.plans.signature import Kind, signature

ALL: Final = CountRange(0, 1)


def send(*, world: int, rank: int, peer: int, item_bytes: int, type_code: int = Dtype.U8) -> Plan:
    """Counts: the elements. Buffers: `[data]`, read."""
    _check_peer(world, rank, peer)
    builder = _builder("send", world, rank, item_bytes, type_code)
    builder.send(peer, 0, Operand(0), ALL)
    return builder.build()


def recv(*, world: int, rank: int, peer: int, item_bytes: int, type_code: int = Dtype.U8) -> Plan:
    """Counts: the elements. Buffers: `[data]`, written. `peer` may be ANY_PEER."""
    if peer != ANY_PEER:
        _check_peer(world, rank, peer)
    builder = _builder("recv", world, rank, item_bytes, type_code)
    builder.recv(peer, 0, 0, 0, ALL)
    return builder.build()


def _builder(name: str, world: int, rank: int, item_bytes: int, type_code: int) -> PlanBuilder:
    return PlanBuilder(
        name,
        world=world,
        rank=rank,
        signature=signature(Kind.P2P, type_code=type_code),
        buffer_bytes=[ALL],
        count_count=1,
        unit_bytes=item_bytes,
    )


def _check_peer(world: int, rank: int, peer: int) -> None:
    if not 0 <= peer < world or peer == rank:
        raise ArgumentError(f"peer {peer}; allowed: 0..{world - 1} other than the own rank {rank}")
