# SPDX-License-Identifier: Apache-2.0
"""Recursive halving and doubling along a tree of ranks: log2(world) peers for each rank.

The vector is cut into units. At every node of the tree (tree.py, with ranks for leaves), each unit has one owner among
the node's ranks, who holds what these ranks give of it. A node has two halves, and a unit has one owner in each. One of
these two is also the owner at the node: the other one sends it what it holds. If the number of ranks is a power of two
and the units of a rank lie side by side, this is recursive halving (Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", 2005). With one unit it is a binomial tree. Results go back the same way
(`gather`), which is recursive doubling.

A rank folds a unit only when it passes it on, or when all of it is there. So each value is read once. What it passes on
are the largest nodes of leaves inside the span that its node's ranks give (leaves.py): one sum if each rank gives one
leaf. If it gives several, the spans of ranks need not be nodes, and then a message has several sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from sennit.transport.algorithms.leaves import Leaves
from sennit.transport.algorithms.ranges import Part, chunks
from sennit.transport.algorithms.vector import Cut, Piece
from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.elements import Dtype, ReduceOp, accumulator
from sennit.transport.plans.plan import Operand, PlanBuilder
from sennit.transport.plans.tree import Span, combinations
from sennit.transport.plans.vector_cut import FILL


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
    """The most that it may have, if a post gives its size."""
    piece: int | None = None
    """The number of a piece whose size a post gives."""


@dataclass(frozen=True, kw_only=True)
class Halving:
    """What is summed, and where the results go."""

    leaves: Leaves
    rank: int
    dtype: Dtype
    op: ReduceOp
    elements: int = 0
    """The elements of one leaf or node, where a rank gives several."""
    units: Sequence[Unit]
    result: Callable[[Unit], tuple[int, int]]
    """Buffer and offset of a unit's result, on the ranks that get it. With `gather`, in the order of contributions: one
    message then brings the results of a whole run."""
    scratch: int
    """Number of the scratch buffer."""
    chunk_bytes: int
    """The most bytes of one partial sum in a message."""
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


def piece_units(shares: Iterable[tuple[int, Sequence[Cut]]], dtype: Dtype) -> list[Unit]:
    """The units of a vector whose pieces have sizes that a post gives, by the rank that owns a share in the end."""
    units = []
    position = 0
    for share, pieces in shares:
        for piece in pieces:
            assert isinstance(piece, Piece)
            count = piece.bytes_max // dtype.item_bytes
            units.append(
                Unit(share=share, buffer=0, offset=piece.offset, position=position, count=count, piece=piece.number)
            )
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
    levels = range((halving.leaves.world - 1).bit_length())
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
        return _count(self.units)


@dataclass(frozen=True, slots=True)
class _Place:
    """An offset in scratch. If sizes are counts, also the number of the count there."""

    offset: int
    count: int | None = None

    def after(self, size_bytes: int, units: int) -> _Place:
        """Where so many bytes end, which are the sums of so many units."""
        if self.count is None or not isinstance(self.offset, CountRange):
            return _Place(self.offset + size_bytes)
        return _Place(CountRange(self.offset.first, self.count + units), self.count + units)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank holds of a unit, from left to right, and the steps that brought it."""

    nodes: tuple[Span, ...]
    places: tuple[Operand, ...]
    came: tuple[int, ...] = ()


