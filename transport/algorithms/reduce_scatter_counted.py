# SPDX-License-Identifier: Apache-2.0
"""Direct reduce-scatter of shares whose sizes are known only when the plan is posted.

Each share is cut into the same number of pieces. The plan has a count for each piece in place of a compiled size, so
it serves all shares that this number of pieces suits. `piece_counts` cuts the shares, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from sennit.transport.algorithms.ranges import ALIGNMENT_BYTES, peers_after, peers_before
from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.elements import Dtype, ReduceOp, check_reducible
from sennit.transport.plans.plan import MAX_LOAN_BYTES, Operand, Plan, PlanBuilder
from sennit.transport.plans.signature import Kind, signature


def pieces_of(counts: Sequence[int], item_bytes: int) -> int:
    """Returns into how many pieces the largest share is cut: a power of two, so that few plans serve all calls."""
    chunks = -(-max(counts) * item_bytes // MAX_LOAN_BYTES)
    return 1 << max(chunks - 1, 0).bit_length()


def piece_counts(counts: Sequence[int], item_bytes: int, pieces: int) -> list[int]:
    """Returns the elements of each piece, share by share: all of one size, which is whole cache lines, but the last."""
    line = max(ALIGNMENT_BYTES // item_bytes, 1)
    cut = []
    for count in counts:
        size = -(-count // (pieces * line)) * line
        cut += [min(size, max(count - piece * size, 0)) for piece in range(pieces)]
    return cut


def reduce_scatter_counted(
    *, world: int, rank: int, pieces: int, dtype: Dtype, op: ReduceOp, list_input: bool = False
) -> Plan:
    """Counts: the elements of each piece of share 0, 1, .. (`piece_counts`).

    Buffers: `[input, output]`, or `[input0, .., output]` with `list_input`. The output may be the memory of this rank's
    input share.
    """
    check_reducible(dtype, op)
    shares = [CountRange(share * pieces, (share + 1) * pieces) for share in range(world)]
    inputs: list[int] = [*shares] if list_input else [CountRange(0, world * pieces)]
    builder = PlanBuilder(
        "reduce_scatter",
        world=world,
        rank=rank,
        signature=signature(Kind.REDUCE_SCATTER, type_code=dtype, op=op),
        buffer_bytes=[*inputs, shares[rank]],
        count_count=world * pieces,
        unit_bytes=dtype.item_bytes,
    )

    def piece_of(share: int, piece: int) -> tuple[Operand, CountRange]:
        first = share * pieces
        offset = CountRange(first if list_input else 0, first + piece)
        return Operand(share if list_input else 0, offset), CountRange(first + piece, first + piece + 1)

    for piece in range(pieces):
        for peer in peers_after(rank, world):
            source, size_bytes = piece_of(peer, piece)
            builder.send(peer, piece, source, size_bytes)
        own, size_bytes = piece_of(rank, piece)
        operands = [own] * world
        for peer in peers_before(rank, world):
            operands[peer] = Operand(builder.loan(peer, piece, size_bytes), 0, is_view=True)
        offset = CountRange(rank * pieces, rank * pieces + piece)
        builder.reduce(operands, len(inputs), offset, size_bytes, dtype=dtype, op=op)
    return builder.build()
