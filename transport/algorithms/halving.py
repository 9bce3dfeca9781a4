# SPDX-License-Identifier: Apache-2.0
"""Recursive halving and doubling along the tree of ranks: log2(world) peers for each rank.

The vector is cut into units. At every node of the tree (tree.py), each unit has one owner among the node's ranks, who
holds the node's partial sum of it. A node has two halves, and a unit has one owner in each. One of these two is also
the owner at the node: it receives the other's partial sum and combines it with its own. If the number of ranks is a
power of two and the units of a rank lie side by side, this is recursive halving (Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", 2005). With one unit it is a binomial tree. Results go
back the same way (`gather`), which is recursive doubling.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from sennit.transport.algorithms.ranges import Part, chunks
from sennit.transport.elements import Dtype, ReduceOp, accumulator
from sennit.transport.plan import Operand, PlanBuilder


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Elements that stay together: `count` from element `position` of all that is summed."""

    share: int
    """The rank that owns the sum in the end."""
    buffer: int
    offset: int
    """Its bytes in `buffer`, the same on every rank."""
    position: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Halving:
    """What is summed, and where the results go."""

    world: int
    rank: int
    dtype: Dtype
    op: ReduceOp
    units: Sequence[Unit]
    result: Callable[[Unit], tuple[int, int]]
    """Buffer and offset of a unit's result, on the ranks that get it."""
    scratch: int
    """Number of the scratch buffer."""
    chunk_bytes: int
    """The most bytes of partial sums that travel as one message."""
    gather: bool
    in_place: bool
    """Whether results overwrite contributions that may still have to be sent."""


def cut_units(parts: Collection[tuple[int, Part]], dtype: Dtype, chunk_bytes: int) -> list[Unit]:
    """Cuts all that is summed, given as pairs of a rank and the part that it owns in the end.

    The partial sums of a unit fit one chunk. Empty parts have no unit. If all parts are empty, each has an empty one,
    because ranks must still hear of each other.
    """
    unit_bytes = chunk_bytes // accumulator(dtype).item_bytes * dtype.item_bytes
    all_empty = not any(part.size_bytes for _, part in parts)
    units = []
    position = 0
    for share, part in parts:
        for piece in chunks(part.size_bytes, unit_bytes) if part.size_bytes or all_empty else []:
            offset, count = part.offset + piece.offset, piece.size_bytes // dtype.item_bytes
            units.append(Unit(share=share, buffer=part.buffer, offset=offset, position=position, count=count))
            position += count
    return units


def owner(low: int, level: int, share: int, world: int) -> int:
    """Who holds a share at the node of 2**level ranks from `low` on; fewer, if the world ends before."""
    place = share % (1 << level)
    while low + place >= world:
        place -= 1 << (place.bit_length() - 1)
    return low + place


