# SPDX-License-Identifier: Apache-2.0
"""Plans of common calls inside one host, written without the compilers.

The compilers are a dozen modules, which take a process 4 to 6 ms at its first call. All ranks of a host start at the
same time, so 16 of them on two cores would wait 50 ms (docs/lab/groups.md). These few plans have so simple a form that
it fits here. The compilers stay what decides: a test compares each byte, and for every other call there is no ready
plan.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

# Binary form: plan_codec.py.
_HEADER: Final = struct.Struct("<IHHIIQIIIIQIIII")
_STEP: Final = struct.Struct("<BBBBIIIIIIIQQ")
_OPERAND: Final = struct.Struct("<IIQ")
_CUT: Final = struct.Struct("<QQII")
_MAGIC, _VERSION = 0x31504E53, 2
_SEND, _RECV, _COPY, _REDUCE = range(4)
_LOAN, _ROUND_TRIP = 1, 4
_CUTS_VECTOR: Final = 4
_VIEW: Final = 1
_ROUND_TRIPS_SIGNATURE: Final = 1 << 46
# Kinds of signature.py.
_ALLREDUCE, _BROADCAST, _ALLGATHER, _REDUCE_SCATTER, _BARRIER = 1, 3, 4, 7, 10
# DEFAULT_CHUNK_BYTES of algorithms/ranges.py, DEFAULT_SEGMENT_BYTES of algorithms/broadcast.py.
_CHUNK_BYTES: Final = 122_880
_SEGMENT_BYTES: Final = 1 << 20
_LINE_BYTES: Final = 64
# The types and operations of an allreduce: U8 to F64 of elements.py, and SUM, MIN and MAX.
_DTYPES: Final = range(9)
_OPS: Final = (0, 3, 4)
_F16, _BF16 = 5, 6

WORLD_MAX: Final = 32
# By world, from 2 on: the last grade of size for which the cost model takes one shot, and the first for which it takes
# round trips, with its built-in constants. 0: it never takes one shot.
_ONE_SHOT_LAST: Final = (55, 53, 51, 49, 48, 47, 45, 45, 44, 44, 43, 42, 42, 0, 0, 40, 40, *[0] * 14)
_ROUND_TRIP_FIRST: Final = (
    56, 55, 57, 50, 49, 48, 46, 46, 45, 45, 44, 43, 43, 43, 43, 41, 41, 41, 42, 42, 42, 43, 43, 43, 43, *[44] * 6
)  # fmt: skip


def ready_plan(
    world: int,
    rank: int,
    *,
    kind: int,
    type_code: int,
    op: int,
    item_bytes: int,
    root: int,
    separate: bool,
    in_place: bool,
    size_class: int,
) -> bytes | None:
    """The encoded plan of a call, of a group whose ranks all share memory and use the built-in constants of the cost
    model; None if there is none. The arguments are those of `PlanCompiler` (runtime/backend/process_group.py).
    """
    if world > WORLD_MAX:
        return None
    if kind == _ALLREDUCE and type_code in _DTYPES and op in _OPS and size_class:
        return _allreduce(world, rank, type_code, op, item_bytes, size_class - 1)
    if kind == _BROADCAST and size_class:
        return _broadcast(world, rank, type_code, item_bytes, root, _grade_bytes(size_class - 1) // item_bytes)
    if kind == _ALLGATHER and not size_class:
        return _allgather(world, rank, type_code, item_bytes, in_place=in_place, separate=separate)
    return _barrier(world, rank) if kind == _BARRIER else None


def ready_staged_classes(world: int, kind: int) -> int | None:
    """What `Selection.staged_classes` says of such a group; None if it is to be asked."""
    return 0 if world <= WORLD_MAX and kind in (_ALLGATHER, _REDUCE_SCATTER) else None


def _grade_bytes(number: int) -> int:
    """`grade_bytes` of selection.py."""
    shift = max((number - 5) // 4, 0)
    return number - 4 * shift << shift


def _counts(first: int, end: int) -> int:
    """`CountRange` of counts.py."""
    return 1 << 63 | end << 32 | first


class _Plan:
    """A plan that is written step by step."""

    def __init__(self, name: str, world: int, rank: int, signature: int) -> None:
        self._name, self._world, self._rank, self._signature = name.encode(), world, rank, signature
        self._steps: list[tuple[int, ...]] = []
        self._operands: list[bytes] = []
        self._waiting: list[list[int]] = []

    def send(
        self, peer: int, slot: int, offset: int, size_bytes: int, after: Iterable[int] = (), flags: int = 0
    ) -> int:
        """Sends from buffer 0."""
        return self._add((_SEND, 0, 0, flags, peer, slot), (0, 0, size_bytes), [_OPERAND.pack(0, 0, offset)], after)

    def recv(self, peer: int, slot: int, size_bytes: int, buffer: int = 0, offset: int = 0, flags: int = 0) -> int:
        return self._add((_RECV, 0, 0, flags, peer, slot), (buffer, offset, size_bytes), [], ())

    def copy(self, buffer: int, offset: int, size_bytes: int) -> int:
        """Copies from the start of buffer 0."""
        return self._add((_COPY, 0, 0, 0, 0, 0), (buffer, offset, size_bytes), [_OPERAND.pack(0, 0, 0)], ())

    def fold(
        self, loans: dict[int, int], dtype: int, op: int, offset: int, size_bytes: int, after: Sequence[int], flags: int
    ) -> None:
        """Folds the loans of all other ranks and this rank's part of buffer 0 into that part."""
        operands = []
        for rank in range(self._world):
            # As often as a binary counter carries (`balanced` of tree.py).
            is_last = rank == self._world - 1
            combined = rank.bit_count() if is_last else (~rank & rank + 1).bit_length() - 1
            loan = loans.get(rank)
            kind = combined << 16 | (loan is not None) * _VIEW
            operands.append(_OPERAND.pack(kind, loan or 0, offset if loan is None else 0))
        self._add((_REDUCE, dtype, op, flags, 0, 0), (0, offset, size_bytes), operands, [*after, *loans.values()])

    def _add(self, head: tuple[int, ...], place: tuple[int, ...], operands: list[bytes], after: Iterable[int]) -> int:
        number = len(self._steps)
        self._waiting.append([])
        for step in sorted(after):
            self._waiting[step].append(number)
        self._steps.append((*head, len(self._operands), len(operands), *place))
        self._operands += operands
        return number

    def encode(
        self, *, buffers: int, counts: int = 0, item_bytes: int = 0, cut: tuple[int, int, int, int] | None = None
    ) -> bytes:
        """`cut`: the most elements, the bytes of a piece, shares, and pieces of a share."""
        steps, edges = [], list[int]()
        for step, waiting in zip(self._steps, self._waiting, strict=True):
            steps.append(_STEP.pack(*step[:8], len(edges), len(waiting), *step[8:]))
            edges += waiting
        vector = b""
        if cut is not None:
            vector = _CUT.pack(*cut) + struct.pack(
                f"<{counts}I", *(number << 8 | item_bytes for number in range(counts))
            )
        header = _HEADER.pack(
            _MAGIC, _VERSION, buffers, self._world, self._rank, self._signature,
            len(steps), len(self._operands), len(edges), len(self._name), 0, (cut is not None) * _CUTS_VECTOR,
            counts, self._world, item_bytes,
        )  # fmt: skip
        listed = struct.pack(f"<{len(edges)}I", *edges)
        return b"".join((header, *steps, *self._operands, listed, vector, self._name))


