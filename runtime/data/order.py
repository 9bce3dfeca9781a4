# SPDX-License-Identifier: Apache-2.0
"""The order in which a run sees its samples: a pure function of the data's size and the run's settings.

A run is one sequence of batches: in each epoch the training batches, cut from the epoch's own permutation of the
training rows, then the evaluation rows in batches; the last epoch may end early. Whoever knows the settings knows which
samples batch `n` of rank `r` holds, whether they lie in its own memory or are fed by another machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.samples import held_back, split
from sennit.runtime.data.seeds import numpy_stream

ORDER_VERSION: Final = 1
"""Raised when the same settings give another order, so that no run goes on in the middle of another one's order."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Batches count from 0 over the whole run, so that one which is resumed goes on with the number it stopped at."""

    name: str
    """Of the data set, for messages."""

    sample_count: int
    seed: int
    split: str
    """How evaluation rows are chosen: "random" or "last"."""

    eval_fraction: float
    batch_size: int
    """Samples of a global batch."""

    epochs: int
    max_steps: int | None = None
    train_count: int = field(init=False)
    eval_count: int = field(init=False)

    def __post_init__(self) -> None:
        eval_count = held_back(self.sample_count, self.eval_fraction)
        object.__setattr__(self, "eval_count", eval_count)
        object.__setattr__(self, "train_count", self.sample_count - eval_count)
        if not self.steps_per_epoch:
            raise DataError(
                f"{self.name}: {self.train_count} training samples do not fill one batch of {self.batch_size}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Training batches; what does not fill one is left out of the epoch."""
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
        """Of the whole run."""
        return self.evaluation_batches(self.step_count).stop

    def training_batch(self, step: int) -> int:
        """The batch of the step, counted from 0."""
        return step + step // self.steps_per_epoch * self.eval_batches

    def evaluation_batches(self, steps_done: int) -> range:
        """The batches of the evaluation at the end of the epoch, or of the run, that the last of these steps is in."""
        epoch = max(0, steps_done - 1) // self.steps_per_epoch
        begin = min((epoch + 1) * self.steps_per_epoch, self.step_count) + epoch * self.eval_batches
        return range(begin, begin + self.eval_batches)

    def next_batch(self, steps_done: int) -> int:
        """Where a run goes on after so many steps, the evaluation after them done or, at the run's end, not."""
        if steps_done < self.step_count:
            return self.training_batch(steps_done)
        return self.evaluation_batches(steps_done).start

    def size(self, number: int) -> int:
        """Samples of the global batch."""
        _, place = self._place(number)
        if place >= 0:
            return self.batch_size
        return min(self.batch_size, self.eval_count - (-1 - place) * self.batch_size)

    def counts(self, number: int, world_size: int) -> list[int]:
        """Samples of each rank's part: those of torch.tensor_split, which gives the first ranks one more."""
        least, more = divmod(self.size(number), world_size)
        return [least + (rank < more) for rank in range(world_size)]

    def rows(self, number: int) -> Tensor:
        """The global batch: int64 numbers of samples."""
        epoch, place = self._place(number)
        if place < 0:
            begin = (-1 - place) * self.batch_size
            return self.eval_rows[begin : begin + self.batch_size]
        begin = place * self.batch_size
        return self._shuffled(epoch)[begin : begin + self.batch_size]

    def part(self, number: int, rank: int, world_size: int) -> Tensor:
        """The rank's part of the global batch."""
        return torch.tensor_split(self.rows(number), world_size)[rank]

    @property
    def train_rows(self) -> Tensor:
        return self._split[0]

    @property
    def eval_rows(self) -> Tensor:
        return self._split[1]

    @cached_property
    def _split(self) -> tuple[Tensor, Tensor]:
        generator = numpy_stream(self.seed, "split")
        return split(self.sample_count, eval_fraction=self.eval_fraction, order=self.split, generator=generator)

    @cached_property
    def _permutations(self) -> dict[int, Tensor]:
        return {}

    def _shuffled(self, epoch: int) -> Tensor:
        """The training rows in the epoch's order. Two are kept: feeders work ahead, across the end of an epoch."""
        kept = self._permutations
        if epoch not in kept:
            shuffle = numpy_stream(self.seed, "order", epoch).permutation(self.train_count)
            if len(kept) == 2:
                del kept[min(kept)]
            kept[epoch] = self.train_rows[torch.from_numpy(shuffle)]
        return kept[epoch]

    def _place(self, number: int) -> tuple[int, int]:
        """(epoch, place): from 0 among its training batches, or from -1 downwards among those of its evaluation."""
        if not 0 <= number < self.batch_count:
            raise DataError(f"batch {number}; allowed: 0 to {self.batch_count - 1}")
        epoch, place = divmod(number, self.steps_per_epoch + self.eval_batches)
        steps = min(self.steps_per_epoch, self.step_count - epoch * self.steps_per_epoch)
        return epoch, place if place < steps else steps - 1 - place
