# SPDX-License-Identifier: Apache-2.0
"""The order in which a run sees its samples: a pure function of the data's size and the run's settings.

A run is one sequence of batches. Each epoch has training batches, cut from its own permutation of the training rows.
After an epoch, after every so many steps if that is asked for, and at the end of the run an *evaluation* follows: the
validation rows in batches, if there are any, and then the evaluation rows. The last epoch may end early. The settings
alone determine the samples of batch `n` of rank `r`, whether they are in the rank's own memory or come from feeders.

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
from sennit.runtime.data.numbering import Numbering
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
    eval_every: int | None = None
    validation_fraction: float = 0.0

    def order(self, name: str, sample_count: int, eval_rows: int | None = None) -> Order:
        """The order of a data set's samples."""
        return Order(name=name, sample_count=sample_count, eval_rows=eval_rows, **asdict(self))


@dataclass(frozen=True, kw_only=True)
class Order(Numbering):
    """The order of samples in memory."""

    name: str
    """The name of the data set, for messages."""

    sample_count: int
    seed: int
    split: str = "random"
    """How evaluation rows, and then validation rows among the others, are chosen: "random" or "last"."""

    eval_fraction: float
    """The share of evaluation rows."""

    eval_rows: int | None = None
    """The data set's last rows that are its evaluation rows, whatever `eval_fraction` is. None: it says none itself."""

    validation_fraction: float = 0.0
    """The share of validation rows in what evaluation leaves. 0: there are none."""

    batch_size: int
    """Samples per global batch."""

    epochs: int = 1
    max_steps: int | None = None
    eval_every: int | None = None
    """Steps from one evaluation to the next inside an epoch, counted from the first step of the run; None: no such."""

    slices: int = 8
    """The slices of the model that a global batch is cut by, a power of two. A world has at most as many ranks."""

    train_count: int = field(init=False)
    validation_count: int = field(init=False)
    eval_count: int = field(init=False)

    def __post_init__(self) -> None:
        if self.split not in ("random", "last"):
            raise DataError(f"split {self.split!r}; allowed: random, last")
        if not 1 <= self.slices <= SLICES_MAX or self.slices & (self.slices - 1):
            raise DataError(f"{self.slices} slices; allowed: a power of two, 1 to {SLICES_MAX:,}")
        if self.eval_every is not None and self.eval_every < 1:
            raise DataError(f"evaluation every {self.eval_every} steps; allowed: 1 or more")
        eval_count = self.eval_rows
        if eval_count is None:
            eval_count = held_back("evaluation", self.sample_count, self.eval_fraction)
        elif not 0 < eval_count < self.sample_count:
            raise DataError(f"{self.name}: {eval_count} evaluation rows of {self.sample_count}; allowed: a part")
        rest = self.sample_count - eval_count
        validation_count = held_back("validation", rest, self.validation_fraction) if self.validation_fraction else 0
        object.__setattr__(self, "eval_count", eval_count)
        object.__setattr__(self, "validation_count", validation_count)
        object.__setattr__(self, "train_count", rest - validation_count)
        if not self.steps_per_epoch:
            raise DataError(
                f"{self.name}: {self.train_count} training samples do not fill one batch of {self.batch_size}"
            )

    def size(self, number: int) -> int:
        """The number of samples of the global batch."""
        _, behind = self.place(number)
        if not behind:
            return self.batch_size
        first, end = self._held_back(behind)
        return min(self.batch_size, end - first)

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
        step, behind = self.place(number)
        if behind:
            first, _ = self._held_back(behind)
            return self._split_rows(np.arange(first + begin, first + end))
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.batch_size
        return self._split_rows(
            _shuffle(self.train_count, f"{self.seed}/order/{epoch}")(np.arange(first + begin, first + end))
        )

    def _split_rows(self, places: NDArray[np.int64]) -> Tensor:
        """Sample numbers by place in the split, which has training rows first and evaluation rows last."""
        if self.split == "random":
            # Rows that the data set holds back itself stay where they are.
            count = self.sample_count - (self.eval_rows or 0)
            is_mixed = places < count
            places = places.copy()
            places[is_mixed] = _shuffle(count, f"{self.seed}/split")(places[is_mixed])
        return torch.from_numpy(places)

    def _held_back(self, behind: int) -> tuple[int, int]:
        """Where the batch of an evaluation begins in the split, and where its part ends: the validation rows or the
        evaluation rows.
        """
        number, middle = behind - 1, self.train_count + self.validation_count
        if number < self.validation_batches:
            return self.train_count + number * self.batch_size, middle
        return middle + (number - self.validation_batches) * self.batch_size, self.sample_count


@lru_cache(maxsize=8)
def _shuffle(size: int, key: str) -> KeyedPermutation:
    """Cached for the permutations in use: the split, and the epochs in which feeders work."""
    return KeyedPermutation(size, key)
