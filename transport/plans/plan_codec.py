# SPDX-License-Identifier: Apache-2.0
"""The binary form of a plan (docs/reference/plans.md, "Binary form"), which the native executor loads.

It is written column by column with NumPy, because a plan may have 100,000 steps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from sennit.transport.errors import ArgumentError
from sennit.transport.plans.counts import CountRange, end_of
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.plan import (
    BRANCH_BYTES,
    Branch,
    Copy,
    Decode,
    Encode,
    Operand,
    Plan,
    Recv,
    Reduce,
    Send,
    Step,
    bytes_read,
    bytes_written,
)
from sennit.transport.plans.vector_cut import WIDTH_BITS, VectorCut

if TYPE_CHECKING:
    import numpy.typing as npt


def check(plan: Plan) -> None:
    """Raises ArgumentError, naming step and rule, where `plan` breaks one."""
    from sennit.transport import _core

    touched = _core.Plan(encode(plan)).buffer_bytes
    if plan.count_count:
        return
    for buffer, (needs, has) in enumerate(zip(touched, plan.buffer_bytes, strict=True)):
        if needs > has:
            raise ArgumentError(
                f"plan {plan.name}: a step reaches byte {needs} of buffer {buffer}, which has {has} bytes"
            )


MAGIC: Final = 0x31504E53
VERSION: Final = 2
FLAG_LOAN: Final = 1  # of a RECV
FLAG_PARTIAL: Final = 2  # of a REDUCE: its result
FLAG_ROUND_TRIP: Final = 4  # of a SEND, RECV or REDUCE
FLAG_STOCHASTIC: Final = 8  # of an ENCODE
FLAG_HAS_LENGTH: Final = 16  # of a SEND or RECV
FLAG_ON_DEVICE: Final = 1  # of the header
FLAG_EQUAL_COUNTS: Final = 2  # of the header
FLAG_CUTS_VECTOR: Final = 4  # of the header
SEND, RECV, COPY, REDUCE, ENCODE, DECODE, BRANCH = range(7)
# Where an operand's `kind` holds: whether it is a view, a number or a counted number, whether a partial sum, and the
# combinations that follow it.
VIEW: Final = 1
NUMBER: Final = 2
COUNTED_NUMBER: Final = 3
PARTIAL: Final = 1 << 8
PROGRAM_SHIFT: Final = 16
PROGRAM_MAX: Final = 0xFF

HEADER: Final = struct.Struct("<IHHIIQIIIIQIIII")
STEP: Final = np.dtype(
    [
        ("kind", "u1"), ("dtype", "u1"), ("op", "u1"), ("flags", "u1"),
        ("peer", "<u4"), ("slot", "<u4"),
        ("operand_first", "<u4"), ("operand_count", "<u4"),
        ("edge_first", "<u4"), ("edge_count", "<u4"),
        ("buffer", "<u4"), ("offset", "<u8"), ("size_bytes", "<u8"),
    ]
)  # fmt: skip
# What precedes the counts in a plan that cuts a vector.
CUT: Final = struct.Struct("<QQII")
OPERAND: Final = np.dtype([("kind", "<u4"), ("index", "<u4"), ("offset", "<u8")])


class _Number(Operand):
    """An operand that is a number, not a place: `offset` is the number."""


def _operands(step: Step) -> tuple[Operand, ...]:
    if isinstance(step, Reduce):
        return step.operands
    if isinstance(step, Encode):
        return step.source, _Number(0, step.first_index)
    return () if isinstance(step, Recv) else (step.source,)


def _row(step: Step) -> tuple[int, int, int, int, int, int, int, int, int]:
    """Returns the columns kind, dtype, op, flags, peer, slot, buffer, offset, size_bytes."""
    if isinstance(step, Send):
        flags = step.comes_back * FLAG_ROUND_TRIP + step.has_length * FLAG_HAS_LENGTH
        return SEND, 0, 0, flags, step.peer, step.slot, 0, 0, step.size_bytes
    if isinstance(step, Recv):
        flags = (step.buffer is None) * FLAG_LOAN + step.comes_back * FLAG_ROUND_TRIP
        flags += step.has_length * FLAG_HAS_LENGTH
        return RECV, 0, 0, flags, step.peer, step.slot, step.buffer or 0, step.offset, step.size_bytes
    if isinstance(step, Copy):
        return COPY, 0, 0, 0, 0, 0, step.buffer, step.offset, step.size_bytes
    if isinstance(step, Branch):
        return BRANCH, 0, 0, 0, 0, 0, 0, 0, BRANCH_BYTES
    if isinstance(step, Encode | Decode):
        kind, coding = (ENCODE if isinstance(step, Encode) else DECODE), step.coding
        flags, peer = coding.stochastic * FLAG_STOCHASTIC, (step.peer if isinstance(step, Decode) else 0)
        return kind, step.dtype, coding.kind, flags, peer, coding.block, step.buffer, step.offset, step.size_bytes
    flags = step.gives_partial * FLAG_PARTIAL + step.comes_back * FLAG_ROUND_TRIP
    return REDUCE, step.dtype, step.op, flags, 0, 0, step.buffer, step.offset, step.size_bytes


def _programs(plan: Plan) -> Iterator[int]:
    """Per operand: the combinations that follow it."""
    for number, step in enumerate(plan.steps):
        if not isinstance(step, Reduce):
            yield from (0 for _ in _operands(step))
            continue
        if len(step.program) != len(step.operands) or any(not 0 <= count <= PROGRAM_MAX for count in step.program):
            raise ArgumentError(
                f"plan {plan.name}: step {number} has program {step.program}; "
                f"allowed: {len(step.operands)} numbers of 0..{PROGRAM_MAX}"
            )
        yield from step.program


def _firsts(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns where each step's part of a shared table starts."""
    return np.cumsum(counts) - counts


