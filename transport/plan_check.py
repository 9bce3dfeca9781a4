# SPDX-License-Identifier: Apache-2.0
"""The rules of docs/reference/plans.md for one plan on its own. The native loader checks the same rules.

`reference.py` checks that the plans of all ranks fit together (sizes, order, overlapping writes).
"""

from __future__ import annotations

from sennit.transport.elements import check_reducible
from sennit.transport.errors import ArgumentError
from sennit.transport.plan import ANY_PEER, MAX_LOAN_BYTES, SLOT_LIMIT, Copy, Operand, Plan, Recv, Reduce, Send, Step
from sennit.transport.signature import Kind


class _Checker:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sizes = (*plan.buffer_bytes, plan.scratch_bytes)
        self._sent: set[tuple[int, int]] = set()
        self._received: set[tuple[int, int]] = set()
        # The size of each loan, and the step that reads it.
        self._loans: dict[int, int] = {}
        self._readers: dict[int, int] = {}
        self._number = -1

    def run(self) -> None:
        plan = self._plan
        if not 0 <= plan.rank < plan.world:
            raise ArgumentError(f"plan {plan.name}: rank {plan.rank} is not in 0..{plan.world - 1}")
        for number, step in enumerate(plan.steps):
            self._number = number
            for earlier in step.after:
                # Steps wait only for earlier steps. This alone makes the graph acyclic.
                if not 0 <= earlier < number:
                    self._fail(f"waits for step {earlier}; allowed: 0..{number - 1}")
            if step.size_bytes < 0:
                self._fail(f"size {step.size_bytes} is negative")
            if plan.on_device:
                self._device(step)
            if isinstance(step, Send):
                self._message(step.peer, step.slot, self._sent)
                if step.source.is_view:
                    self._fail("sends a loan; only REDUCE and COPY may read one")
                self._range(step.source.index, step.source.offset, step.size_bytes)
            elif isinstance(step, Recv):
                self._recv(step)
            else:
                self._range(step.buffer, step.offset, step.size_bytes)
                if isinstance(step, Copy):
                    self._operand(step.source, step.size_bytes, step.after)
                else:
                    self._reduce(step)
        unread = self._loans.keys() - self._readers.keys()
        if unread:
            raise ArgumentError(f"plan {plan.name}: nobody reads the loan of step {min(unread)}")

    def _device(self, step: Step) -> None:
        operands = () if isinstance(step, Recv) else step.operands if isinstance(step, Reduce) else (step.source,)
        reads = any(not operand.is_view and operand.index < self._plan.scratch for operand in operands)
        writes = not isinstance(step, Send) and step.buffer is not None and step.buffer < self._plan.scratch
        if (reads or writes) and step.size_bytes and not isinstance(step, Copy):
            self._fail("touches device memory; only COPY may")
        if writes and any(operand.is_view for operand in operands):
            self._fail("copies a loan to device memory")

    def _recv(self, step: Recv) -> None:
        if step.peer == ANY_PEER:
            if self._plan.signature >> 56 != Kind.P2P:
                self._fail("receives from any peer; only a send/recv plan may")
        else:
            self._message(step.peer, step.slot, self._received)
        if step.buffer is not None:
            self._range(step.buffer, step.offset, step.size_bytes)
        elif not 0 < step.size_bytes <= MAX_LOAN_BYTES:
            self._fail(f"borrows {step.size_bytes} bytes; allowed: 1..{MAX_LOAN_BYTES}")
        else:
            self._loans[self._number] = step.size_bytes

    def _reduce(self, step: Reduce) -> None:
        check_reducible(step.dtype, step.op)
        if not step.operands:
            self._fail("reduces nothing")
        if step.size_bytes % step.dtype.item_bytes:
            self._fail(f"reduces {step.size_bytes} bytes of {step.dtype.item_bytes}-byte {step.dtype.name}")
        for operand in step.operands:
            self._operand(operand, step.size_bytes, step.after)
            if operand.is_view or operand.index != step.buffer or operand.offset == step.offset:
                continue
            if abs(operand.offset - step.offset) < step.size_bytes:
                self._fail("writes over part of an operand; the whole of it or nothing is allowed")

    def _operand(self, operand: Operand, size_bytes: int, after: tuple[int, ...]) -> None:
        if not operand.is_view:
            self._range(operand.index, operand.offset, size_bytes)
            return
        loan_bytes = self._loans.get(operand.index)
        if loan_bytes is None:
            self._fail(f"reads the loan of step {operand.index}, which is none")
        elif not 0 <= operand.offset <= loan_bytes - size_bytes:
            self._fail(f"reads bytes {operand.offset}+{size_bytes} of a loan of {loan_bytes}")
        if operand.index not in after:
            self._fail(f"reads the loan of step {operand.index} without waiting for it")
        if self._readers.setdefault(operand.index, self._number) != self._number:
            self._fail(f"reads the loan of step {operand.index}, which step {self._readers[operand.index]} reads")

    def _message(self, peer: int, slot: int, seen: set[tuple[int, int]]) -> None:
        if not 0 <= peer < self._plan.world or peer == self._plan.rank:
            self._fail(f"peer {peer} is not another rank of 0..{self._plan.world - 1}")
        if not 0 <= slot < SLOT_LIMIT:
            self._fail(f"slot {slot} is not in 0..{SLOT_LIMIT - 1}: use larger chunks")
        if (peer, slot) in seen:
            self._fail(f"uses slot {slot} with peer {peer} twice")
        seen.add((peer, slot))

    def _range(self, buffer: int, offset: int, size_bytes: int) -> None:
        if not 0 <= buffer < len(self._sizes):
            self._fail(f"buffer {buffer} is not in 0..{len(self._sizes) - 1}")
        elif not 0 <= offset <= self._sizes[buffer] - size_bytes:
            self._fail(f"bytes {offset}+{size_bytes} are outside buffer {buffer} of {self._sizes[buffer]}")

    def _fail(self, what: str) -> None:
        step = self._plan.steps[self._number]
        raise ArgumentError(f"plan {self._plan.name}: step {self._number} ({type(step).__name__.upper()}) {what}")


def check(plan: Plan) -> None:
    """Raises ArgumentError if `plan` breaks a rule. The message names plan, step and rule."""
    _Checker(plan).run()
