# SPDX-License-Identifier: Apache-2.0
"""Plans: one rank's part of one collective as a graph of steps over byte ranges (docs/reference/plans.md).

`algorithms/` write plans with `PlanBuilder`, `plan_codec.py` turns a plan into the bytes that the native executor loads
and checks, `reference.py` runs the plans of all ranks in NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from sennit.transport.light_tuple import LightTuple
from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.elements import Dtype, ReduceOp, accumulator
from sennit.transport.plans.tree import balanced
from sennit.transport.plans.vector_cut import VectorCut

if TYPE_CHECKING:
    from sennit.transport.plans.coding import Coding

# The most bytes that a receive without destination may hold (MAX_LOAN_BYTES in messages/budgets.hpp).
MAX_LOAN_BYTES: Final = 131_072
BRANCH_BYTES: Final = 4
# Slots are 20 bits of a message's 64-bit key.
SLOT_LIMIT: Final = (1 << 20) - 1
# As the peer of a RECV: whichever rank sends first (SENNIT_ANY_PEER).
ANY_PEER: Final = 0xFFFFFFFF
# As the peer of a SEND or RECV: the group's aggregator (SENNIT_AGGREGATOR).
AGGREGATOR: Final = 0xFFFFFFFE
# The slots of what ranks and aggregator tell each other beside vectors (ports/aggregator_port.hpp): how many blocks of
# the operation have no sum here; and, from this slot on, that number of each rank.
MISSING_SLOT: Final = 0x80000
FAILED_SLOT: Final = 0x80001
# What comes before codes without fixed size: their length, as u64.
LENGTH_BYTES: Final = 8


class Operand(LightTuple):
    """Where a step reads: byte `offset` of buffer `index`. With `is_view`: of the loan of RECV step `index`."""

    index: int  # type: ignore[assignment]  # in place of the method of tuples
    offset: int = 0
    is_view: bool = False
    is_partial: bool = False
    """Whether the operand of a REDUCE is a partial sum, in the accumulator's type."""


class Send(LightTuple):
    """Sends `size_bytes` at `source` to `peer` as message `slot`. Done when the range may be overwritten.

    `comes_back`: a round trip, after which the range holds the result of the peer's reduction. `has_length`:
    `size_bytes` is the most, and the size is in the `LENGTH_BYTES` before the range.
    """

    peer: int
    slot: int
    source: Operand
    size_bytes: int
    after: tuple[int, ...] = ()
    comes_back: bool = False
    has_length: bool = False


class Recv(LightTuple):
    """Receives message `slot` of `peer` into `buffer` at `offset`, or as a loan if `buffer` is None.

    `comes_back`: a loan on a round trip. The reduction that reads it writes its result there, too. `has_length`: as
    of `Send`.
    """

    peer: int
    slot: int
    size_bytes: int
    buffer: int | None
    offset: int = 0
    after: tuple[int, ...] = ()
    comes_back: bool = False
    has_length: bool = False


class Copy(LightTuple):
    """Copies `size_bytes` from `source` into `buffer` at `offset`."""

    source: Operand
    buffer: int
    offset: int
    size_bytes: int
    after: tuple[int, ...] = ()


class Encode(LightTuple):
    """Codes `size_bytes` of elements at `source` into `buffer` at `offset`.

    `first_index` is the logical index of the first one: a number, or the elements of a range of counts. With the post's
    seed it keys stochastic rounding. LOSSLESS puts the length of the codes into the `LENGTH_BYTES` before them.
    """

    source: Operand
    buffer: int
    offset: int
    size_bytes: int
    dtype: Dtype
    coding: Coding
    first_index: int = 0
    after: tuple[int, ...] = ()


class Decode(LightTuple):
    """Decodes `source` into `size_bytes` of elements of `buffer` at `offset`.

    Of LOSSLESS, rank `peer` has coded them: it is blamed if they are malformed.
    """

    source: Operand
    buffer: int
    offset: int
    size_bytes: int
    dtype: Dtype
    coding: Coding
    after: tuple[int, ...] = ()
    peer: int = 0


class Reduce(LightTuple):
    """The fold of `operands` into `size_bytes` of `buffer` at `offset`.

    `program` says in which order (tree.py): `program[i]` pairs are combined after operand i was pushed. The result may
    overwrite exactly one operand, if the elements of both have one size. `gives_partial`: it is a partial sum.
    `comes_back`: the loans among its operands are on a round trip.
    """

    operands: tuple[Operand, ...]
    program: tuple[int, ...]
    buffer: int
    offset: int
    size_bytes: int
    dtype: Dtype
    op: ReduceOp
    gives_partial: bool = False
    after: tuple[int, ...] = ()
    comes_back: bool = False

    def bytes_of(self, operand: Operand) -> int:
        """The size of one of its operands, which may be wider than the result, or narrower."""
        if self.size_bytes >> 63:  # a range of counts
            return self.size_bytes
        elements = self.size_bytes // _item_bytes(self.dtype, self.gives_partial)
        return elements * _item_bytes(self.dtype, operand.is_partial)


