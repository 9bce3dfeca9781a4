# SPDX-License-Identifier: Apache-2.0
"""Barrier: nobody leaves before everybody has come.

Dissemination (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988): in round k each rank
sends an empty message to the rank 2^k further on. There are ceil(log2 world) rounds.
"""

from __future__ import annotations

from sennit.transport.plans.plan import Operand, Plan, PlanBuilder
from sennit.transport.plans.signature import Kind, signature


def barrier(*, world: int, rank: int) -> Plan:
    """A plan without buffers."""
    builder = PlanBuilder("barrier", world=world, rank=rank, signature=signature(Kind.BARRIER), buffer_bytes=[])
    # The caller has no buffers, so number 0 is the (empty) scratch buffer.
    heard: list[int] = []
    for slot in range((world - 1).bit_length()):
        distance = 1 << slot
        builder.send((rank + distance) % world, slot, Operand(0), 0, after=heard)
        heard.append(builder.recv((rank - distance) % world, slot, 0, 0, 0))
    return builder.build()
