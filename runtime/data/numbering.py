# SPDX-License-Identifier: Apache-2.0
"""The numbers of a run's batches: training batches, and the batches of evaluations between them.

Numbers say nothing of samples. So ranks of a fed run, which do not have the data, count as those that read them.
"""

from __future__ import annotations

import bisect
import math

from sennit.runtime.data.errors import DataError


class Numbering:
    """Numbers the batches of the whole run from 0, so that a resumed run continues with the number where it stopped.

    A subclass has these attributes, and says what is in a batch.
    """

    name: str
    """The name of the data set, for messages."""

    sample_count: int
    batch_size: int
    """Samples per global batch."""

    epochs: int
    max_steps: int | None
    eval_every: int | None
    """Steps from one evaluation to the next inside an epoch, counted from the first step of the run; None: no such."""

    train_count: int
    validation_count: int
    eval_count: int

    grows: bool = False
    """Whether more samples may come. Counts are then of those that are known, and neither the epoch nor the run ends
    with them."""

    def size(self, number: int) -> int:
        """The number of samples of the global batch."""
        raise NotImplementedError

    @property
    def steps_per_epoch(self) -> int:
        """Training batches per epoch. Samples that do not fill the last batch are left out of the epoch."""
        return self.train_count // self.batch_size

    @property
    def step_count(self) -> int:
        """Training batches of the run."""
        steps = self.steps_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    @property
    def validation_batches(self) -> int:
        """The first batches of each evaluation, which have the validation rows."""
        return -(-self.validation_count // self.batch_size)

    @property
    def eval_batches(self) -> int:
        """All batches of an evaluation."""
        return self.validation_batches + -(-self.eval_count // self.batch_size)

    @property
    def batch_count(self) -> int:
        """Batches of the whole run."""
        return self.evaluation_batches(self.step_count).stop

    def training_batch(self, step: int) -> int:
        """The training batch of a step. Steps count from 0."""
        return step + self.evaluations(step) * self.eval_batches

    def evaluations(self, steps_done: int) -> int:
        """The evaluations after these steps but that at the end of the run, unless it is the end of an epoch, too."""
        count = 0 if self.grows else steps_done // self.steps_per_epoch
        if self.eval_every is not None:
            both = 0 if self.grows else steps_done // math.lcm(self.steps_per_epoch, self.eval_every)
            count += steps_done // self.eval_every - both
        return count

    def next_evaluation(self, steps_done: int) -> int:
        """The steps after which the next evaluation follows, if it does not follow these (1 or more) themselves."""
        every = [] if self.grows else [self.steps_per_epoch]
        every += [] if self.eval_every is None else [self.eval_every]
        return min([self.step_count, *(-(-max(1, steps_done) // steps) * steps for steps in every)])

    def waits(self, steps_done: int) -> bool:
        """Whether it is not known yet what follows these steps: another one, or the end of the run."""
        return self.grows and steps_done == self.step_count != self.max_steps

    def evaluates(self, steps_done: int) -> bool:
        """Whether an evaluation follows these steps, as far as it is known."""
        if not steps_done or not self.waits(steps_done):
            return self.next_evaluation(steps_done) == steps_done
        return self.eval_every is not None and steps_done % self.eval_every == 0

    def evaluation_batches(self, steps_done: int) -> range:
        """The batches of the evaluation that follows these steps, or else of the next one."""
        begin = self.training_batch(self.next_evaluation(steps_done) - 1) + 1
        return range(begin, begin + self.eval_batches)

    def evaluated(self, steps_done: int) -> str:
        """What the evaluation after these steps is of, for people; empty if all evaluations have the same rows."""
        return ""

    def next_batch(self, steps_done: int, *, evaluates: bool = False) -> int:
        """The batch at which a run resumes after this many steps. `evaluates`: with the evaluation that follows them.

        At the end of the run, its evaluation is done again.
        """
        if steps_done < self.step_count and not evaluates:
            return self.training_batch(steps_done)
        return self.evaluation_batches(steps_done).start

    def place(self, number: int) -> tuple[int, int]:
        """(step, 0) for the training batch of a step, (step, n) for the n-th batch of the evaluation behind it, n from
        1. Raises DataError for a number outside the run.
        """
        if not 0 <= number < self.batch_count:
            raise DataError(f"batch {number}; allowed: 0 to {self.batch_count - 1}")
        step = bisect.bisect_right(range(self.step_count), number, key=self.training_batch) - 1
        return step, number - self.training_batch(step)