def _allreduce(world: int, rank: int, dtype: int, op: int, item_bytes: int, grade: int) -> bytes | None:
    elements = _grade_bytes(grade) // item_bytes
    # The cost model is asked with the size that so many elements have.
    if elements == 0 or elements * item_bytes != _grade_bytes(grade):
        return None
    signature = _ALLREDUCE << 56 | dtype << 48 | op << 40
    after = [_after(rank, step, world) for step in range(1, world)]
    before = [_before(rank, step, world) for step in range(1, world)]
    if world == 1:
        # A type whose sums are wider has another form here.
        if dtype in (_F16, _BF16):
            return None
        alone = (elements, elements * item_bytes, 1, 1)
        return _Plan("allreduce", world, rank, signature).encode(buffers=1, counts=1, item_bytes=item_bytes, cut=alone)
    if grade <= _ONE_SHOT_LAST[world - 2]:
        plan, size_bytes = _Plan("allreduce", world, rank, signature), _counts(0, 1)
        sends = [plan.send(peer, 0, 0, size_bytes) for peer in after]
        loans = {peer: plan.recv(peer, 0, size_bytes, flags=_LOAN) for peer in before}
        plan.fold(loans, dtype, op, 0, size_bytes, sends, 0)
        return plan.encode(buffers=1, counts=1, item_bytes=item_bytes, cut=(elements, elements * item_bytes, 1, 1))
    if grade < _ROUND_TRIP_FIRST[world - 2]:
        return None
    plan = _Plan("allreduce by round trips", world, rank, signature | _ROUND_TRIPS_SIGNATURE)
    line = max(_LINE_BYTES // item_bytes, 1)
    share = min(-(-elements // line // world) * line, elements)
    pieces = max(-(-share * item_bytes // _CHUNK_BYTES), 1)
    for slot in range(pieces):
        for peer in after:
            number = peer * pieces + slot
            plan.send(peer, slot, _counts(0, number), _counts(number, number + 1), flags=_ROUND_TRIP)
        number = rank * pieces + slot
        size_bytes = _counts(number, number + 1)
        loans = {peer: plan.recv(peer, slot, size_bytes, flags=_LOAN | _ROUND_TRIP) for peer in before}
        plan.fold(loans, dtype, op, _counts(0, number), size_bytes, (), _ROUND_TRIP)
    cut = (elements, _CHUNK_BYTES, world, pieces)
    return plan.encode(buffers=1, counts=world * pieces, item_bytes=item_bytes, cut=cut)


def _broadcast(world: int, rank: int, type_code: int, item_bytes: int, root: int, elements: int) -> bytes | None:
    if elements == 0:
        return None
    place, bit = (rank - root) % world, 1
    while bit < world and not place & bit:
        bit <<= 1
    parent = (place - bit + root) % world if place else None
    children = []
    while bit > 1:
        bit >>= 1
        if place + bit < world:
            children.append((place + bit + root) % world)
    plan = _Plan("broadcast", world, rank, _BROADCAST << 56 | type_code << 48 | (root & 0xFF) << 32)
    segment_bytes = _SEGMENT_BYTES if world > 2 else elements * item_bytes
    piece_bytes = max(segment_bytes // item_bytes, 1) * item_bytes
    pieces = -(-elements * item_bytes // piece_bytes)
    for slot in range(pieces):
        offset, size_bytes = _counts(0, slot), _counts(slot, slot + 1)
        after = () if parent is None else (plan.recv(parent, slot, size_bytes, 0, offset),)
        for child in children:
            plan.send(child, slot, offset, size_bytes, after)
    return plan.encode(buffers=1, counts=pieces, item_bytes=item_bytes, cut=(elements, piece_bytes, 1, pieces))


def _allgather(
    world: int, rank: int, type_code: int, item_bytes: int, *, in_place: bool, separate: bool
) -> bytes | None:
    # The part of this rank lies in an output.
    if in_place and separate:
        return None
    plan = _Plan("allgather", world, rank, _ALLGATHER << 56 | type_code << 48)
    first = 0 if in_place else 1

    def place(peer: int) -> tuple[int, int, int]:
        buffer, start = (first + peer, peer) if separate else (first, 0)
        return _counts(peer, peer + 1), buffer, _counts(start, peer)

    own = _counts(rank, rank + 1)
    for step in range(1, world):
        plan.send(_after(rank, step, world), 0, _counts(0, rank) if in_place else 0, own)
    for step in range(1, world):
        peer = _before(rank, step, world)
        plan.recv(peer, 0, *place(peer))
    if not in_place:
        _, buffer, offset = place(rank)
        plan.copy(buffer, offset, own)
    return plan.encode(buffers=first + (world if separate else 1), counts=world, item_bytes=item_bytes)


def _barrier(world: int, rank: int) -> bytes:
    plan = _Plan("barrier", world, rank, _BARRIER << 56)
    heard: list[int] = []
    for slot in range((world - 1).bit_length()):
        plan.send(_after(rank, 1 << slot, world), slot, 0, 0, heard)
        heard.append(plan.recv(_before(rank, 1 << slot, world), slot, 0))
    return plan.encode(buffers=0)


def _after(rank: int, step: int, world: int) -> int:
    return (rank + step) % world


def _before(rank: int, step: int, world: int) -> int:
    return (rank - step) % world
