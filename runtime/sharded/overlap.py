# SPDX-License-Identifier: Apache-2.0
"""Lookups and updates of tables for autograd: in the caller's thread, or beside it in another thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.sharded.sent import Pending, RunBeside, Running, Sent
from sennit.runtime.sharded.table_steps import TableSteps
from sennit.transport.errors import ArgumentError


def _own(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same memory as tensors that are no views. Autograd refuses operators that write to views of several results.

    Each result has a part of its own of what arrived, and backward passes need none of it.
    """
    return tuple(one.detach() for one in results)


class Lookup(torch.autograd.Function):
    """Looks a step up. Its backward pass updates the rows."""

    @staticmethod
    def forward(
        context: Any, anchor: Tensor, steps: TableSteps, step: Any, weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        context.steps, context.step, context.is_over = steps, step, False
        return _own(steps.look_up(step))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        steps: TableSteps = context.steps
        if context.is_over and steps.has_files:
            raise ArgumentError("a second backward pass, but rows are in files and may have left memory; allowed: one")
        context.is_over = True
        with steps.wire.phase("sparse update"):
            bad, of_weights = steps.update(context.step, gradients, steps.rates())
        steps.bad = bad or steps.bad
        return torch.empty(0), None, None, of_weights


class Arrive(torch.autograd.Function):
    """Takes over what another thread has looked up. Its backward pass hands the gradients over, and does not wait."""

    @staticmethod
    def forward(
        context: Any, anchor: Tensor, update: Callable[[Sequence[Tensor]], None], found: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        context.update, context.is_over = update, False
        return _own(found)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if context.is_over:
            raise ArgumentError("a second backward pass of a lookup in another thread; allowed: one")
        context.is_over = True
        context.update(gradients)
        return torch.empty(0), None, None


class Beside:
    """Lookups and updates in another thread, in the order in which they begin (`ShardedTables.overlap`)."""

    def __init__(self, steps: TableSteps, run: RunBeside, group: dist.ProcessGroup | None) -> None:
        self._steps, self._run, self._group = steps, run, group
        # An update waits for the one before it, and raises its error.
        self._update: Running | None = None
        self._lookup: Running | None = None
        self._untold: list[Running] = []

    @property
    def looks_ahead(self) -> bool:
        """Whether a batch may be looked up before its step. Not with files: they are copied while no rows are used."""
        return not self._steps.has_files

    def look_up(self, sent: Sent) -> tuple[Tensor, ...] | None:
        """Looks up a batch that no call has taken yet, in the caller's thread.

        Returns None if weights require gradients: then the call itself has to look the batch up.
        """
        return None if self._steps.weights(sent.step) is not None else self._found(sent.step)

    def has_begun(self, lookup: Running) -> None:
        """A thread runs `look_up`, or will."""
        self._lookup = lookup

    def pending(self, step: Any, lookup: Running | None) -> Pending:
        """The results of a step. `lookup`: its lookup, if it has begun already; else it begins here."""
        if lookup is None:
            self.finish()
            lookup = self._run("lookup", lambda: self._found(step))
            self.has_begun(lookup)
        running, steps = lookup, self._steps

        def wait() -> dict[str, Tensor]:
            with steps.wire.phase("wait for lookup"):
                found = running.result()
            results = Arrive.apply(steps.anchor, lambda given: self._begin_update(step, given), found)  # type: ignore[no-untyped-call]
            return dict(zip(steps.feature_names, results, strict=True))

        return Pending(wait)

    def _found(self, step: Any) -> tuple[Tensor, ...]:
        with torch.no_grad(), self._steps.wire.over(self._group):
            return self._steps.look_up(step)

    def _begin_update(self, step: Any, gradients: Sequence[Tensor]) -> None:
        steps, before = self._steps, self._update
        rates = steps.rates()

        def update() -> GradientError | None:
            if before is not None:
                before.result()
            with torch.no_grad(), steps.wire.over(self._group), steps.wire.phase("sparse update"):
                return steps.update(step, gradients, rates)[0]

        self._update = self._run("sparse update", update)
        self._untold.append(self._update)

    def untold(self) -> list[Running]:
        """The updates that began since the last call. The result of each is its `GradientError`, or None."""
        found, self._untold = self._untold, []
        return found

    def finish(self) -> None:
        """Waits for lookups and updates. Raises errors of updates. The use of a lookup's result raises its error."""
        if self._lookup is not None and not self._lookup.is_done:
            with contextlib.suppress(Exception):
                self._lookup.result()
        if self._update is not None:
            running = not self._update.is_done
            with self._steps.wire.phase("wait for sparse update") if running else contextlib.nullcontext():
                self._update.result()
