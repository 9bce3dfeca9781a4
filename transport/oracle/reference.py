# SPDX-License-Identifier: Apache-2.0
"""A NumPy interpreter that runs the plans of all ranks together: the reference for algorithms and executor.

A seed draws the order of events, within what a real transport may do. Ready sends and receives start in list order.
Local steps and deliveries happen in any order. A rank grants a peer a bounded number of loans. With `in_order`,
messages between two ranks do not overtake one another. Writing a byte that another step may still read or write is a
fault, and so is a run that cannot go on.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sennit.transport.errors import ArgumentError, MismatchError, SennitError
from sennit.transport.oracle.aggregator import StoredLeaves, left_out
from sennit.transport.plans.arithmetic import run_program
from sennit.transport.plans.binding import with_counts
from sennit.transport.plans.coding import CodecKind
from sennit.transport.plans.elements import Dtype
from sennit.transport.plans.plan import (
    AGGREGATOR,
    ANY_PEER,
    FAILED_SLOT,
    LENGTH_BYTES,
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
    ordered_steps,
)
from sennit.transport.plans.plan_codec import check

Bytes = npt.NDArray[np.uint8]


class PlanFault(SennitError):
    """The plans are wrong together: a race on bytes, or a deadlock."""


@dataclass(slots=True)
class _Span:
    """Memory that a step uses. Holds addresses, not buffer numbers, because buffers may overlap."""

    low: int
    high: int
    writing: bool
    step: int


@dataclass
class _Rank:
    plan: Plan
    buffers: list[Bytes]
    waits: list[int]
    waiters: list[list[int]]
    # Ready steps that have not started. Messages start in list order, local work in any order.
    messages: list[int] = field(default_factory=list)
    local: list[int] = field(default_factory=list)
    # Copies from a device, which the device makes in this order.
    loads: list[int] = field(default_factory=list)
    # On a device: steps that start in list order, and leave the list then. Each list has its own order.
    ordered: list[list[int]] = field(default_factory=list)
    in_order: frozenset[int] = frozenset()
    # Started sends, by peer, and receives, in the order of their start.
    sends: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    recvs: list[int] = field(default_factory=list)
    loans: dict[int, Bytes] = field(default_factory=dict)
    # By RECV of a loan on a round trip: the rank that sent it, and that rank's SEND.
    lenders: dict[int, tuple[_Rank, int]] = field(default_factory=dict)
    # What may be delivered to this rank: None after a change of its receives, its loans or the sends to it.
    deliveries: list[_Delivery] | None = None
    spans: list[_Span] = field(default_factory=list)
    done: int = 0

    def make_ready(self, step: int) -> None:
        if step in self.in_order:
            for steps in self.ordered:
                while steps and not self.waits[steps[0]]:
                    self._start(steps.pop(0))
        else:
            self._start(step)

    def _start(self, step: int) -> None:
        if step in self.in_order and isinstance(self.plan.steps[step], Copy):
            self.loads.append(step)
        elif isinstance(self.plan.steps[step], Send | Recv):
            self.messages.append(step)
            self.messages.sort()
        else:
            self.local.append(step)

    def finish(self, step: int) -> None:
        self.done += 1
        self.spans = [span for span in self.spans if span.step != step]
        for waiter in self.waiters[step]:
            self.waits[waiter] -= 1
            if not self.waits[waiter]:
                self.make_ready(waiter)

    def bytes_at(self, buffer: int, offset: int, size_bytes: int) -> Bytes:
        return self.buffers[buffer][offset : offset + size_bytes]

    def length_at(self, buffer: int, offset: int) -> Bytes:
        """Where the length of the codes at `offset` is."""
        return self.bytes_at(buffer, offset - LENGTH_BYTES, LENGTH_BYTES)

    def message_bytes(self, step: Send | Recv) -> int:
        """The size of a message, which may have come before it."""
        if not step.has_length:
            return step.size_bytes
        place = step.source if isinstance(step, Send) else Operand(step.buffer or 0, step.offset)
        return int(self.length_at(place.index, place.offset).view(np.uint64)[0])

    def claim(self, step: int, data: Bytes, *, writing: bool) -> None:
        """Marks memory as in use. Raises PlanFault if another step uses it and one of the two steps writes."""
        low = data.__array_interface__["data"][0]
        span = _Span(low, low + data.size, writing, step)
        for other in self.spans:
            overlap = other.low < span.high and span.low < other.high
            if overlap and (writing or other.writing) and other.step != step:
                raise PlanFault(
                    f"rank {self.plan.rank}: steps {other.step} {self.plan.steps[other.step]} and "
                    f"{step} {self.plan.steps[step]} race on {min(span.high, other.high) - max(low, other.low)} bytes"
                )
        self.spans.append(span)


def _recode(step: Encode | Decode, data: Bytes, seed: int) -> Bytes:
    # Imported late: a plan without codecs is run without them.
    from sennit.transport.codecs import Codec
    from sennit.transport.oracle import codec_reference, lossless_reference

    coding = step.coding
    codec = Codec(kind=coding.kind, block=coding.block, stochastic=coding.stochastic, seed=seed)
    if isinstance(step, Encode):
        if coding.kind is CodecKind.LOSSLESS:
            return np.frombuffer(lossless_reference.encode(data, step.dtype), np.uint8)
        return codec_reference.encode(codec, data, dtype=step.dtype, first_index=step.first_index)
    count = step.size_bytes // step.dtype.item_bytes
    if coding.kind is CodecKind.LOSSLESS:
        return lossless_reference.decode(data.tobytes(), count, step.dtype).view(np.uint8)
    values = codec_reference.decode(codec, data, count)
    if step.dtype is Dtype.F32:
        return values.view(np.uint8)
    return codec_reference.encode(Codec(kind=CodecKind.FP16 if step.dtype is Dtype.F16 else CodecKind.BF16), values)


def _flat(array: npt.NDArray[Any]) -> Bytes:
    if not array.flags.c_contiguous:
        raise ArgumentError("a buffer is not contiguous")
    return array.reshape(-1).view(np.uint8)


# Sender, its SEND, receiver, its RECV.
_Delivery: TypeAlias = tuple[_Rank, int, _Rank, int]


class Interpreter:
    """All ranks' plans, each of them checked, and buffers. `run` changes the buffers in place."""

    def __init__(
        self,
        plans: Sequence[Plan],
        buffers: Sequence[Sequence[npt.NDArray[Any]]],
        *,
        counts: Sequence[Sequence[int]] | None = None,
        seed: int = 0,
        scalar: float = 1.0,
        codec_seed: int = 0,
        loans_per_peer: int = 4,
        in_order: bool = False,
        without_aggregator: Collection[int] = (),
    ) -> None:
        """`without_aggregator`: the ranks that get no sums from it."""
        if counts is not None:
            plans = [with_counts(plan, given) for plan, given in zip(plans, counts, strict=True)]
        self._random = random.Random(seed)
        self._noise = np.random.default_rng(seed)
        self._scalar = scalar
        self._codec_seed = codec_seed
        self._loans_per_peer = loans_per_peer
        self._in_order = in_order
        self._ranks = [self._rank(plan, given) for plan, given in zip(plans, buffers, strict=True)]
        self._stored = StoredLeaves(plans, without_aggregator)

    def run(self) -> None:
        while any(rank.done < len(rank.plan.steps) for rank in self._ranks):
            actions = [(rank, "message", 0) for rank in self._ranks if rank.messages]
            actions += [(rank, "local", 0) for rank in self._ranks if rank.local]
            actions += [(rank, "load", 0) for rank in self._ranks if rank.loads]
            deliveries = [delivery for rank in self._ranks for delivery in self._deliveries(rank)]
            actions += [(self._ranks[0], "deliver", index) for index in range(len(deliveries))]
            answers = [answer for rank in self._ranks for answer in self._answers(rank)]
            actions += [(self._ranks[0], "answer", index) for index in range(len(answers))]
            if not actions:
                raise PlanFault(f"deadlock; {self._stuck()}")
            rank, what, index = self._random.choice(actions)
            if what == "message":
                self._start_message(rank, rank.messages.pop(0))
            elif what == "load":
                self._run_local(rank, rank.loads.pop(0))
            elif what == "local":
                self._run_local(rank, rank.local.pop(self._random.randrange(len(rank.local))))
            elif what == "answer":
                self._answer(*answers[index])
            else:
                self._deliver(*deliveries[index])
        for rank in self._ranks:
            if rank.loans:
                raise PlanFault(f"rank {rank.plan.rank}: loans of steps {sorted(rank.loans)} were never handed back")

    def _rank(self, plan: Plan, given: Sequence[npt.NDArray[Any]]) -> _Rank:
        check(plan)
        buffers = [_flat(array) for array in given]
        sizes = tuple(buffer.size for buffer in buffers)
        if len(sizes) != len(plan.buffer_bytes) or any(
            has < needs for has, needs in zip(sizes, plan.buffer_bytes, strict=True)
        ):
            raise ArgumentError(f"plan {plan.name}: buffers of {sizes} bytes; needed: {plan.buffer_bytes}")
        waiters: list[list[int]] = [[] for _ in plan.steps]
        for number, step in enumerate(plan.steps):
            for earlier in step.after:
                waiters[earlier].append(number)
        ordered = ordered_steps(plan)
        rank = _Rank(
            plan=plan,
            buffers=[*buffers, np.zeros(plan.scratch_bytes, np.uint8)],
            waits=[len(step.after) for step in plan.steps],
            waiters=waiters,
            ordered=ordered,
            in_order=frozenset(itertools.chain(*ordered)),
        )
        for number, waits in enumerate(rank.waits):
            if not waits:
                rank.make_ready(number)
        return rank

    def _start_message(self, rank: _Rank, number: int) -> None:
        step = rank.plan.steps[number]
        if isinstance(step, Send):
            data = rank.bytes_at(step.source.index, step.source.offset, rank.message_bytes(step))
            rank.claim(number, data, writing=step.comes_back)
            if step.peer == AGGREGATOR and step.slot >= FAILED_SLOT:
                self._stored.hear(rank.plan.rank, int(data.view(np.uint32)[0]))
                rank.finish(number)
                return
            rank.sends[step.peer].append(number)
            if step.peer == AGGREGATOR:
                self._stored.store(rank.plan.rank, step.slot, data)
            else:
                self._ranks[step.peer].deliveries = None
            return
        assert isinstance(step, Recv)
        if step.buffer is not None:
            size_bytes = rank.message_bytes(step)
            if size_bytes > step.size_bytes:
                raise MismatchError(f"rank {step.peer} says that its codes have {size_bytes} bytes")
            data = rank.bytes_at(step.buffer, step.offset, size_bytes)
            rank.claim(number, data, writing=True)
            # From here on the network may write, so the memory is filled with noise. A step that reads too early reads
            # noise.
            data[:] = self._noise.integers(0, 256, data.size, np.uint8)
        rank.recvs.append(number)
        rank.deliveries = None

    def _answers(self, rank: _Rank) -> list[tuple[_Rank, int, int | None]]:
        """Returns what the aggregator may answer now: the rank, its RECV, and its SEND of the same slot."""
        found = []
        for number in rank.recvs:
            recv = rank.plan.steps[number]
            assert isinstance(recv, Recv)
            if recv.peer != AGGREGATOR:
                continue
            send = self._matching_send(rank, AGGREGATOR, recv.slot)
            if self._stored.may_answer(rank.plan.rank, recv.slot, has_sent=send is not None):
                found.append((rank, number, send))
        return found

    def _answer(self, rank: _Rank, number: int, send: int | None) -> None:
        recv = rank.plan.steps[number]
        assert isinstance(recv, Recv)
        assert recv.buffer is not None
        self._stored.answer(rank.plan.rank, recv.slot, rank.bytes_at(recv.buffer, recv.offset, recv.size_bytes))
        rank.recvs.remove(number)
        rank.finish(number)
        if send is not None:
            rank.sends[AGGREGATOR].remove(send)
            rank.finish(send)

    def _run_local(self, rank: _Rank, number: int) -> None:
        step = rank.plan.steps[number]
        if isinstance(step, Branch):
            if self._read(rank, number, step.source, step.size_bytes).view(np.uint32)[0]:
                rank.finish(number)
            else:
                rank.done += 1 + left_out(rank.plan)
            return
        assert isinstance(step, Copy | Reduce | Encode | Decode)
        operands = step.operands if isinstance(step, Reduce) else (step.source,)
        sources = [self._read(rank, number, operand, bytes_read(step, operand)) for operand in operands]
        target = rank.bytes_at(step.buffer, step.offset, bytes_written(step))
        rank.claim(number, target, writing=True)
        if isinstance(step, Reduce):
            target[:] = run_program(
                sources,
                step.program,
                step.dtype,
                step.op,
                partial=[operand.is_partial for operand in operands],
                divisor=rank.plan.leaves,
                scalar=self._scalar,
                gives_partial=step.gives_partial,
            )
        elif isinstance(step, Encode | Decode):
            self._code(rank, number, step, sources[0], target)
        else:
            target[:] = sources[0]
        for operand in operands:
            if operand.is_view:
                rank.loans.pop(operand.index, None)
                rank.deliveries = None
                if operand.index in rank.lenders:
                    self._send_back(*rank.lenders.pop(operand.index), target)
        rank.finish(number)

    def _code(self, rank: _Rank, number: int, step: Encode | Decode, source: Bytes, target: Bytes) -> None:
        if step.coding.kind is not CodecKind.LOSSLESS:
            target[:] = _recode(step, source, self._codec_seed)
            return
        encodes = isinstance(step, Encode)
        place = Operand(step.buffer, step.offset) if encodes else step.source
        length = rank.length_at(place.index, place.offset)
        rank.claim(number, length, writing=encodes)
        if encodes:
            coded = _recode(step, source, 0)
            target[: coded.size] = coded
            length[:] = np.array([coded.size], np.uint64).view(np.uint8)
        else:
            target[:] = _recode(step, source[: int(length.view(np.uint64)[0])], 0)

    def _send_back(self, lender: _Rank, number: int, result: Bytes) -> None:
        send = lender.plan.steps[number]
        assert isinstance(send, Send)
        lender.bytes_at(send.source.index, send.source.offset, send.size_bytes)[:] = result
        lender.finish(number)

    def _read(self, rank: _Rank, number: int, operand: Operand, size_bytes: int) -> Bytes:
        if operand.is_view:
            if operand.index not in rank.loans:
                raise PlanFault(f"rank {rank.plan.rank}: step {number} reads loan {operand.index} before it is there")
            return rank.loans[operand.index][operand.offset : operand.offset + size_bytes]
        data = rank.bytes_at(operand.index, operand.offset, size_bytes)
        rank.claim(number, data, writing=False)
        return data

    def _deliveries(self, receiver: _Rank) -> list[_Delivery]:
        """Returns every (sender, SEND, receiver, RECV) that may complete now at this receiver."""
        if receiver.deliveries is not None:
            return receiver.deliveries
        found: list[_Delivery] = []
        granted: dict[int, int] = {}
        for loan in receiver.loans:
            peer = receiver.plan.steps[loan]
            assert isinstance(peer, Recv)
            granted[peer.peer] = granted.get(peer.peer, 0) + 1
        for number in receiver.recvs:
            recv = receiver.plan.steps[number]
            assert isinstance(recv, Recv)
            if recv.peer == AGGREGATOR:
                continue
            if recv.buffer is None:
                granted[recv.peer] = granted.get(recv.peer, 0) + 1
                if granted[recv.peer] > self._loans_per_peer:
                    continue
            senders = self._ranks if recv.peer == ANY_PEER else [self._ranks[recv.peer]]
            for sender in senders:
                match = self._matching_send(sender, receiver.plan.rank, recv.slot)
                if match is not None:
                    found.append((sender, match, receiver, number))
        receiver.deliveries = found
        return found

    def _matching_send(self, sender: _Rank, receiver: int, slot: int) -> int | None:
        # Messages that do not overtake one another: only the first may come.
        for number in sender.sends[receiver][: 1 if self._in_order else None]:
            send = sender.plan.steps[number]
            assert isinstance(send, Send)
            if send.slot == slot:
                return number
        return None

    def _deliver(self, sender: _Rank, send_number: int, receiver: _Rank, recv_number: int) -> None:
        send, recv = sender.plan.steps[send_number], receiver.plan.steps[recv_number]
        assert isinstance(send, Send)
        assert isinstance(recv, Recv)
        same_way = send.comes_back == recv.comes_back
        sent, expected = sender.message_bytes(send), receiver.message_bytes(recv)
        if sender.plan.signature != receiver.plan.signature or sent != expected or not same_way:
            from sennit.transport._core import describe_signature

            raise MismatchError(
                f"rank {sender.plan.rank} sends {describe_signature(sender.plan.signature)}, {sent} bytes; "
                f"rank {receiver.plan.rank} expects {describe_signature(receiver.plan.signature)}, {expected}"
            )
        data = sender.bytes_at(send.source.index, send.source.offset, sent)
        if recv.buffer is None:
            receiver.loans[recv_number] = data.copy()
        else:
            receiver.bytes_at(recv.buffer, recv.offset, sent)[:] = data
        sender.sends[send.peer].remove(send_number)
        receiver.recvs.remove(recv_number)
        receiver.deliveries = None
        if send.comes_back:
            receiver.lenders[recv_number] = sender, send_number
        else:
            sender.finish(send_number)
        receiver.finish(recv_number)

    def _stuck(self) -> str:
        lines: list[str] = []
        for rank in self._ranks:
            started = [*itertools.chain(*rank.sends.values()), *rank.recvs]
            waiting: list[Step] = [rank.plan.steps[number] for number in started]
            missing = len(rank.plan.steps) - rank.done
            if missing:
                lines.append(f"rank {rank.plan.rank}: {missing} steps left, waits for {waiting[:4]}")
        return "; ".join(lines)


def run(
    plans: Sequence[Plan],
    buffers: Sequence[Sequence[npt.NDArray[Any]]],
    *,
    counts: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
    scalar: float = 1.0,
    codec_seed: int = 0,
    loans_per_peer: int = 4,
    in_order: bool = False,
) -> None:
    """Runs `plans[r]` with `counts[r]` over `buffers[r]` for all ranks r. The results are in the buffers."""
    Interpreter(
        plans,
        buffers,
        counts=counts,
        seed=seed,
        scalar=scalar,
        codec_seed=codec_seed,
        loans_per_peer=loans_per_peer,
        in_order=in_order,
    ).run()
