# SPDX-License-Identifier: Apache-2.0
"""The direct fold: each rank sends every share of a vector to the share's owner, who folds it over the tree of ranks.

Allreduce, reduce_scatter and reduce use it. The unit is a chunk. Chunk `t` of share `j` travels as slot 2t to rank j,
is folded from loans, and (allreduce) goes back out as slot 2t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sennit.transport.algorithms.ranges import Range, peers_after, peers_before
from sennit.transport.elements import Dtype, ReduceOp
from sennit.transport.plan import Operand, PlanBuilder

# A folded chunk is sent this many chunks behind the contributions. By then its fold is done, so a rank, which runs
# ready steps in list order, keeps sending contributions while it folds.
GATHER_LAG_CHUNKS: Final = 2


@dataclass(frozen=True, kw_only=True)
class Share:
    """One owner's part: the position of each rank's contribution, and the chunks into which it is cut."""

    buffer: int
    offset: int
    chunks: Sequence[Range]

    def at(self, chunk: Range) -> Operand:
        return Operand(self.buffer, self.offset + chunk.offset)


@dataclass(frozen=True, kw_only=True)
class Fold:
    """The input of the fold, and the place of its results: share j's result goes to `result_offsets[j]` of
    `result_buffer`.
    """

    world: int
    rank: int
    dtype: Dtype
    op: ReduceOp
    shares: Sequence[Share]
    result_buffer: int
    result_offsets: Sequence[int]
    gather: bool
    """Whether every rank gets every share's result (allreduce)."""
    in_place: bool
    """Whether results overwrite contributions that may not have been sent yet."""


def add_fold(builder: PlanBuilder, fold: Fold) -> None:
    """Adds the whole schedule. For each pair of ranks, sends and receives come in the same order."""
    if fold.world == 1:
        _add_alone(builder, fold)
        return
    sent: dict[tuple[int, int], int] = {}
    folded: list[tuple[int, ...]] = []
    own = fold.shares[fold.rank]
    rounds = max(len(share.chunks) for share in fold.shares)
    for number in range(rounds + (GATHER_LAG_CHUNKS if fold.gather else 0)):
        for peer in peers_after(fold.rank, fold.world):
            share = fold.shares[peer]
            if number < len(share.chunks):
                chunk = share.chunks[number]
                sent[peer, number] = builder.send(peer, 2 * number, share.at(chunk), chunk.size_bytes)
        if number < len(own.chunks):
            folded.append(_add_chunk(builder, fold, number))
        if fold.gather and number >= GATHER_LAG_CHUNKS:
            _add_gather(builder, fold, number - GATHER_LAG_CHUNKS, sent, folded)


def _add_chunk(builder: PlanBuilder, fold: Fold, number: int) -> tuple[int, ...]:
    """Receives all contributions to the chunk of this rank's share and folds them.

    Returns what the result waits for.
    """
    own = fold.shares[fold.rank]
    chunk = own.chunks[number]
    offset = fold.result_offsets[fold.rank] + chunk.offset
    if not chunk.size_bytes:
        for peer in peers_before(fold.rank, fold.world):
            builder.recv(peer, 2 * number, fold.result_buffer, offset, 0)
        return ()
    operands = [own.at(chunk)] * fold.world
    for peer in peers_before(fold.rank, fold.world):
        operands[peer] = Operand(builder.loan(peer, 2 * number, chunk.size_bytes), 0, True)
    return (builder.reduce(operands, fold.result_buffer, offset, chunk.size_bytes, dtype=fold.dtype, op=fold.op),)


def _add_gather(
    builder: PlanBuilder, fold: Fold, number: int, sent: dict[tuple[int, int], int], folded: list[tuple[int, ...]]
) -> None:
    """Sends the folded chunk of this rank's share to all, and receives those of the others."""
    own = fold.shares[fold.rank]
    if number < len(own.chunks):
        chunk = own.chunks[number]
        source = Operand(fold.result_buffer, fold.result_offsets[fold.rank] + chunk.offset)
        for peer in peers_after(fold.rank, fold.world):
            builder.send(peer, 2 * number + 1, source, chunk.size_bytes, after=folded[number])
    for peer in peers_before(fold.rank, fold.world):
        if number < len(fold.shares[peer].chunks):
            chunk = fold.shares[peer].chunks[number]
            # In place, the result overwrites the contribution, so that must have been sent before.
            after = (sent[peer, number],) if fold.in_place else ()
            offset = fold.result_offsets[peer] + chunk.offset
            builder.recv(peer, 2 * number + 1, fold.result_buffer, offset, chunk.size_bytes, after=after)


def _add_alone(builder: PlanBuilder, fold: Fold) -> None:
    """With one rank, the result is the contribution, scaled if the operation scales. Booleans become 0 or 1."""
    share, offset = fold.shares[0], fold.result_offsets[0]
    if fold.op is ReduceOp.PREMUL_SUM or fold.dtype is Dtype.BOOL:
        for chunk in share.chunks:
            place = offset + chunk.offset
            builder.reduce([share.at(chunk)], fold.result_buffer, place, chunk.size_bytes, dtype=fold.dtype, op=fold.op)
    elif not fold.in_place:
        size_bytes = sum(chunk.size_bytes for chunk in share.chunks)
        builder.copy(Operand(share.buffer, share.offset), fold.result_buffer, offset, size_bytes)