def encode(plan: Plan) -> bytes:
    """Returns the bytes that `sennit_plan_load` takes. Raises ArgumentError for a number that no field can hold."""
    count = len(plan.steps)
    table = np.zeros(count, STEP)
    if count:
        columns = zip(*(_row(step) for step in plan.steps), strict=True)
        for name, column in zip(
            ("kind", "dtype", "op", "flags", "peer", "slot", "buffer", "offset", "size_bytes"), columns, strict=True
        ):
            if min(column) < 0:
                raise ArgumentError(
                    f"plan {plan.name}: step {column.index(min(column))} has {name} {min(column)}; allowed: 0 or more"
                )
            table[name] = column

    lists = [_operands(step) for step in plan.steps]
    operand_counts = np.fromiter(map(len, lists), np.int64, count)
    table["operand_first"] = _firsts(operand_counts)
    table["operand_count"] = operand_counts
    flat = [operand for operands in lists for operand in operands]
    for operand in flat:
        if operand.index < 0 or operand.offset < 0:
            raise ArgumentError(f"plan {plan.name}: {operand}; allowed: an index and an offset of 0 or more")
    operands = np.zeros(len(flat), OPERAND)
    operands["kind"] = [
        operand.is_view * VIEW
        + isinstance(operand, _Number) * (COUNTED_NUMBER if isinstance(operand.offset, CountRange) else NUMBER)
        + operand.is_partial * PARTIAL
        + (count << PROGRAM_SHIFT)
        for operand, count in zip(flat, _programs(plan), strict=True)
    ]
    operands["index"] = [operand.index for operand in flat]
    operands["offset"] = [operand.offset for operand in flat]

    # Steps name what they wait for. The executor needs the reverse: the steps that wait for each step.
    wait_counts = np.fromiter((len(step.after) for step in plan.steps), np.int64, count)
    waiting = np.repeat(np.arange(count), wait_counts)
    awaited = np.fromiter((e for step in plan.steps for e in step.after), np.int64, int(wait_counts.sum()))
    if len(awaited) and not 0 <= awaited.min() <= awaited.max() < count:
        raise ArgumentError(f"plan {plan.name}: a step waits for step {awaited.max()}; allowed: 0..{count - 1}")
    order = np.argsort(awaited, kind="stable")
    edge_counts = np.bincount(awaited, minlength=count).astype(np.int64)
    table["edge_first"] = _firsts(edge_counts)
    table["edge_count"] = edge_counts
    edges = waiting[order].astype("<u4")

    encoded_name = plan.name.encode()
    flags = plan.on_device * FLAG_ON_DEVICE | plan.equal_counts * FLAG_EQUAL_COUNTS
    flags |= (plan.cut is not None) * FLAG_CUTS_VECTOR
    header = HEADER.pack(
        MAGIC, VERSION, len(plan.buffer_bytes), plan.world, plan.rank, plan.signature,
        count, len(operands), len(edges), len(encoded_name), plan.scratch_bytes, flags,
        plan.count_count, plan.leaves, plan.unit_bytes,
    )  # fmt: skip
    return b"".join((header, table.tobytes(), operands.tobytes(), edges.tobytes(), _encode_cut(plan.cut), encoded_name))


