# SPDX-License-Identifier: Apache-2.0
"""The one-shot allreduce: every rank sends its block to all and folds all of them. One round, for small vectors."""

from __future__ import annotations

from sennit.transport.algorithms.blocks import Blocks
from sennit.transport.algorithms.ranges import peers_after, peers_before
from sennit.transport.plans.plan import Operand, PlanBuilder


def add_one_shot(builder: PlanBuilder, blocks: Blocks, *, world: int, rank: int, result: int) -> None:
    """Adds the whole schedule. Each block has at most MAX_LOAN_BYTES."""
    own, made = Operand(0), list[int]()
    if not blocks.is_given:
        own = Operand(result + 1, builder.reserve_scratch(blocks.sizes[rank]))
        made = blocks.make(builder, own.offset)
    sends = [builder.send(peer, 0, own, blocks.sizes[rank], after=made) for peer in peers_after(rank, world)]
    if not blocks.sizes[rank]:
        for peer in peers_before(rank, world):
            builder.recv(peer, 0, result, 0, 0)
        return
    starts = [own] * world
    for peer in peers_before(rank, world):
        starts[peer] = Operand(builder.loan(peer, 0, blocks.sizes[peer]), 0, True)
    # In place, the result overwrites what is sent.
    blocks.fold(builder, starts, after=sends if result == 0 else made)
