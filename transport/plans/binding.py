# SPDX-License-Identifier: Apache-2.0
"""Binds counts to a plan that takes them: the same plan, with numbers in place of ranges of counts (counts.py)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from sennit.transport.errors import ArgumentError
from sennit.transport.plans.counts import CountRange, place_of
from sennit.transport.plans.plan import (
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

# All counts of a post together may have this many bytes.
COUNTED_MAX_BYTES: Final = (1 << 63) - 1


def with_counts(plan: Plan, counts: Sequence[int]) -> Plan:
    """`plan` with numbers in place of ranges of `counts`. Raises ArgumentError where they do not fit it."""
    binder = _Binder(plan, counts)
    return plan._replace(
        signature=plan.signature | (counts[0] & 0xFFFF_FFFF if plan.cut else 0),
        cut=None,
        scratch_bytes=binder.number(plan.scratch_bytes),
        count_count=0,
        equal_counts=False,
        unit_bytes=0,
        buffer_bytes=tuple(binder.number(size_bytes) for size_bytes in plan.buffer_bytes),
        steps=tuple(binder.step(number, step) for number, step in enumerate(plan.steps)),
    )


class _Binder:
    def __init__(self, plan: Plan, counts: Sequence[int]) -> None:
        taken = 1 if plan.equal_counts or plan.cut else plan.count_count
        if len(counts) != taken:
            raise ArgumentError(f"plan {plan.name} takes {taken} counts, {len(counts)} given")
        self._name, self._scratch = plan.name, plan.scratch
        # Ranks must exchange messages even if the vector has no elements, so that they learn of different calls.
        self._skips_empty = plan.cut is not None and plan.cut.elements_max != 0
        if plan.cut is not None:
            self._starts = list(accumulate(plan.cut.sizes(counts[0], plan.unit_bytes), initial=0))
            return
        share = plan.count_count if plan.equal_counts else 1
        self._starts = [0]
        for index, count in enumerate(counts):
            left = (COUNTED_MAX_BYTES - self._starts[-1]) // plan.unit_bytes // share
            if not 0 <= count <= left:
                raise ArgumentError(f"plan {plan.name}: count {index} is {count}; allowed: 0..{left}")
            self._starts += [self._starts[-1] + (number + 1) * count * plan.unit_bytes for number in range(share)]

    def number(self, value: int) -> int:
        return self._starts[value.end] - self._starts[value.first] if isinstance(value, CountRange) else value

    def step(self, number: int, step: Step) -> Step:
        size_bytes = self.number(step.size_bytes)
        nothing = Operand(self._scratch)
        match step:
            case Send() | Recv() if self._skips_empty and not size_bytes:
                return Copy(nothing, self._scratch, 0, 0, step.after)
            case Send():
                return step._replace(source=self._source(number, step), size_bytes=size_bytes)
            case Recv(buffer=None) if not size_bytes:
                # An empty message is no loan.
                return step._replace(buffer=self._scratch, size_bytes=0)
            case Recv():
                return step._replace(offset=self._offset(number, step, step.offset), size_bytes=size_bytes)
            case Branch():
                return step
            case Copy():
                offset = self._offset(number, step, step.offset)
                return step._replace(source=self._source(number, step), offset=offset, size_bytes=size_bytes)
            case Encode():
                index = self.number(step.first_index)
                if isinstance(step.first_index, CountRange):
                    index //= step.dtype.item_bytes
                coded = bytes_written(step._replace(size_bytes=size_bytes))
                offset = self._offset(number, step, step.offset, coded)
                source = self._source(number, step)
                return step._replace(source=source, offset=offset, size_bytes=size_bytes, first_index=index)
            case Decode():
                coded = bytes_read(step._replace(size_bytes=size_bytes), step.source)
                place = self._offset(number, step, step.source.offset, coded)
                # An empty message is no loan.
                is_empty_view = step.source.is_view and not size_bytes
                source = Operand(self._scratch) if is_empty_view else step.source._replace(offset=place)
                offset = self._offset(number, step, step.offset)
                return step._replace(source=source, offset=offset, size_bytes=size_bytes)
            case Reduce() if not size_bytes:
                return Copy(nothing, self._scratch, 0, 0, step.after)
            case Reduce():
                offset = self._offset(number, step, step.offset)
                sized = step._replace(size_bytes=size_bytes)
                operands = tuple(
                    operand._replace(offset=self._offset(number, step, operand.offset, sized.bytes_of(operand)))
                    for operand in step.operands
                )
                return step._replace(operands=operands, offset=offset, size_bytes=size_bytes)

    def _source(self, number: int, step: Send | Copy | Encode) -> Operand:
        return step.source._replace(offset=self._offset(number, step, step.source.offset))

    def _offset(self, number: int, step: Step, offset: int, moved_bytes: int | None = None) -> int:
        """`moved_bytes`: what the step moves there, if that is not its size."""
        size = step.size_bytes
        if isinstance(offset, CountRange) and isinstance(size, CountRange):
            place = place_of(offset, size)
            moved = self.number(size) if moved_bytes is None else moved_bytes
            if self.number(place) != moved:
                raise ArgumentError(
                    f"plan {self._name}: step {number} moves {moved} bytes ({size.describe()}), "
                    f"but its place has {self.number(place)} ({place.describe()})"
                )
        return self.number(offset)
