# SPDX-License-Identifier: Apache-2.0
"""The one-shot allreduce: every rank sends its whole vector to all and folds all of them. One round, for small ones."""

from __future__ import annotations

from sennit.transport.algorithms.ranges import peers_after, peers_before
from sennit.transport.elements import Dtype, ReduceOp
from sennit.transport.plan import Operand, PlanBuilder


def add_one_shot(
    builder: PlanBuilder, *, world: int, rank: int, size_bytes: int, result: int, dtype: Dtype, op: ReduceOp
) -> None:
    """Adds the whole schedule: from buffer 0 to buffer `result`, which may be buffer 0. At most MAX_LOAN_BYTES."""
    own = Operand(0)
    sends = [builder.send(peer, 0, own, size_bytes) for peer in peers_after(rank, world)]
    if not size_bytes:
        for peer in peers_before(rank, world):
            builder.recv(peer, 0, result, 0, 0)
        return
    operands = [own] * world
    for peer in peers_before(rank, world):
        operands[peer] = Operand(builder.loan(peer, 0, size_bytes), 0, True)
    after = sends if result == 0 else ()
    builder.reduce(operands, result, 0, size_bytes, dtype=dtype, op=op, after=after)