def add_halving(builder: PlanBuilder, halving: Halving) -> None:
    """Adds the whole schedule for two ranks or more. For each pair of ranks, sends and receives have one order."""
    writer = _Writer(builder, halving)
    levels = range((halving.world - 1).bit_length())
    for level in levels:
        writer.reduce_level(level)
    if halving.gather:
        for level in reversed(levels):
            writer.gather_level(level)


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring units that go from one rank to another as one message."""

    units: tuple[Unit, ...]
    first: int
    """The number of the first unit, which also numbers the message."""
    giver: int
    taker: int

    @property
    def count(self) -> int:
        return sum(unit.count for unit in self.units)


class _Writer:
    def __init__(self, builder: PlanBuilder, halving: Halving) -> None:
        self._builder = builder
        self._job = halving
        self._item_bytes = halving.dtype.item_bytes
        self._partial_bytes = accumulator(halving.dtype).item_bytes
        # Per unit: the step that made what this rank holds of it, and the step that sent it.
        self._made: dict[Unit, int] = {}
        self._sent: dict[Unit, int] = {}
        # Two ranks combine leaves only.
        elements = sum(unit.count for unit in halving.units) if halving.world > 2 else 0
        self._sums = builder.reserve_scratch(elements * self._partial_bytes)

    def reduce_level(self, level: int) -> None:
        low = self._node(level)
        # What its taker passes on first goes first. Otherwise some ranks could pass on at once, others only at the end
        # of a round, and links would idle.
        for run in sorted(self._runs(level), key=lambda run: self._passed_on(run, level)):
            if run.giver == self._job.rank:
                held = self._held(run, level, low)
                step = self._builder.send(
                    run.taker,
                    2 * run.first,
                    Operand(held.index, held.offset),
                    self._bytes(run, level, low),
                    after=self._steps(self._made, run),
                )
                self._sent |= dict.fromkeys(run.units, step)
            else:
                self._take(run, level, low)

    def gather_level(self, level: int) -> None:
        for run in self._runs(level):
            for piece in self._by_place(run):
                buffer, offset = self._job.result(piece[0]) if run.count else (self._job.scratch, 0)
                size_bytes = sum(unit.count for unit in piece) * self._item_bytes
                slot = 2 * (run.first + run.units.index(piece[0])) + 1
                if run.taker == self._job.rank:
                    after = {self._made[unit] for unit in piece if unit in self._made}
                    self._builder.send(run.giver, slot, Operand(buffer, offset), size_bytes, after=after)
                else:
                    # In place, the result overwrites the contribution, which must have been sent before.
                    after = {self._sent[unit] for unit in piece} if self._job.in_place else set()
                    step = self._builder.recv(run.taker, slot, buffer, offset, size_bytes, after=after)
                    self._made |= dict.fromkeys(piece, step)

    def _take(self, run: _Run, level: int, low: int) -> None:
        """Receives the other half's partial sums of a run and combines them with the own ones."""
        other = low ^ (1 << level)
        size_bytes = self._bytes(run, level, other)
        place = self._builder.reserve_scratch(size_bytes)
        came = self._builder.recv(run.giver, 2 * run.first, self._job.scratch, place, size_bytes)
        if not run.count:
            self._made |= dict.fromkeys(run.units, came)
            return
        arrived = Operand(self._job.scratch, place, is_partial=self._is_partial(level, other))
        is_last = self._job.world <= 2 << level
        for piece in self._by_place(run) if is_last else [run.units]:
            part = _Run(piece, run.first, run.giver, run.taker)
            step = self._combine(part, level, low, arrived, came, is_last)
            self._made |= dict.fromkeys(piece, step)
            arrived = Operand(
                arrived.index, arrived.offset + self._bytes(part, level, other), False, arrived.is_partial
            )

    def _combine(self, run: _Run, level: int, low: int, arrived: Operand, came: int, is_last: bool) -> int:
        own = self._held(run, level, low)
        if is_last:
            (buffer, offset), width = self._job.result(run.units[0]), self._item_bytes
        else:
            buffer, offset = self._job.scratch, self._sums + run.units[0].position * self._partial_bytes
            width = self._partial_bytes
        return self._builder.reduce(
            [own, arrived] if self._is_left(level, low) else [arrived, own],
            buffer,
            offset,
            run.count * width,
            dtype=self._job.dtype,
            op=self._job.op,
            gives_partial=not is_last,
            after=[came, *self._steps(self._made, run)],
        )

    def _passed_on(self, run: _Run, level: int) -> int:
        """The first level at which the taker gives a unit of the run away. The top one if it keeps them all."""
        world, taker = self._job.world, run.taker
        top = (world - 1).bit_length()

        def given_at(unit: Unit) -> int:
            for above in range(level + 1, top):
                if owner(taker >> above + 1 << above + 1, above + 1, unit.share, world) != taker:
                    return above
            return top

        return min(given_at(unit) for unit in run.units)

    def _node(self, level: int) -> int:
        """The first rank of the own node of 2**level ranks."""
        return self._job.rank >> level << level

    @staticmethod
    def _is_left(level: int, low: int) -> bool:
        return not low >> level & 1

    def _is_partial(self, level: int, low: int) -> bool:
        """Whether the node's sum has more than one leaf."""
        return level > 0 and low + 1 < self._job.world

    def _held(self, run: _Run, level: int, low: int) -> Operand:
        """What this rank holds of a run."""
        if not self._is_partial(level, low):
            return Operand(run.units[0].buffer, run.units[0].offset)
        return Operand(self._job.scratch, self._sums + run.units[0].position * self._partial_bytes, is_partial=True)

    def _bytes(self, run: _Run, level: int, low: int) -> int:
        return run.count * (self._partial_bytes if self._is_partial(level, low) else self._item_bytes)

    @staticmethod
    def _steps(steps: dict[Unit, int], run: _Run) -> set[int]:
        return {steps[unit] for unit in run.units if unit in steps}

    def _runs(self, level: int) -> Iterator[_Run]:
        """The messages of this rank where the two halves of its node of 2**(level + 1) ranks meet."""
        low = self._node(level)
        other = low ^ (1 << level)
        if other >= self._job.world:
            return
        rank, world = self._job.rank, self._job.world
        listed: list[tuple[int, Unit, int, int]] = []
        for number, unit in enumerate(self._job.units):
            if owner(low, level, unit.share, world) != rank:
                continue
            taker = owner(min(low, other), level + 1, unit.share, world)
            giver = owner(other, level, unit.share, world) if taker == rank else rank
            listed.append((number, unit, giver, taker))
        start = 0
        for index in range(1, len(listed) + 1):
            if index == len(listed) or not self._go_together(listed[start:index], listed[index]):
                first, _, giver, taker = listed[start]
                yield _Run(tuple(entry[1] for entry in listed[start:index]), first, giver, taker)
                start = index

    def _go_together(self, before: Sequence[tuple[int, Unit, int, int]], entry: tuple[int, Unit, int, int]) -> bool:
        number, unit, giver, taker = entry
        last = before[-1]
        size_bytes = sum(listed[1].count for listed in before) + unit.count
        return (
            last[0] + 1 == number
            and last[2:] == (giver, taker)
            and (last[1].buffer, last[1].offset + last[1].count * self._item_bytes) == (unit.buffer, unit.offset)
            and size_bytes * self._partial_bytes <= self._job.chunk_bytes
        )

    def _by_place(self, run: _Run) -> list[tuple[Unit, ...]]:
        """A run, cut where results are not side by side."""
        if not run.count:
            return [run.units]
        starts = []
        position = 0
        for unit in run.units:
            buffer, offset = self._job.result(unit)
            starts.append((buffer, offset - position))
            position += unit.count * self._item_bytes
        grouped = groupby(zip(run.units, starts, strict=True), key=lambda pair: pair[1])
        return [tuple(unit for unit, _ in group) for _, group in grouped]