class _Writer:
    def __init__(self, builder: PlanBuilder, halving: Halving) -> None:
        self._builder = builder
        self._job, self._leaves, self._world = halving, halving.leaves, halving.leaves.world
        self._item_bytes = halving.dtype.item_bytes
        self._partial_bytes = accumulator(halving.dtype).item_bytes
        self._is_counted = any(unit.piece is not None for unit in halving.units)
        # The count with which scratch begins, if sizes are counts.
        self._scratch_first = 1 + builder.add_counts([FILL]) if self._is_counted else 0
        self._held: dict[Unit, _Held] = {}
        # Per unit: the step that sent it, and the one that made its result here.
        self._sent: dict[Unit, int] = {}
        self._made: dict[Unit, int] = {}

    def reduce_level(self, level: int) -> None:
        runs = list(self._runs(level))
        if not runs:
            return
        own = self._leaves.of_node(self._node(level), level)
        other = self._leaves.of_node(self._node(level) ^ 1 << level, level)
        taken = [run for run in runs if run.taker == self._job.rank]
        # What arrives lies in the order of units, so that one step may read several runs.
        place_of = dict(zip((run.first for run in taken), self._reserve(taken, other), strict=True))
        # What its taker passes on first goes first. Otherwise some ranks could pass on at once, others only at the end
        # of a round, and links would idle.
        for run in sorted(runs, key=lambda run: self._passed_on(run, level)):
            if run.giver == self._job.rank:
                self._give(run, own)
            else:
                self._take(run, other, place_of[run.first])
                if self._world <= 2 << level:
                    self._finish(run)

    def gather_level(self, level: int) -> None:
        for run in self._runs(level):
            buffer, offset = self._job.result(run.units[0])
            slot, size_bytes = 2 * run.first + 1, self._size(run.units)
            if run.taker == self._job.rank:
                after = {self._made[unit] for unit in run.units}
                self._builder.send(run.giver, slot, Operand(buffer, offset), size_bytes, after=after)
            else:
                # In place, the result overwrites the contribution, which must have been sent before.
                after = {self._sent[unit] for unit in run.units} if self._job.in_place else set()
                step = self._builder.recv(run.taker, slot, buffer, offset, size_bytes, after=after)
                self._made |= dict.fromkeys(run.units, step)

    def _give(self, run: _Run, span: Span) -> None:
        """Sends the sums of a run, folded from what this rank holds. Its only leaf or node goes from where it is."""
        held, size_bytes = self._holds(run.units[0]), self._bytes(run, span)
        source, after = Operand(held.places[0].index, held.places[0].offset), set(held.came)
        if len(held.nodes) > 1 and size_bytes:
            place = self._reserve([run], span)[0]
            source, after = Operand(self._job.scratch, place.offset), set()
            if place.count is not None:
                size_bytes = CountRange(place.count, place.count + len(run.units))
            for node in self._leaves.nodes(span):
                for _, group in groupby(run.units, self._lines):
                    piece = tuple(group)
                    part_bytes = _count(piece) * self._partial_bytes
                    if place.count is not None:
                        part_bytes = CountRange(place.count, place.count + len(piece))
                    after.add(self._fold(piece, node, self._job.scratch, place.offset, part_bytes, gives_partial=True))
                    place = place.after(part_bytes, len(piece))
        step = self._builder.send(run.taker, 2 * run.first, source, size_bytes, after=after)
        self._sent |= dict.fromkeys(run.units, step)

    def _reserve(self, runs: Sequence[_Run], span: Span) -> list[_Place]:
        """Makes room in scratch for the sums of runs, one after another. Returns where each run begins."""
        if not self._is_counted:
            sizes = [self._bytes(run, span) for run in runs]
            starts = accumulate(sizes[:-1], initial=self._builder.reserve_scratch(sum(sizes)))
            return [_Place(start) for start in starts][: len(runs)]
        width = self._item_bytes if self._leaves.is_leaf(span) else self._partial_bytes
        counts = [(unit.piece or 0, width) for run in runs for unit in run.units]
        first = self._builder.add_counts([*counts, FILL])
        self._builder.scratch_counts(self._scratch_first)
        lengths = accumulate((len(run.units) for run in runs[:-1]), initial=first)
        return [_Place(CountRange(self._scratch_first, count), count) for count in lengths][: len(runs)]

    def _size(self, units: Sequence[Unit]) -> int:
        """The bytes of the elements of neighbouring units."""
        if not self._is_counted:
            return _count(units) * self._item_bytes
        first = units[0].piece or 0
        return CountRange(first, first + len(units))

    def _take(self, run: _Run, span: Span, place: _Place) -> None:
        """Receives the other half's sums of a run."""
        size_bytes = self._bytes(run, span)
        if place.count is not None:
            size_bytes = CountRange(place.count, place.count + len(run.units))
        came = self._builder.recv(run.giver, 2 * run.first, self._job.scratch, place.offset, size_bytes)
        is_partial = not self._leaves.is_leaf(span)
        width = self._partial_bytes if is_partial else self._item_bytes
        count = run.count
        nodes = tuple(self._leaves.nodes(span)) if count else ()
        for index, unit in enumerate(run.units):
            start = place.after((unit.position - run.units[0].position) * width, index).offset
            offsets = (start + number * count * width if number else start for number in range(len(nodes)))
            places = tuple(Operand(self._job.scratch, offset, is_partial=is_partial) for offset in offsets)
            held = self._holds(unit)
            left, right = (held.nodes, held.places), (nodes, places)
            if span.low < held.nodes[0].low:
                left, right = right, left
            self._held[unit] = _Held(left[0] + right[0], left[1] + right[1], (*held.came, came))

    def _finish(self, run: _Run) -> None:
        """Folds all of a run into its result."""
        root = Span(0, self._leaves.count)
        for unit in run.units:
            size_bytes = self._size((unit,))
            step = self._holds(unit).came[-1]
            if size_bytes:
                step = self._fold((unit,), root, *self._job.result(unit), size_bytes, gives_partial=False)
            self._made[unit] = step

    def _fold(
        self, piece: Sequence[Unit], node: Span, buffer: int, offset: int, size_bytes: int, *, gives_partial: bool
    ) -> int:
        """Folds what this rank holds of a node of leaves."""
        held = self._holds(piece[0])
        inside = [index for index, part in enumerate(held.nodes) if node.low <= part.low < node.high]
        return self._builder.reduce(
            [held.places[index] for index in inside],
            buffer,
            offset,
            size_bytes,
            dtype=self._job.dtype,
            op=self._job.op,
            program=combinations(tuple(held.nodes[index] for index in inside), self._leaves.count),
            gives_partial=gives_partial,
            after={step for unit in piece for step in self._holds(unit).came},
        )

    def _holds(self, unit: Unit) -> _Held:
        if unit not in self._held:
            start = unit.offset // self._item_bytes
            places = [Operand(unit.buffer, unit.offset)]
            if not self._leaves.are_single:
                places = self._leaves.places(self._job.rank, self._job.dtype, self._job.elements, unit.buffer, start)
            self._held[unit] = _Held(tuple(self._leaves.given(self._job.rank)), tuple(places))
        return self._held[unit]

    def _passed_on(self, run: _Run, level: int) -> int:
        """The first level at which the taker gives a unit of the run away; the top level if it keeps all units."""
        world, taker = self._world, run.taker
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

    def _bytes(self, run: _Run, span: Span) -> int:
        """The size of a run with the sums of this span."""
        if self._leaves.is_leaf(span):
            return self._size(run.units)
        return run.count * len(self._leaves.nodes(span)) * self._partial_bytes

    def _runs(self, level: int) -> Iterator[_Run]:
        """The messages of this rank where the two halves of its node of 2**(level + 1) ranks meet."""
        low = self._node(level)
        other = low ^ (1 << level)
        if other >= self._world:
            return
        rank, world = self._job.rank, self._world
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
            and (
                self._is_counted
                or (last[1].buffer, last[1].offset + last[1].count * self._item_bytes) == (unit.buffer, unit.offset)
            )
            and size_bytes * self._partial_bytes <= self._job.chunk_bytes
        )

    def _lines(self, unit: Unit) -> list[tuple[int, int]]:
        """Returns the place where unit 0 would be. It is equal for neighbouring units whose places are side by side,
        too."""
        places = self._holds(unit).places
        if unit.piece is not None:
            return [(place.index, place.offset - (unit.piece << 32)) for place in places]
        widths = [self._partial_bytes if place.is_partial else self._item_bytes for place in places]
        return [
            (place.index, place.offset - unit.position * width) for place, width in zip(places, widths, strict=True)
        ]


def _count(units: Sequence[Unit]) -> int:
    return sum(unit.count for unit in units)
