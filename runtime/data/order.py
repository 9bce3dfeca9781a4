# SPDX-License-Identifier: Apache-2.0
"""The order in which a run sees its samples: a pure function of the data's size and the run's settings.

A run is one sequence of batches. Each epoch has training batches, cut from its own permutation of the training rows,
and then the evaluation rows in batches. The last epoch may end early. The settings alone determine the samples of batch
`n` of rank `r`, whether they are in the rank's own memory or come from feeders.

A global batch is cut by the slices of the model (docs/reference/sharded.md), and a rank has the samples of its slices.

Permutations are keyed bijections (`KeyedPermutation`), so nobody holds a list of all rows, however many there are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sennit.offload.permutation import KeyedPermutation
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.samples import held_back
from sennit.transport.plans.tree import leaves_of

ORDER_VERSION: Final = 3
"""Incremented when the same settings give another order, so that no run resumes in the middle of a different order."""


SLICES_MAX: Final = 1 << 15
_ROWS_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderSettings:
    """The settings of a run that the order of samples depends on. Feeders get them as they are."""

    seed: int
    split: str
    eval_fraction: float
    batch_size: int
    epochs: int
    max_steps: int | None
    slices: int = 8

    def order(self, name: str, sample_count: int) -> Order:
        """The order of a data set's samples."""
        return Order(name=name, sample_count=sample_count, **asdict(self))


@dataclass(frozen=True, kw_only=True)
class Order:
    """Numbers the batches of the whole run from 0, so that a resumed run continues with the number where it stopped."""

    name: str
    """The name of the data set, for messages."""

    sample_count: int
    seed: int
    split: str = "random"
    """How evaluation rows are chosen: "random" or "last"."""

    eval_fraction: float
    batch_size: int
    """Samples per global batch."""

    epochs: int = 1
    max_steps: int | None = None
    slices: int = 8
    """The slices of the model that a global batch is cut by, a power of two. A world has at most as many ranks."""

    train_count: int = field(init=False)
    eval_count: int = field(init=False)

    def __post_init__(self) -> None:
        if self.split not in ("random", "last"):
            raise DataError(f"split {self.split!r}; allowed: random, last")
        if not 1 <= self.slices <= SLICES_MAX or self.slices & (self.slices - 1):
            raise DataError(f"{self.slices} slices; allowed: a power of two, 1 to {SLICES_MAX:,}")
        eval_count = held_back(self.sample_count, self.eval_fraction)
        object.__setattr__(self, "eval_count", eval_count)
        object.__setattr__(self, "train_count", self.sample_count - eval_count)
        if not self.steps_per_epoch:
            raise DataError(
                f"{self.name}: {self.train_count} training samples do not fill one batch of {self.batch_size}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Training batches per epoch. Samples that do not fill the last batch are left out of the epoch."""
        return self.train_count // self.batch_size

    @property
    def step_count(self) -> int:
        steps = self.steps_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    @property
    def eval_batches(self) -> int:
        return -(-self.eval_count // self.batch_size)

    @property
    def batch_count(self) -> int:
        """Batches of the whole run."""
        return self.evaluation_batches(self.step_count).stop

    def training_batch(self, step: int) -> int:
        """The training batch of a step. Steps count from 0."""
        return step + step // self.steps_per_epoch * self.eval_batches

    def evaluation_batches(self, steps_done: int) -> range:
        """The batches of the evaluation that follows the last of these steps, at the end of its epoch or of the run."""
        epoch = max(0, steps_done - 1) // self.steps_per_epoch
        begin = min((epoch + 1) * self.steps_per_epoch, self.step_count) + epoch * self.eval_batches
        return range(begin, begin + self.eval_batches)

    def next_batch(self, steps_done: int) -> int:
        """The batch at which a run resumes after this many steps.

        At the end of the run, its evaluation is done again.
        """
        if steps_done < self.step_count:
            return self.training_batch(steps_done)
        return self.evaluation_batches(steps_done).start

    def size(self, number: int) -> int:
        """The number of samples of the global batch."""
        _, place = self._place(number)
        if place >= 0:
            return self.batch_size
        return min(self.batch_size, self.eval_count - (-1 - place) * self.batch_size)

    def counts(self, number: int, world_size: int) -> list[int]:
        """The number of samples of each rank, those of its slices. Slices of a batch differ by one sample at most, and
        are empty where the batch has fewer samples.
        """
        parts = [self._samples(number, rank, world_size) for rank in range(world_size)]
        return [end - begin for begin, end in parts]

    def rows(self, number: int) -> Tensor:
        """The sample numbers of the global batch, int64."""
        return self._rows(number, 0, self.size(number))

    def part(self, number: int, rank: int, world_size: int) -> Tensor:
        """The sample numbers of this rank's part of the global batch."""
        return self._rows(number, *self._samples(number, rank, world_size))

    def is_training(self) -> Tensor:
        """Bool [sample_count]: True for training samples, False for evaluation samples."""
        mask = torch.ones(self.sample_count, dtype=torch.bool)
        for begin in range(self.train_count, self.sample_count, _ROWS_AT_ONCE):
            mask[self._split_rows(np.arange(begin, min(begin + _ROWS_AT_ONCE, self.sample_count)))] = False
        return mask

    def _samples(self, number: int, rank: int, world_size: int) -> tuple[int, int]:
        """The first of a rank's samples among those of the global batch, and the first behind them."""
        if world_size > self.slices:
            raise DataError(f"{world_size} ranks; allowed: at most {self.slices}, the slices of a global batch")
        span, size = leaves_of(rank, world_size, self.slices), self.size(number)
        return span.low * size // self.slices, span.high * size // self.slices

    def _rows(self, number: int, begin: int, end: int) -> Tensor:
        """A part of a global batch."""
        epoch, place = self._place(number)
        if place < 0:
            first = self.train_count + (-1 - place) * self.batch_size
            return self._split_rows(np.arange(first + begin, first + end))
        first = place * self.batch_size
        return self._split_rows(
            _shuffle(self.train_count, f"{self.seed}/order/{epoch}")(np.arange(first + begin, first + end))
        )

    def _split_rows(self, places: NDArray[np.int64]) -> Tensor:
        """Sample numbers by place in the split, which has training rows first and evaluation rows last."""
        if self.split == "random":
            places = _shuffle(self.sample_count, f"{self.seed}/split")(places)
        return torch.from_numpy(places)

    def _place(self, number: int) -> tuple[int, int]:
        """(epoch, place). Training batches have the places 0, 1, …; evaluation batches -1, -2, …"""
        if not 0 <= number < self.batch_count:
            raise DataError(f"batch {number}; allowed: 0 to {self.batch_count - 1}")
        epoch, place = divmod(number, self.steps_per_epoch + self.eval_batches)
        steps = min(self.steps_per_epoch, self.step_count - epoch * self.steps_per_epoch)
        return epoch, place if place < steps else steps - 1 - place


@lru_cache(maxsize=8)
def _shuffle(size: int, key: str) -> KeyedPermutation:
    """Cached for the permutations in use: the split, and the epochs in which feeders work."""
    return KeyedPermutation(size, key)
