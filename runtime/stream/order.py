# SPDX-License-Identifier: Apache-2.0
"""The order in which a run sees the samples of a stream: a pure function of block sizes and settings.

A rank takes batches from *chunks*: the samples of its slices in some consecutive batches. A chunk says which rows are
read, in the order of reading, and which of them are whose place in a batch.
docs/decisions/0071-a-stream-is-blocks-in-one-order.md says why the order is as it is.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sennit.offload.permutation import KeyedPermutation
from sennit.runtime.data.errors import DataError, Incomplete
from sennit.runtime.data.numbering import Numbering
from sennit.runtime.stream.split import Places, Split
from sennit.transport.plans.tree import Span, leaves_of

STREAM_ORDER_VERSION: Final = 2
"""Incremented when the same settings give another order, so that no run resumes in the middle of a different order."""

ORDERS: Final = ("shuffled", "time", "files")
CHUNK_ROWS: Final = 1 << 16
"""Rows of a chunk of all ranks, where they are not shuffled, at most."""

Interval = tuple[int, int]
"""[begin, end)"""


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a stream that are for one purpose: training, validation or evaluation. They are numbered from 0."""

    count: int
    place_of: Callable[[int], int]
    """Number in the part -> row of the stream."""

    has: Callable[[Places], NDArray[np.bool_]]
    """Which rows are of the part."""

    def rows(self, numbers: Interval) -> Interval:
        """The shortest interval of rows with all of these numbers. Rows between them may be of another part."""
        begin, end = numbers
        return self.place_of(begin), self.place_of(end - 1) + 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a rank reads at once, and how its batches are made of it."""

    key: tuple[object, ...]
    """Equal for batches of one chunk."""

    part: Part
    intervals: tuple[Interval, ...]
    """Numbers in the part, in the order of reading."""

    places: Callable[[int], Places]
    """Number of a batch -> where its samples are among those that were read."""

    following: int | None
    """The first batch of the next chunk of this kind, after an epoch that of the next one; None: there is none."""

    steps: int
    """The training steps that come before it."""

    batches: int
    """How many it has a part of."""

    block: Interval | None
    """What it is of in all ranks together, numbers in the part; None unless it is a whole chunk of training in order.
    """


@dataclass(frozen=True)
class _InOrder:
    """Deals the numbers of a part: a batch has the next ones, and its slices are contiguous parts of it."""

    count: int
    batch_size: int
    slices: int

    @property
    def batches(self) -> int:
        return -(-self.count // self.batch_size)

    def size(self, batch: int) -> int:
        """Samples of a batch."""
        return min(self.batch_size, self.count - batch * self.batch_size)

    def intervals(self, batches: range, own: Span) -> list[Interval]:
        """What the slices `own` have of these batches, in the order of reading."""
        return [self._interval(batch, own) for batch in batches]

    def places(self, batches: range, own: Span, batch: int) -> Places:
        """Where the slices `own` have their samples of `batch` among these intervals."""
        lengths = [end - begin for begin, end in self.intervals(batches[: batches.index(batch) + 1], own)]
        return np.arange(sum(lengths[:-1]), sum(lengths))

    def _interval(self, batch: int, own: Span) -> Interval:
        first, size = batch * self.batch_size, self.size(batch)
        return first + own.low * size // self.slices, first + own.high * size // self.slices


@dataclass(frozen=True)
class _Regions(_InOrder):
    """Each slice has a region of the numbers, and a batch takes the next ones of each."""

    key: str | None = None
    """Within the batches of a chunk, the numbers of a slice are permuted by it; None: they are not."""

    def intervals(self, batches: range, own: Span) -> list[Interval]:
        return [
            (self._begin(batches.start, slice_), self._begin(batches.stop, slice_))
            for slice_ in range(own.low, own.high)
        ]

    def places(self, batches: range, own: Span, batch: int) -> Places:
        found, before = [], 0
        for slice_, (begin, end) in zip(range(own.low, own.high), self.intervals(batches, own), strict=True):
            first, last = self._begin(batch, slice_) - begin, self._begin(batch + 1, slice_) - begin
            numbers = np.arange(first, last)
            if self.key is not None and len(numbers):
                numbers = _permutation(end - begin, f"{self.key}/{slice_}/{batches.start}")(numbers)
            found.append(before + numbers)
            before += end - begin
        return np.concatenate(found)

    def _begin(self, batch: int, slice_: int) -> int:
        """Where the slice's samples of a batch begin; for the batch behind the last one, where its region ends."""
        whole, left = divmod(self.count, self.batch_size)
        low, high = (of * self.batch_size // self.slices for of in (slice_, slice_ + 1))
        region = whole * low + slice_ * left // self.slices
        if batch > whole:
            return whole * high + (slice_ + 1) * left // self.slices
        return region + batch * (high - low)


@dataclass(frozen=True, slots=True)
class _Phase:
    """A pass over a part: an epoch, or what an evaluation has of a part."""

    key: str
    layout: _InOrder | _Regions
    part: Part
    numbers: Callable[[Interval], list[Interval]]
    """Places in the layout -> numbers in the part."""

    number: Callable[[int], int | None]
    """A batch of the layout, or the one behind its last -> its number in the run; None: there is none."""

    chunk_batches: int


def _whole(places: Interval) -> list[Interval]:
    return [places]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation after some steps."""

    steps: int
    numbers: Interval
    """Training numbers that it has."""

    name: str
    """The window's name, for people."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamOrder(Numbering):
    """The order of a stream's samples in a run."""

    name: str
    """The name of the data set, for messages."""

    block_ends: Places
    """Int64: behind which row each block of the stream ends."""

    order: str
    """One of `ORDERS`."""

    seed: int
    held: Split
    """The rows for evaluation."""

    validation: Split | None = None
    """The rows for validation among the others."""

    batch_size: int
    epochs: int = 1
    max_steps: int | None = None
    eval_every: int | None = None
    slices: int = 8
    chunk_rows: int = CHUNK_ROWS
    """Rows of a chunk of all ranks, where they are not shuffled. It decides how much is in memory, and no bit unless
    columns are running (`running.RunningScales`)."""

    shuffle_rows: int = 1 << 18
    """Rows of a window of all slices, in which rows are permuted, at most. Those of an epoch have one size. Part of the
    model."""

    balances: bool = False
    """Whether the samples of a training batch are dealt to its slices by cost (`balance`), for which a rank reads all
    of them."""

    rolling: tuple[Evaluation, ...] = ()
    """The evaluations of a run that trains a window of time and evaluates the next. Then nothing is held back."""

    grows: bool = False
    """Whether more rows may come behind those that `held` is of. Then `rolling` has the windows that are complete."""

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise DataError(f"order {self.order!r}; allowed: {', '.join(ORDERS)}")
        if self.order == "time" and self.epochs != 1:
            raise DataError(f"{self.epochs} epochs in order of time; allowed: 1")
        if not self.train_count >= self.batch_size:
            raise Incomplete(
                f"{self.name}: {self.train_count} training samples do not fill one batch of {self.batch_size}; "
                "give a smaller --batch-size, or more samples"
            )

    @property
    def sample_count(self) -> int:  # type: ignore[override]
        return self.held.rest + self.held.picked

    @property
    def train_count(self) -> int:  # type: ignore[override]
        return self.held.rest if self.validation is None else self.validation.rest

    @property
    def validation_count(self) -> int:  # type: ignore[override]
        return 0 if self.validation is None else self.validation.picked

    @property
    def eval_count(self) -> int:  # type: ignore[override]
        return self.held.picked

    @property
    def step_count(self) -> int:
        steps = super().step_count
        return min(steps, self.rolling[-1].steps) if self.rolling and not self.grows else steps

    # Numbers of batches where each evaluation has its own rows.

    @functools.cached_property
    def _rolling_steps(self) -> list[int]:
        return [one.steps for one in self.rolling]

    @functools.cached_property
    def _rolling_batches(self) -> list[int]:
        """The batches of evaluations before each one."""
        sizes = (self._regions(one.numbers[1] - one.numbers[0]).batches for one in self.rolling)
        return list(itertools.accumulate(sizes, initial=0))

    def evaluations(self, steps_done: int) -> int:
        if not self.rolling:
            return super().evaluations(steps_done)
        return bisect.bisect_right(self._rolling_steps, steps_done)

    def next_evaluation(self, steps_done: int) -> int:
        if not self.rolling:
            return super().next_evaluation(steps_done)
        place = bisect.bisect_left(self._rolling_steps, max(1, steps_done))
        return min([self.step_count, *self._rolling_steps[place : place + 1]])

    def waits(self, steps_done: int) -> bool:
        if not self.rolling:
            return super().waits(steps_done)
        is_last = steps_done == self.max_steps and steps_done <= self.rolling[-1].steps
        return self.grows and steps_done == self.step_count and not is_last

    def evaluates(self, steps_done: int) -> bool:
        if self.rolling and self.waits(steps_done):
            return steps_done in self._rolling_steps
        return super().evaluates(steps_done)

    def training_batch(self, step: int) -> int:
        if not self.rolling:
            return super().training_batch(step)
        return step + self._rolling_batches[self.evaluations(step)]

    def evaluation_batches(self, steps_done: int) -> range:
        if not self.rolling:
            return super().evaluation_batches(steps_done)
        after = self.next_evaluation(steps_done)
        begin = self.training_batch(after - 1) + 1
        first, end = self._evaluation(after).numbers
        return range(begin, begin + self._regions(end - first).batches)

    def evaluated(self, steps_done: int) -> str:
        return self._evaluation(steps_done).name if self.rolling else ""

    def _evaluation(self, steps: int) -> Evaluation:
        """That after these steps, or the next one. A run that ends inside of a window evaluates the next window."""
        place = bisect.bisect_left(self._rolling_steps, steps)
        return self.rolling[min(place, len(self.rolling) - 1)]

    # Samples of batches.

    def size(self, number: int) -> int:
        """The number of samples of the global batch."""
        phase, batch = self._find(number)
        return phase.layout.size(batch)

    def counts(self, number: int, world_size: int) -> list[int]:
        """The number of samples of each rank, those of its slices."""
        parts = (self.own_samples(number, rank, world_size) for rank in range(world_size))
        return [part.stop - part.start for part in parts]

    def chunk(self, number: int, rank: int, world_size: int) -> Chunk:
        """The chunk of a rank that has its samples of a batch."""
        own = Span(0, self.slices) if self.deals(number) else self._own(rank, world_size)
        phase, batch = self._find(number)
        begin = batch // phase.chunk_batches * phase.chunk_batches
        batches = range(begin, min(begin + phase.chunk_batches, phase.layout.batches))
        intervals = phase.layout.intervals(batches, own)
        step, behind = self.place(number)
        is_block = not behind and self.order != "shuffled" and len(batches) == phase.chunk_batches
        return Chunk(
            key=(phase.key, begin),
            part=phase.part,
            steps=step + 1 if behind else step - batch + begin,
            batches=len(batches),
            block=(begin * self.batch_size, batches.stop * self.batch_size) if is_block else None,
            intervals=tuple(found for one in intervals if one[0] < one[1] for found in phase.numbers(one)),
            places=lambda wanted: phase.layout.places(batches, own, self._find(wanted)[1]),
            following=phase.number(batches.stop),
        )

    def deals(self, number: int) -> bool:
        """Whether a chunk has all samples of this batch, which are still to be dealt."""
        return self.balances and not self.place(number)[1]

    def own_samples(self, number: int, rank: int, world_size: int) -> slice:
        """Where a rank's samples are in a batch, slice after slice."""
        own, size = self._own(rank, world_size), self.size(number)
        return slice(own.low * size // self.slices, own.high * size // self.slices)

    def ahead(self, number: int, rank: int, world_size: int) -> list[tuple[Chunk, bool]]:
        """The chunk that has a rank's samples of a batch, and those to read next, each with whether it is for training.

        In training, an evaluation that comes before the next chunk is read first.
        """
        step, behind = self.place(number)
        chunk = self.chunk(number, rank, world_size)
        following = chunk.following
        wanted = [(chunk, not behind)]
        if not behind:
            evaluation = self.evaluation_batches(step + 1).start
            if following is None or evaluation < following:
                wanted.append((self.chunk(evaluation, rank, world_size), False))
        if following is not None:
            wanted.append((self.chunk(following, rank, world_size), not behind))
        return wanted

    def training_part(self) -> Part:
        held, validation = self.held, self.validation
        if validation is None:
            return Part(held.rest, held.place_of_rest, lambda rows: ~held.is_picked(rows))

        def has(rows: Places) -> NDArray[np.bool_]:
            found = ~held.is_picked(rows)
            found[found] = ~validation.is_picked(held.number_in_rest(rows[found]))
            return found

        return Part(validation.rest, lambda number: held.place_of_rest(validation.place_of_rest(number)), has)

    def judged_part(self) -> Part:
        """The rows by which an evaluation is the best: those for validation, or else for evaluation."""
        return self._evaluation_part() if self.validation is None else self._validation_part()

    def _validation_part(self) -> Part:
        held, validation = self.held, self.validation
        assert validation is not None

        def has(rows: Places) -> NDArray[np.bool_]:
            found = ~held.is_picked(rows)
            found[found] = validation.is_picked(held.number_in_rest(rows[found]))
            return found

        return Part(validation.picked, lambda number: held.place_of_rest(validation.place_of_picked(number)), has)

    def _evaluation_part(self) -> Part:
        return Part(self.held.picked, self.held.place_of_picked, self.held.is_picked)

    def _own(self, rank: int, world_size: int) -> Span:
        if world_size > self.slices:
            raise DataError(f"{world_size} ranks; allowed: at most {self.slices}, the slices of a global batch")
        return leaves_of(rank, world_size, self.slices)

    def _find(self, number: int) -> tuple[_Phase, int]:
        """The phase that a batch is of, and its number there."""
        step, behind = self.place(number)
        if not behind:
            epoch, batch = divmod(step, self.steps_per_epoch)
            return self._training(epoch), batch
        begin, batch = number - behind + 1, behind - 1
        if self.rolling:
            return self._window(step + 1, begin), batch
        if batch < self.validation_batches:
            return self._held_back("validation", self._validation_part(), begin), batch
        cut = self.validation_batches
        return self._held_back("evaluation", self._evaluation_part(), begin + cut), batch - cut

    def _training(self, epoch: int) -> _Phase:
        steps, part = self.steps_per_epoch, self.training_part()

        def number(batch: int) -> int | None:
            step = epoch * steps + batch
            return self.training_batch(step) if step < self.step_count else None

        count = steps * self.batch_size
        if self.order != "shuffled":
            layout = _InOrder(count, self.batch_size, self.slices)
            return _Phase(f"epoch {epoch}", layout, part, _whole, number, self._chunk_batches)
        regions = self._regions(count, f"{self.seed}/shuffle/{epoch}")
        # A last window of few batches would have the rows of few blocks.
        windows = -(-steps // max(1, self.shuffle_rows // self.batch_size))
        return _Phase(f"epoch {epoch}", regions, part, _sequence(self, epoch).numbers, number, -(-steps // windows))

    def _held_back(self, name: str, part: Part, begin: int) -> _Phase:
        layout = self._regions(part.count)

        def number(batch: int) -> int | None:
            return begin + batch if batch < layout.batches else None

        return _Phase(name, layout, part, _whole, number, self._chunk_batches)

    def _window(self, steps: int, begin: int) -> _Phase:
        first, end = self._evaluation(steps).numbers
        layout = self._regions(end - first)
        return _Phase(
            f"window at {first}",
            layout,
            self.training_part(),
            lambda one: [(first + one[0], first + one[1])],
            lambda batch: begin + batch if batch < layout.batches else None,
            self._chunk_batches,
        )

    @property
    def _chunk_batches(self) -> int:
        return max(1, self.chunk_rows // self.batch_size)

    def _regions(self, count: int, key: str | None = None) -> _Regions:
        return _Regions(count, self.batch_size, self.slices, key)


@dataclass(frozen=True, slots=True)
class _Sequence:
    """The training numbers of all blocks, block after block in a permuted order."""

    first: Places
    """The first number of each block, in the permuted order."""

    ends: Places
    """Where each block ends in the sequence."""

    def numbers(self, places: Interval) -> list[Interval]:
        """The training numbers at these places of the sequence."""
        begin, end = places
        found = []
        block = int(np.searchsorted(self.ends, begin, side="right"))
        while begin < end:
            until = min(end, int(self.ends[block]))
            start = int(self.ends[block - 1]) if block else 0
            if begin < until:
                low = int(self.first[block]) + begin - start
                found.append((low, low + until - begin))
            begin, block = until, block + 1
        return found


@functools.lru_cache(maxsize=4)
def _sequence(order: StreamOrder, epoch: int) -> _Sequence:
    before = order.held.before(np.concatenate([[0], order.block_ends]))
    if order.validation is not None:
        before = order.validation.before(before)
    counts = np.diff(before)
    blocks = len(counts)
    shuffled = KeyedPermutation(blocks, f"{order.seed}/blocks/{epoch}")(np.arange(blocks))
    return _Sequence(first=before[:-1][shuffled], ends=np.cumsum(counts[shuffled]))


@functools.lru_cache(maxsize=64)
def _permutation(size: int, key: str) -> KeyedPermutation:
    return KeyedPermutation(size, key)
