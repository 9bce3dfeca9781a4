# SPDX-License-Identifier: Apache-2.0
"""Plans for device memory: any plan for host memory, with its buffers on a device (docs/reference/plans.md).

Neither the network nor a fold can address device memory, so all bytes pass through scratch on the host. `for_device`
rewrites a plan in the order of its steps, like a register allocator. What a step reads is copied into scratch before
the step. What it writes is copied out after the step. Scratch is reused as soon as no later step needs it. So a plan of
any size needs only a bounded piece of host memory, and copies overlap with the network. Algorithms know nothing of
devices. The signature is that of the call on host memory, except for one bit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sennit.transport.errors import ArgumentError
from sennit.transport.plans.plan import Copy, Decode, Encode, Operand, Plan, Recv, Reduce, Send, Step, ascending
from sennit.transport.plans.plan_codec import check
from sennit.transport.plans.signature import on_device

# One ring each for loaded, folded and received bytes. Large enough that the network hides the copies.
RING_BYTES: Final = 4_194_304
# How messages of device memory are cut. A few messages are in progress at a time.
SEGMENT_BYTES: Final = 524_288
# Neighbouring ranges are copied together up to this size, because each copy has a fixed cost of several microseconds.
BLOCK_BYTES: Final = 1_048_576
ALIGNMENT_BYTES: Final = 64

Place = tuple[int, int, int]  # buffer, offset, size in bytes


@dataclass(eq=False)
class _Block:
    """Neighbouring bytes of one device buffer that share one place in scratch."""

    buffer: int
    low: int
    high: int
    ring: int
    last_use: int = -1
    """The number, in the old plan, of the last step that needs this block."""
    writers_left: int = 0
    start: int = -1
    """The offset in scratch."""
    waits: tuple[int, ...] = ()
    """New steps that must be done before this place in scratch is free for the block."""
    loaded: int = -1
    """The new step that copies the block into scratch, if there is one."""
    writers: list[int] = field(default_factory=list)
    users: list[int] = field(default_factory=list)
    """New steps that must be done before the place is free again."""

    @property
    def size_bytes(self) -> int:
        return self.high - self.low


class _Ring:
    """A part of scratch that blocks use in turn. It grows only if the blocks of one step do not fit."""

    def __init__(self, size_bytes: int) -> None:
        self._limit = size_bytes
        self._head = 0
        # Begin, end, and the last block there.
        self._regions: list[tuple[int, int, _Block]] = []
        self.used_bytes = 0

    def place(self, block: _Block, now: int) -> None:
        """Places the block where no step from `now` on needs the memory, and notes which steps it must wait for."""
        start = self._find(block.size_bytes, now)
        end = start + block.size_bytes
        block.start = start
        waits: set[int] = set()
        regions = [(start, end, block)]
        for low, high, other in self._regions:
            if low < end and start < high:
                waits.update(other.users)
            # What remains on both sides still belongs to the other block.
            pieces = ((low, min(high, start)), (max(low, end), high))
            regions += [(first, last, other) for first, last in pieces if first < last]
        self._regions = regions
        block.waits = tuple(sorted(waits))
        self._head = _aligned(end)
        self.used_bytes = max(self.used_bytes, end)

    def _find(self, size_bytes: int, now: int) -> int:
        live = sorted((low, high) for low, high, other in self._regions if other.last_use >= now)
        for first in (self._head, 0):
            start = first
            for low, high in live:
                if start + size_bytes <= low:
                    break
                start = max(start, _aligned(high))
            if start + size_bytes <= self._limit:
                return start
        return _aligned(max((high for _, high in live), default=0))


class _Written:
    """The device ranges that the steps so far have written. Writing a byte twice is an error."""

    def __init__(self) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def add(self, place: Place) -> None:
        if self.overlaps(place):
            raise ArgumentError(f"bytes {place[1]}+{place[2]} of buffer {place[0]} are written twice")
        insort(self._ranges.setdefault(place[0], []), (place[1], place[1] + place[2]))

    def overlaps(self, place: Place) -> bool:
        buffer, low, size_bytes = place
        ranges = self._ranges.get(buffer, [])
        index = bisect_left(ranges, (low + size_bytes,))
        return index > 0 and ranges[index - 1][1] > low


class _Blocks:
    """Ranges of the device that have their place in one ring. Neighbouring ranges are merged."""

    def __init__(self, places: Iterable[Place], block_bytes: int, ring: int) -> None:
        self._blocks: dict[int, list[_Block]] = {}
        for buffer, low, size_bytes in sorted(set(places)):
            blocks = self._blocks.setdefault(buffer, [])
            high = low + size_bytes
            last = blocks[-1] if blocks else None
            if last and (low < last.high or (low == last.high and high - last.low <= block_bytes)):
                last.high = max(last.high, high)
            else:
                blocks.append(_Block(buffer, low, high, ring))

    def of(self, place: Place) -> _Block:
        blocks = self._blocks[place[0]]
        return blocks[bisect_right(blocks, place[1], key=lambda block: block.low) - 1]


@dataclass
class _Use:
    """How one step uses device memory."""

    loads: list[Place] = field(default_factory=list)
    """Places that the step reads from the device."""
    held: list[Place] = field(default_factory=list)
    """Places that the step reads and an earlier step wrote. They are still in scratch."""
    stores: Place | None = None
    is_direct: bool = False
    """Whether the step is a COPY from one place of the device to another."""


def _uses(plan: Plan) -> list[_Use]:
    in_scratch: set[Place] = set()
    written = _Written()
    uses = []
    for number, step in enumerate(plan.steps):
        use = _Use()
        for operand in _operands(step):
            place = (operand.index, operand.offset, step.size_bytes)
            if operand.is_view or not step.size_bytes:
                continue
            if place in in_scratch:
                use.held.append(place)
            elif written.overlaps(place):
                raise ArgumentError(f"plan {plan.name}: step {number} reads a part of what earlier steps wrote")
            else:
                use.loads.append(place)
        if not isinstance(step, Send) and step.buffer is not None and step.size_bytes:
            target = (step.buffer, step.offset, step.size_bytes)
            written.add(target)
            use.is_direct = isinstance(step, Copy) and bool(use.loads)
            if not use.is_direct:
                use.stores = target
                in_scratch.add(target)
        uses.append(use)
    return uses


def _operands(step: Step) -> tuple[Operand, ...]:
    if isinstance(step, Recv):
        return ()
    return step.operands if isinstance(step, Reduce) else (step.source,)


# With three rings, no cycle of steps waits for memory. A receive must not wait for a send, because the send's receiver
# may wait in the same way. Nor may it wait for a fold, whose result is sent. Received bytes leave for the device, or
# down a tree.
LOADED, FOLDED, RECEIVED = range(3)


class _Rewriter:
    def __init__(self, plan: Plan, ring_bytes: int) -> None:
        self._plan = plan
        self._uses = _uses(plan)
        places: list[list[Place]] = [[], [], []]
        for step, use in zip(plan.steps, self._uses, strict=True):
            if not use.is_direct:
                places[LOADED] += use.loads
            if use.stores:
                places[RECEIVED if isinstance(step, Recv) else FOLDED].append(use.stores)
        largest = max((size_bytes for listed in places for _, _, size_bytes in listed), default=0)
        # All shares of a fold have a block in use at the same time. Together they fill half a ring, however small it
        # should be: a rank without room for some share would wait for one that waits for that share.
        if any(isinstance(step, Reduce) for step in plan.steps):
            ring_bytes = max(ring_bytes, 2 * plan.world * _aligned(largest))
        block_bytes = min(BLOCK_BYTES, max(largest, ring_bytes // (2 * plan.world)))
        blocks = [_Blocks(listed, block_bytes, ring) for ring, listed in enumerate(places)]
        self._loads = {place: blocks[LOADED].of(place) for place in places[LOADED]}
        self._stores = {place: blocks[ring].of(place) for ring in (FOLDED, RECEIVED) for place in places[ring]}
        self._note_last_uses()
        self._rings = [_Ring(ring_bytes) for _ in blocks]
        self._steps: list[Step] = []
        self._renumbered: list[int] = []

    def _note_last_uses(self) -> None:
        for number, use in enumerate(self._uses):
            if not use.is_direct:
                for place in use.loads:
                    self._loads[place].last_use = number
            for place in use.held:
                self._stores[place].last_use = number
            if use.stores:
                block = self._stores[use.stores]
                block.last_use = number
                block.writers_left += 1

    def run(self) -> Plan:
        for number, step in enumerate(self._plan.steps):
            self._rewrite(number, step)
        bases = [0]
        for ring in self._rings:
            bases.append(_aligned(bases[-1] + ring.used_bytes))
        return self._plan._replace(
            signature=on_device(self._plan.signature),
            on_device=True,
            scratch_bytes=bases[-1],
            steps=tuple(_rebased(step, self._plan.scratch, bases) for step in self._steps),
        )

    def _add(self, step: Step) -> int:
        self._steps.append(step)
        return len(self._steps) - 1

    def _rewrite(self, number: int, step: Step) -> None:
        use = self._uses[number]
        after = {self._renumbered[earlier] for earlier in step.after}
        if use.is_direct:
            self._renumbered.append(self._add(step._replace(after=ascending(after))))
            return
        read = []
        for place in use.loads:
            block = self._loads[place]
            self._load(block, number)
            after.add(block.loaded)
            read.append(block)
        read += [self._stores[place] for place in use.held]
        target = self._stores[use.stores] if use.stores else None
        if target:
            if target.start < 0:
                self._rings[target.ring].place(target, number)
            after.update(target.waits)
        added = self._add(self._translated(step, use, after))
        self._renumbered.append(added)
        for block in read:
            block.users.append(added)
        if target:
            target.writers.append(added)
            target.writers_left -= 1
            if not target.writers_left:
                self._store(target)

    def _load(self, block: _Block, number: int) -> None:
        if block.loaded >= 0:
            return
        self._rings[block.ring].place(block, number)
        buffer, offset = self._home(block, block.low)
        source = Operand(block.buffer, block.low)
        block.loaded = self._add(Copy(source, buffer, offset, block.size_bytes, block.waits))
        block.users.append(block.loaded)

    def _store(self, block: _Block) -> None:
        source = Operand(*self._home(block, block.low))
        after = ascending(block.writers)
        block.users.append(self._add(Copy(source, block.buffer, block.low, block.size_bytes, after)))

    def _home(self, block: _Block, offset: int) -> tuple[int, int]:
        """Returns where byte `offset` of the block's buffer is on the host.

        Until `_rebased`, each ring counts as a buffer.
        """
        return self._plan.scratch + block.ring, block.start + offset - block.low

    def _translated(self, step: Step, use: _Use, after: Iterable[int]) -> Step:
        waits = ascending(after)
        operands = tuple(self._source(operand, step.size_bytes, use) for operand in _operands(step))
        if isinstance(step, Send):
            return step._replace(source=operands[0], after=waits)
        if isinstance(step, Recv) and step.buffer is None:
            return step._replace(after=waits)
        # An empty range has no place.
        target = self._home(self._stores[use.stores], use.stores[1]) if use.stores else (self._plan.scratch, 0)
        moved = step._replace(buffer=target[0], offset=target[1], after=waits)
        if isinstance(moved, Copy):
            return moved._replace(source=operands[0])
        return moved._replace(operands=operands) if isinstance(moved, Reduce) else moved

    def _source(self, operand: Operand, size_bytes: int, use: _Use) -> Operand:
        if operand.is_view:
            return Operand(self._renumbered[operand.index], operand.offset, True)
        if not size_bytes:
            return Operand(self._plan.scratch)
        place = (operand.index, operand.offset, size_bytes)
        block = self._stores[place] if place in use.held else self._loads[place]
        return Operand(*self._home(block, operand.offset))


def _rebased(step: Step, scratch: int, bases: Sequence[int]) -> Step:
    """Returns the step with all rings in one scratch buffer. Ring r begins at byte `bases[r]`."""

    def moved(operand: Operand) -> Operand:
        if operand.is_view or operand.index < scratch:
            return operand
        return Operand(scratch, operand.offset + bases[operand.index - scratch])

    if isinstance(step, Reduce):
        step = step._replace(operands=tuple(moved(operand) for operand in step.operands))
    elif isinstance(step, Send | Copy):
        step = step._replace(source=moved(step.source))
    if not isinstance(step, Send) and step.buffer is not None and step.buffer >= scratch:
        step = step._replace(buffer=scratch, offset=step.offset + bases[step.buffer - scratch])
    return step


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _has_partials(step: Reduce) -> bool:
    return step.gives_partial or any(operand.is_partial for operand in step.operands)


def cut_messages(plan: Plan, segment_bytes: int = SEGMENT_BYTES) -> Plan:
    """Returns `plan` with its messages cut in segments. Each pair of ranks has one message in a direction.

    Segment `i` is message `i`. The last one is shorter than the others, and may be empty. So ranks that expect
    different sizes find out, even if one of them cuts more often.
    """
    if segment_bytes < 1:
        raise ArgumentError(f"segment_bytes {segment_bytes}; allowed: 1 or more")
    steps: list[Step] = []
    for number, step in enumerate(plan.steps):
        if step.after or (isinstance(step, Send | Recv) and step.slot):
            raise ArgumentError(
                f"plan {plan.name}: step {number} cannot be cut: it waits for other steps, or is no first message"
            )
        if not isinstance(step, Send | Recv):
            steps.append(step)
            continue
        for slot in range(step.size_bytes // segment_bytes + 1):
            begin = slot * segment_bytes
            size_bytes = min(segment_bytes, step.size_bytes - begin)
            if isinstance(step, Send):
                source = step.source._replace(offset=step.source.offset + begin)
                steps.append(step._replace(slot=slot, source=source, size_bytes=size_bytes))
            else:
                steps.append(step._replace(slot=slot, offset=step.offset + begin, size_bytes=size_bytes))
    return plan._replace(steps=tuple(steps))


def for_device(plan: Plan, *, ring_bytes: int = RING_BYTES) -> Plan:
    """Returns `plan`, checked, for buffers on a device. Raises ArgumentError if the plan would write a byte twice.

    Each of its three rings has `ring_bytes`, or more where a reduction of many ranks needs it.
    """
    if (
        plan.on_device
        or plan.scratch_bytes
        or plan.count_count
        or any(isinstance(step, Encode | Decode) for step in plan.steps)
        or any(isinstance(step, Reduce) and _has_partials(step) for step in plan.steps)
    ):
        raise ArgumentError(
            f"plan {plan.name} cannot be moved to device memory: it is there already, takes counts, encodes, or has "
            "scratch or partial sums of its own"
        )
    rewritten = _Rewriter(plan, ring_bytes).run()
    check(rewritten)
    return rewritten