def decode(data: bytes) -> Plan:
    """Returns the plan of `data`, unchecked. `buffer_bytes` are the ends of the furthest ranges used."""
    if len(data) < HEADER.size:
        raise ArgumentError(f"a plan of {len(data)} bytes; allowed: {HEADER.size} or more")
    (
        magic, version, buffer_count, world, rank, signature,
        steps, operands, edges, name_bytes, scratch, flags, count_count, leaves, unit_bytes,
    ) = HEADER.unpack_from(data)  # fmt: skip
    if magic != MAGIC or version != VERSION:
        raise ArgumentError(f"magic {magic:#x} version {version}; expected {MAGIC:#x} version {VERSION}")
    cut_bytes = CUT.size + 4 * count_count if flags & FLAG_CUTS_VECTOR else 0
    sizes = (HEADER.size, steps * STEP.itemsize, operands * OPERAND.itemsize, edges * 4, cut_bytes, name_bytes)
    if sum(sizes) != len(data):
        raise ArgumentError(f"a plan of {len(data)} bytes; its header describes {sum(sizes)}")
    starts = np.cumsum(sizes)
    table = np.frombuffer(data, STEP, steps, starts[0])
    reads = np.frombuffer(data, OPERAND, operands, starts[1])
    waiting = np.frombuffer(data, "<u4", edges, starts[2])

    after: list[list[int]] = [[] for _ in range(steps)]
    for number, row in enumerate(table):
        first, count = int(row["edge_first"]), int(row["edge_count"])
        for step in waiting[first : first + count]:
            after[step].append(number)
    sources = [
        _Number(int(r["index"]), CountRange.decode(int(r["offset"])) if r["kind"] & VIEW else int(r["offset"]))
        if r["kind"] & NUMBER
        else Operand(
            int(r["index"]),
            CountRange.decode(int(r["offset"])),
            bool(r["kind"] & VIEW),
            bool(r["kind"] & PARTIAL),
        )
        for r in reads
    ]
    programs = (reads["kind"] >> PROGRAM_SHIFT).tolist()
    decoded = []
    for row, waits in zip(table, after, strict=True):
        used = slice(int(row["operand_first"]), int(row["operand_first"]) + int(row["operand_count"]))
        decoded.append(_step(row, sources[used], tuple(programs[used]), tuple(waits)))
    ends = [0] * (buffer_count + 1)
    for plan_step in decoded:
        for operand in _operands(plan_step):
            if not operand.is_view and not isinstance(operand, _Number):
                end = end_of(operand.offset, bytes_read(plan_step, operand))
                ends[operand.index] = max(ends[operand.index], end)
        if not isinstance(plan_step, Send | Branch) and plan_step.buffer is not None:
            end = end_of(plan_step.offset, bytes_written(plan_step))
            ends[plan_step.buffer] = max(ends[plan_step.buffer], end)
    return Plan(
        name=data[int(starts[4]) :].decode(),
        world=world,
        rank=rank,
        signature=signature,
        buffer_bytes=tuple(ends[:buffer_count]),
        scratch_bytes=CountRange.decode(scratch),
        steps=tuple(decoded),
        leaves=leaves,
        on_device=bool(flags & FLAG_ON_DEVICE),
        count_count=count_count,
        equal_counts=bool(flags & FLAG_EQUAL_COUNTS),
        unit_bytes=unit_bytes,
        cut=_decode_cut(data, int(starts[3]), count_count) if cut_bytes else None,
    )


def _encode_cut(cut: VectorCut | None) -> bytes:
    if cut is None:
        return b""
    counts = np.array([number << WIDTH_BITS | width for number, width in cut.counts], "<u4")
    return CUT.pack(cut.elements_max, cut.piece_bytes, cut.shares, cut.pieces) + counts.tobytes()


def _decode_cut(data: bytes, start: int, count_count: int) -> VectorCut:
    elements_max, piece_bytes, shares, pieces = CUT.unpack_from(data, start)
    counts = np.frombuffer(data, "<u4", count_count, start + CUT.size).tolist()
    return VectorCut(
        elements_max=elements_max,
        piece_bytes=piece_bytes,
        shares=shares,
        pieces=pieces,
        counts=tuple((count >> WIDTH_BITS, count & (1 << WIDTH_BITS) - 1) for count in counts),
    )


def _step(row: np.void, sources: list[Operand], program: tuple[int, ...], after: tuple[int, ...]) -> Step:
    kind, size_bytes = int(row["kind"]), CountRange.decode(int(row["size_bytes"]))
    peer, slot = int(row["peer"]), int(row["slot"])
    comes_back, has_length = bool(row["flags"] & FLAG_ROUND_TRIP), bool(row["flags"] & FLAG_HAS_LENGTH)
    buffer, offset = int(row["buffer"]), CountRange.decode(int(row["offset"]))
    if kind == SEND:
        return Send(peer, slot, sources[0], size_bytes, after, comes_back, has_length)
    if kind == RECV:
        place = None if row["flags"] & FLAG_LOAN else buffer
        return Recv(peer, slot, size_bytes, place, offset, after, comes_back, has_length)
    if kind == COPY:
        return Copy(sources[0], buffer, offset, size_bytes, after)
    if kind == REDUCE:
        dtype, op = Dtype(int(row["dtype"])), ReduceOp(int(row["op"]))
        gives_partial = bool(row["flags"] & FLAG_PARTIAL)
        return Reduce(tuple(sources), program, buffer, offset, size_bytes, dtype, op, gives_partial, after, comes_back)
    if kind == BRANCH:
        return Branch(sources[0], after)
    if kind in (ENCODE, DECODE):
        dtype, stochastic = Dtype(int(row["dtype"])), bool(row["flags"] & FLAG_STOCHASTIC)
        from sennit.transport.plans.coding import CodecKind, Coding

        coding = Coding(CodecKind(int(row["op"])), slot, stochastic)
        if kind == DECODE:
            return Decode(sources[0], buffer, offset, size_bytes, dtype, coding, after, peer)
        return Encode(sources[0], buffer, offset, size_bytes, dtype, coding, sources[1].offset, after)
    raise ArgumentError(f"step kind {kind}; allowed: 0..6")
