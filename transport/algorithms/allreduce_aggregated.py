# SPDX-License-Identifier: Apache-2.0
"""Allreduce by an aggregator in the network, which folds the leaves of all ranks over the tree (tree.py).

Each rank sends its vector once and gets the sum once. That is half of what the direct algorithm sends, in a large
world. The aggregator may fail. So a rank saves its vector first, and tells all others how much of the sum it lacks. If
anybody lacks anything, all run the direct algorithm on what they have saved
(docs/decisions/0076-the-network-stores.md).

A rank with several leaves, or partial sums, gives the sum of its leaves. That is possible where these are one node of
the tree, and the nodes of all ranks are equally large: then a tree over the nodes is a tree over the ranks.
"""

from __future__ import annotations

from typing import Final

from sennit.transport.aggregator import LEAVES_MAX
from sennit.transport.algorithms.fold import Fold, Layout, Share, add_fold
from sennit.transport.algorithms.leaves import Leaves, allreduce_builder
from sennit.transport.algorithms.ranges import ALIGNMENT_BYTES, DEFAULT_CHUNK_BYTES, check_chunk, peers_after
from sennit.transport.algorithms.vector import Vector
from sennit.transport.errors import ArgumentError
from sennit.transport.plans.elements import Dtype, ReduceOp, accumulator
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import AGGREGATOR, FAILED_SLOT, MISSING_SLOT, Operand, Plan, PlanBuilder

# What an aggregator can add, by operations that are defined to the bit without floating-point registers.
DTYPES: Final = (Dtype.F32, Dtype.I32, Dtype.BF16)
# Whose means the ranks make of its sums. A sum of bfloat16 is rounded, and the mean would be rounded once more.
MEAN_DTYPES: Final = (Dtype.F32, Dtype.I32)
# A message to a rank: how many blocks its sender lacks.
MISSING_BYTES: Final = 4
# The slot of that message, far above those of the direct algorithm.
TOLD_SLOT: Final = 0xF0000


def is_summed(world: int, dtype: Dtype, op: ReduceOp, leaves: int | None = None, *, partial: bool = False) -> bool:
    """Whether an aggregator can do an allreduce. `leaves` and `partial` as of `allreduce`."""
    dtypes = {ReduceOp.SUM: DTYPES, ReduceOp.AVG: MEAN_DTYPES}.get(op, ())
    if not 1 < world <= LEAVES_MAX or dtype not in dtypes:
        return False
    given = Leaves(world, leaves, partial=partial)
    # A partial sum of bfloat16 is twice as wide, and rounded by nobody yet.
    return given.are_single or (given.are_equal_nodes and accumulator(dtype) is dtype)


def allreduce_aggregated(
    *,
    world: int,
    rank: int,
    elements: int,
    dtype: Dtype,
    op: ReduceOp,
    in_place: bool = True,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    leaves: int | None = None,
    partial: bool = False,
    counted: bool = False,
) -> Plan:
    """Buffers: those of `allreduce_builder`; `counted` as of `allreduce`.

    Raises ArgumentError for what an aggregator cannot sum (`is_summed`).
    """
    check_chunk(chunk_bytes)
    if not is_summed(world, dtype, op, leaves, partial=partial):
        raise ArgumentError(
            f"{op.name} of {dtype.name} by {world} ranks, {leaves or world} leaves; an aggregator sums "
            f"{', '.join(each.name for each in DTYPES)} of 2..{LEAVES_MAX} ranks, one leaf each, and gives the "
            f"AVG of {', '.join(each.name for each in MEAN_DTYPES)}, also of 2, 4, 8, ... leaves each"
        )
    layout = Layout(Hosts.equal(world, 1), leaves, partial=partial)
    builder, result = allreduce_builder(
        "allreduce by aggregator",
        layout,
        rank=rank,
        elements=elements,
        dtype=dtype,
        op=op,
        in_place=in_place,
        counted=counted,
    )
    vector = Vector(
        builder,
        elements=elements,
        item_bytes=dtype.item_bytes,
        counted=counted,
        shares=world,
        piece_bytes=chunk_bytes,
    )
    # The saved vector comes first, because a place that depends on counts is one of a whole buffer.
    scratch = result + 1
    rows = len(layout.given(rank))
    is_made = result == 0 or rows > 1
    saved = scratch if is_made else 0
    if is_made:
        builder.reserve_scratch(-(-elements * dtype.item_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    told_at = builder.reserve_scratch((world + 1) * MISSING_BYTES)
    done: list[int] = []
    for slot, piece in enumerate(piece for share in vector.shares for piece in share):
        if not piece.size_bytes:
            continue
        made: list[int] = []
        if rows > 1:
            places = layout.places(rank, dtype, elements, 0, piece.offset // dtype.item_bytes)
            made = [
                builder.reduce(places, scratch, piece.offset, piece.size_bytes, dtype=dtype, op=op, gives_partial=True)
            ]
        elif is_made:
            made = [builder.copy(Operand(0, piece.offset), scratch, piece.offset, piece.size_bytes)]
        come = builder.recv(AGGREGATOR, slot, result, piece.offset, piece.size_bytes, after=made)
        if op is ReduceOp.AVG:
            # Of a sum that did not come it makes nonsense, which the direct algorithm overwrites.
            whole = [Operand(result, piece.offset)]
            come = builder.reduce(whole, result, piece.offset, piece.size_bytes, dtype=dtype, op=op, after=[come])
        done.append(come)
        done.append(builder.send(AGGREGATOR, slot, Operand(saved, piece.offset), piece.size_bytes, after=made))
    lacks, told = _tell(builder, world=world, rank=rank, scratch=scratch, told_at=told_at)
    builder.branch(lacks, after=[*done, *told])
    add_fold(
        builder,
        Fold(
            rank=rank,
            dtype=dtype,
            op=op,
            layout=layout if layout.are_single else Layout(layout.hosts, leaves, partial=True),
            shares=[Share(buffer=saved, offset=0, chunks=pieces) for pieces in vector.shares],
            elements=elements,
            result_buffer=result,
            result_offsets=[0] * world,
            gather=True,
            in_place=False,
        ),
    )
    return builder.build()


def _tell(builder: PlanBuilder, *, world: int, rank: int, scratch: int, told_at: int) -> tuple[Operand, list[int]]:
    """All ranks tell each other what they lack. Returns the most that one lacks, and the steps that find it out.

    A rank that hears of a failure tells its own lane, which then asks the aggregator no more.
    """

    def told_by(peer: int) -> int:
        return told_at + peer * MISSING_BYTES

    own = builder.recv(AGGREGATOR, MISSING_SLOT, scratch, told_by(rank), MISSING_BYTES)
    steps = [own]
    for peer in peers_after(rank, world):
        steps.append(builder.send(peer, TOLD_SLOT, Operand(scratch, told_by(rank)), MISSING_BYTES, after=[own]))
        heard = builder.recv(peer, TOLD_SLOT, scratch, told_by(peer), MISSING_BYTES)
        place = Operand(scratch, told_by(peer))
        passed_on = builder.send(AGGREGATOR, FAILED_SLOT + peer, place, MISSING_BYTES, after=[heard])
        steps += [heard, passed_on]
    most = Operand(scratch, told_by(world))
    steps.append(
        builder.reduce(
            [Operand(scratch, told_by(peer)) for peer in range(world)],
            scratch,
            most.offset,
            MISSING_BYTES,
            dtype=Dtype.U32,
            op=ReduceOp.MAX,
            after=steps,
        )
    )
    return most, steps