class Branch(LightTuple):
    """Reads a number of 4 bytes in scratch. If it is 0, the steps that wait for this one are left out, and so are
    those that wait for them.
    """

    source: Operand
    after: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        return BRANCH_BYTES

    @property
    def buffer(self) -> None:
        """It writes nothing."""


Step: TypeAlias = Send | Recv | Copy | Reduce | Encode | Decode | Branch


def bytes_read(step: Step, operand: Operand) -> int:
    """What a step reads of one of its operands."""
    if isinstance(step, Reduce):
        return step.bytes_of(operand)
    if step.size_bytes >> 63:
        return step.size_bytes
    return coded_bytes(step) if isinstance(step, Decode) else step.size_bytes


def bytes_written(step: Step) -> int:
    """What a step writes to its place in a buffer."""
    return coded_bytes(step) if isinstance(step, Encode) and not step.size_bytes >> 63 else step.size_bytes


def coded_bytes(step: Encode | Decode) -> int:
    return step.coding.coded_bytes(step.size_bytes // step.dtype.item_bytes, step.dtype.item_bytes)


class Plan(LightTuple):
    """A program for rank `rank` of `world`.

    `buffer_bytes` are the minimum sizes of the caller's buffers. Buffer number `len(buffer_bytes)` is scratch of
    `scratch_bytes`, owned by whatever runs the plan.
    """

    name: str
    world: int
    rank: int
    signature: int
    buffer_bytes: tuple[int, ...]
    scratch_bytes: int
    steps: tuple[Step, ...]
    leaves: int
    """The leaves of the reduction's tree (tree.py). AVG divides by this number."""
    on_device: bool = False
    """Whether the caller's buffers are device memory: then only COPY steps touch them (device_plan.py)."""
    count_count: int = 0
    """How many counts a post gives. Sizes, offsets, `buffer_bytes` and `scratch_bytes` may be ranges of them
    (counts.py)."""
    equal_counts: bool = False
    """Whether all counts are equal: then a post gives one in place of all."""
    unit_bytes: int = 0
    """The bytes of one counted element; 0 if the plan takes no counts."""
    cut: VectorCut | None = None
    """Set if a post gives one count, the elements of a vector. The cut of that vector gives all counts of the plan."""

    @property
    def scratch(self) -> int:
        """The number of the scratch buffer."""
        return len(self.buffer_bytes)


def ordered_steps(plan: Plan) -> list[list[int]]:
    """Lists the steps of a device plan that start in list order: copies to the host, sends that wait only for these,
    receives.

    Otherwise a rank could send a message that its receiver takes late, and hold back one that the receiver takes first.
    """
    if not plan.on_device:
        return []
    loads: list[int] = []
    sends: list[int] = []
    receives: list[int] = []
    are_loads = [False] * len(plan.steps)
    for number, step in enumerate(plan.steps):
        if isinstance(step, Copy):
            if step.buffer == plan.scratch and not step.source.is_view and step.source.index != plan.scratch:
                loads.append(number)
                are_loads[number] = True
        elif isinstance(step, Send):
            if all(are_loads[earlier] for earlier in step.after):
                sends.append(number)
        elif isinstance(step, Recv) and step.buffer is not None:
            receives.append(number)
    return [loads, sends, receives]


class PlanBuilder:
    """Collects steps. Each adding method returns the number of the new step, for the `after` lists of later steps.

    A step that reads a loan waits for its RECV automatically.
    """

    def __init__(
        self,
        name: str,
        *,
        world: int,
        rank: int,
        signature: int,
        buffer_bytes: Sequence[int],
        scratch_bytes: int = 0,
        leaves: int | None = None,
        count_count: int = 0,
        equal_counts: bool = False,
        unit_bytes: int = 0,
    ) -> None:
        """`leaves`: one a rank by default."""
        self._name = name
        self._world = world
        self._rank = rank
        self._signature = signature
        self._buffer_bytes = tuple(buffer_bytes)
        self._scratch_bytes = scratch_bytes
        self._leaves = world if leaves is None else leaves
        self._count_count = count_count
        self._equal_counts = equal_counts
        self._unit_bytes = unit_bytes
        self._cut: VectorCut | None = None
        self._counts: list[tuple[int, int]] = []
        self._steps: list[Step] = []
        self._branch: int | None = None

    def send(
        self,
        peer: int,
        slot: int,
        source: Operand,
        size_bytes: int,
        *,
        after: Iterable[int] = (),
        comes_back: bool = False,
        has_length: bool = False,
    ) -> int:
        return self._add(Send(peer, slot, source, size_bytes, ascending(after), comes_back, has_length))

    def recv(
        self,
        peer: int,
        slot: int,
        buffer: int,
        offset: int,
        size_bytes: int,
        *,
        after: Iterable[int] = (),
        has_length: bool = False,
    ) -> int:
        return self._add(Recv(peer, slot, size_bytes, buffer, offset, ascending(after), False, has_length))

    def loan(self, peer: int, slot: int, size_bytes: int, *, comes_back: bool = False) -> int:
        """Adds a receive whose bytes stay in the transport until one local step has read them."""
        return self._add(Recv(peer, slot, size_bytes, None, 0, (), comes_back))

    def copy(self, source: Operand, buffer: int, offset: int, size_bytes: int, *, after: Iterable[int] = ()) -> int:
        return self._add(Copy(source, buffer, offset, size_bytes, self._with_loans((source,), after)))

    def encode(
        self,
        source: Operand,
        buffer: int,
        offset: int,
        size_bytes: int,
        *,
        dtype: Dtype,
        coding: Coding,
        first_index: int = 0,
        after: Iterable[int] = (),
    ) -> int:
        waits = self._with_loans((source,), after)
        # The signature says where a codec is used.
        coding = coding._replace(between_hosts=False)
        return self._add(Encode(source, buffer, offset, size_bytes, dtype, coding, first_index, waits))

    def decode(
        self,
        source: Operand,
        buffer: int,
        offset: int,
        size_bytes: int,
        *,
        dtype: Dtype,
        coding: Coding,
        after: Iterable[int] = (),
        peer: int = 0,
    ) -> int:
        waits = self._with_loans((source,), after)
        # The way of rounding makes no difference to a decoder.
        coding = coding._replace(stochastic=False, between_hosts=False)
        return self._add(Decode(source, buffer, offset, size_bytes, dtype, coding, waits, peer))

    def reduce(
        self,
        operands: Sequence[Operand],
        buffer: int,
        offset: int,
        size_bytes: int,
        *,
        dtype: Dtype,
        op: ReduceOp,
        program: Sequence[int] | None = None,
        gives_partial: bool = False,
        after: Iterable[int] = (),
        comes_back: bool = False,
    ) -> int:
        """`program`: by default the operands are leaves 0, 1, ..."""
        waits = self._with_loans(operands, after)
        order = balanced(len(operands)) if program is None else tuple(program)
        return self._add(
            Reduce(tuple(operands), order, buffer, offset, size_bytes, dtype, op, gives_partial, waits, comes_back)
        )

    def branch(self, source: Operand, *, after: Iterable[int] = ()) -> int:
        """Adds a branch. Steps that are added later, and wait for nothing else, wait for it."""
        branch = self._add(Branch(source, ascending(after)))
        self._branch = branch
        return branch

    def reserve_scratch(self, size_bytes: int) -> int:
        """Makes scratch larger. Returns the offset of the new part, which starts on a cache line."""
        offset = -(-self._scratch_bytes // 64) * 64
        # A size that is a range of counts is allowed if nothing else is in scratch.
        self._scratch_bytes = offset + size_bytes if offset else size_bytes
        return offset

    def take_vector(self, cut: VectorCut, counts: Sequence[tuple[int, int]], item_bytes: int) -> None:
        """Makes the plan take the elements of a vector, and adds a first list of counts (`VectorCut.counts`).

        Each of the caller's buffers holds a vector as large as these counts together.
        """
        self._cut, self._unit_bytes = cut, item_bytes
        self.add_counts(counts)
        if cut.elements_max:
            self._buffer_bytes = (CountRange(0, len(counts)),) * len(self._buffer_bytes)

    def add_counts(self, counts: Sequence[tuple[int, int]]) -> int:
        """Adds counts of the vector. Returns the number of the first one."""
        self._counts += counts
        return len(self._counts) - len(counts)

    def scratch_counts(self, first: int) -> None:
        """Makes scratch as large as the counts from number `first` on."""
        self._scratch_bytes = CountRange(first, len(self._counts))

    def build(self) -> Plan:
        """Returns the plan, unchecked: the core checks every plan that it loads, and `plan_codec.check` asks it."""
        return Plan(
            name=self._name,
            world=self._world,
            rank=self._rank,
            signature=self._signature,
            buffer_bytes=self._buffer_bytes,
            scratch_bytes=self._scratch_bytes,
            count_count=len(self._counts) or self._count_count,
            equal_counts=self._equal_counts,
            unit_bytes=self._unit_bytes,
            steps=tuple(self._steps),
            leaves=self._leaves,
            cut=self._cut and self._cut._replace(counts=tuple(self._counts)),
        )

    def _add(self, step: Step) -> int:
        if self._branch is not None and not step.after:
            step = step._replace(after=(self._branch,))
        self._steps.append(step)
        return len(self._steps) - 1

    @staticmethod
    def _with_loans(operands: Iterable[Operand], after: Iterable[int]) -> tuple[int, ...]:
        return ascending([*after, *(operand.index for operand in operands if operand.is_view)])


def _item_bytes(dtype: Dtype, is_partial: bool) -> int:
    return (accumulator(dtype) if is_partial else dtype).item_bytes


def ascending(steps: Iterable[int]) -> tuple[int, ...]:
    # A set has no order, so it is sorted: equal plans get equal bytes.
    return tuple(sorted(set(steps)))
