# SPDX-License-Identifier: Apache-2.0
"""Forward and backward passes of tables for autograd: in the caller's thread, or beside it in another thread.

One backward pass is one optimizer step of the rows. The lookups that it reaches give their gradients to the owners of
rows one after the other, which is collective. When the last one has, owners update their rows, which is not.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sennit.runtime.backend.torch_versions import accumulates, at_end_of_backward, backward_pass, has_stepped
from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.sharded.accumulation import is_held, may_be_held, sums_over_slices
from sennit.runtime.sharded.sent import Done, Pending, RunBeside, Running, Sent
from sennit.runtime.sharded.table_steps import TableSteps, Told
from sennit.transport.errors import ArgumentError

LOOKUP: Final = "lookup"
GRADIENTS: Final = "sparse gradients"
UPDATE: Final = "sparse update"
"""What runs beside the caller. An update is the last of a step, and the next lookup may follow it at once."""


class LookedUp:
    """A lookup whose results are in a graph of autograd, and may get gradients."""

    def __init__(self, sent: Sent, number: int, steps: TableSteps) -> None:
        """`sent`: what it looks up. `number`: in the order of calls. `steps`: whose rows it has, as they are."""
        self.sent, self.number = sent, number
        self.changes, self.refills = steps.changes, steps.refills
        self.versions = 0 if sent.weights is None else steps.versions
        self.has_given = False
        self.made_in = backward_pass()
        """The backward pass that this lookup was made in, as activation checkpoints do; -1: none."""

        self.accumulates = accumulates()
        """Whether a DDP around the tables only accumulates gradients (`no_sync`)."""


class Lookup(torch.autograd.Function):
    """The results of a batch. Its backward pass gives their gradients to the owners of rows."""

    @staticmethod
    def forward(
        context: Any,
        anchor: Tensor,
        passes: Passes,
        looked: LookedUp,
        found: tuple[Tensor, ...],
        weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """`found`: what was looked up. `weights` are an argument because they get gradients."""
        context.set_materialize_grads(False)
        passes.begin(looked)
        context.passes, context.looked = passes, looked
        # The same memory as tensors that are no views. Autograd refuses operators that write to views of several
        # results. Each result has a part of its own of what arrived, and backward passes need none of it.
        return tuple(one.detach() for one in found)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor | None) -> tuple[None, None, None, None, Tensor | None]:
        return None, None, None, None, context.passes.give(context.looked, gradients)


class Passes:
    """The passes of a module's tables. `overlap` says whether lookups and updates run in another thread.

    There they run in the order in which they begin, which is the same on all ranks.
    """

    def __init__(self, steps: TableSteps) -> None:
        self._steps = steps
        self._run: RunBeside | None = None
        self._group: dist.ProcessGroup | None = None
        # An update waits for the one before it, and raises its error.
        self._update: Running | None = None
        self._lookup: Running | None = None
        # The lookup of the next batch, and what the program had written before it began. No update has begun since.
        self._ahead: tuple[Running, int] | None = None
        self._untold: list[Running] = []

        self.is_synchronised = True
        """Whether a backward pass takes a step at its end. If not, its gradients are kept for a later pass."""

        self._count = 0
        # Lookups in the other thread since the last backward pass that have given nothing yet.
        self._waiting: set[int] = set()
        # The backward pass that lookups have begun to give gradients in. It is over when its callback has come.
        self._pass: int | None = None
        # Its callback, which autograd keeps for as long as the pass runs, in whichever thread.
        self._at_end: Callable[[], Callable[[], None] | None] = lambda: None
        self._accumulates = self._is_due = self._has_taken = False
        # Whether a lookup of the pass has given gradients before the pass went through `SlicedReplicas`.
        self._gave_outside = False
        # Backward passes whose gradients are kept, and steps since `told`.
        self._kept = self._taken = 0
        steps.optimizer.on_zero_grad, steps.optimizer.on_step = self.forget, self.step

    def overlap(self, run: RunBeside | None, group: dist.ProcessGroup | None) -> None:
        """From now on `run` runs lookups and updates, over `group`; with None the caller's thread does.

        Waits for what runs now. Raises errors of updates, once.
        """
        try:
            self.finish()
        except Exception:
            self._untold = []
            raise
        finally:
            self._run, self._group = run, group
            self._lookup = self._update = self._ahead = None

    @property
    def looks_ahead(self) -> bool:
        """Whether a batch may be looked up before its step. Not with files: they are copied while no rows are used. Not
        with dynamic tables: which rows are given up depends on the steps before.
        """
        return self._run is not None and not self._steps.has_files and not self._steps.dynamic

    def told(self) -> Told:
        """What this rank tells all others in the call that begins now. It counts steps from here on."""
        self._steps.check_caller()
        self._forget_zeroed()
        taken, self._taken = self._taken, 0
        return Told(self._steps.optimizer.rates(), self._kept, taken, self._steps.take_multiplied())

    def look_up(self, sent: Sent) -> tuple[Tensor, ...] | None:
        """Looks up a batch that no call has taken yet, in the caller's thread.

        Returns None if weights require gradients: then the call itself has to look the batch up.
        """
        if sent.weights is not None:
            return None
        sent.versions = self._steps.versions
        return self._found(sent)

    def has_begun(self, lookup: Running) -> None:
        """A thread runs `look_up`, or will."""
        self._lookup = lookup
        self._ahead = lookup, self._steps.writes

    def results(self, sent: Sent) -> Mapping[str, Tensor]:
        """The results of a batch by feature."""
        steps, weights = self._steps, sent.weights
        self._check_pass()
        has_backward = torch.is_grad_enabled() and not (weights is None and steps.optimizer.are_frozen)
        if has_backward and steps.dynamic:
            rates = steps.optimizer.rates()
            # A rate of 0 leaves tables as they are, as a frozen table is left.
            sent.trained = frozenset(number for number, rate in enumerate(rates) if rate)
        steps.refills += not steps.dynamic <= sent.trained
        if self._run is not None and weights is None and has_backward:
            return self._pending(self._called(sent), self._run)
        self.finish()
        with torch.no_grad():
            found = steps.look_up(sent)
        if has_backward:
            return self._by_name(self._called(sent), found)
        steps.release(sent)
        return dict(zip(steps.feature_names, found, strict=True))

    def _called(self, sent: Sent) -> LookedUp:
        """A call asks for the results of a batch, and for gradients."""
        looked = LookedUp(sent, self._count, self._steps)
        self._count += 1
        return looked

    def _pending(self, looked: LookedUp, run: RunBeside) -> Pending:
        lookup = looked.sent.lookup
        if lookup is None or self._ahead != (lookup, self._steps.writes):
            # Or rows have changed since. All ranks know: updates and writes come in one order on all of them.
            self.finish()
            lookup = self._lookup = run(LOOKUP, lambda: self._found(looked.sent))
        elif lookup.is_done and looked.sent.versions != self._steps.versions:
            # Whoever takes a state waits for the lookup. Other ranks may have no such rows, so none can look up again.
            raise ArgumentError(
                "rows were written through the tensors of a state, after the next batch was looked up; allowed: with "
                "`load_state_dict` of this state afterwards, or `set_rows`, on all ranks"
            )
        running = lookup

        def wait() -> dict[str, Tensor]:
            with self._steps.wire.phase("wait for lookup"):
                found = running.result()
            return self._by_name(looked, found)

        return Pending(wait)

    def _by_name(self, looked: LookedUp, found: tuple[Tensor, ...]) -> dict[str, Tensor]:
        # The call was made with gradients. Whoever waits for its results first may do so to look at them alone.
        with torch.inference_mode(False), torch.enable_grad():
            weights = looked.sent.weights
            results = Lookup.apply(self._steps.anchor, self, looked, found, weights)  # type: ignore[no-untyped-call]
        return dict(zip(self._steps.feature_names, results, strict=True))

    def _found(self, sent: Sent) -> tuple[Tensor, ...]:
        with torch.no_grad(), self._steps.wire.over(self._group):
            return self._steps.look_up(sent)

    def _check_pass(self) -> None:
        """Before a lookup. A backward pass may have begun to give gradients."""
        self._end_failed()
        if self._pass is not None and self._has_taken and backward_pass() >= 0:
            raise ArgumentError(
                "a lookup in a backward pass that has updated rows already; allowed: lookups outside of activation "
                "checkpoints, or checkpoints with use_reentrant=False"
            )

    def _end_failed(self) -> None:
        """Forgets the gradients of a backward pass that is not running any more, but did not end.

        This thread may look rows up, as for an evaluation, while another one runs the pass.
        """
        if self._pass is not None and backward_pass() < 0 and self._at_end() is None:
            self._give_up()

    def _give_up(self) -> None:
        """Forgets the gradients of a backward pass that has failed: it did not come to its end."""
        self._pass = None
        self.finish()
        self._steps.drop(all_of_them=False)

    def begin(self, looked: LookedUp) -> None:
        """Autograd has got the results of a lookup."""
        if looked.made_in >= 0:
            # A checkpoint's own backward pass may end before the one around it.
            self._enter(looked.made_in)
        if self._run is not None:
            self._waiting.add(looked.number)

    def _enter(self, current: int) -> None:
        """Backward pass `current`, which this thread runs, takes a step at its end."""
        if self._pass == current:
            return
        if self._pass is not None:
            self._give_up()
        self._forget_zeroed()
        self._pass = current
        self._accumulates = self._is_due = self._has_taken = False
        self._gave_outside = False
        at_end = functools.partial(self._end, current)
        self._at_end = weakref.ref(at_end)
        at_end_of_backward(at_end)

    def _forget_zeroed(self) -> None:
        """`zero_grad` of a model or an optimizer of the program forgets what is kept."""
        if self._kept and self._steps.optimizer.were_zeroed:
            self.forget()

    def give(self, looked: LookedUp, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Gives the gradients of a lookup's results to the owners of rows. Returns those of weights that require some.

        Does not wait for an exchange in another thread, but where there are such weights.
        """
        steps, sent = self._steps, looked.sent
        if looked.has_given and self._run is not None:
            raise ArgumentError("a second backward pass of a lookup in another thread; allowed: one")
        if looked.has_given and steps.has_files:
            raise ArgumentError("a second backward pass, but rows are in files and may have left memory; allowed: one")
        current = looked.made_in if looked.made_in == self._pass else backward_pass()
        self._enter(current)
        if self._has_taken:
            raise ArgumentError(
                "a loss of a lookup made before the last backward pass and of one made after it, with lookups in "
                "another thread; allowed: lookups since the last backward pass"
            )
        is_new, looked.has_given = looked.number in self._waiting, True
        self._waiting.discard(looked.number)
        self._accumulates |= looked.accumulates

        has_weights = sent.weights is not None
        is_kept = self._accumulates or not self.is_synchronised
        in_slices = sums_over_slices(backward_pass())
        self._gave_outside |= not in_slices

        def give() -> Tensor | None:
            has_rows = steps.dynamic <= sent.trained or steps.refills == looked.refills
            are_same = (steps.changes, steps.versions) == (looked.changes, looked.versions)
            if has_weights and not (has_rows and are_same):
                raise ArgumentError(
                    "gradients of weights, for which the rows of their lookup are needed; they have changed since; "
                    "allowed: no step, load or `set_rows` between a lookup and its backward pass, and no other lookup "
                    "of a frozen dynamic table"
                )
            return steps.give(sent, looked.number, gradients, is_kept=is_kept, in_slices=in_slices)

        if is_new and not self._waiting and not has_weights and not may_be_held():
            # Nothing else can give in this pass, so rows are updated while the pass goes on.
            self._take(current, give)
            return None
        self._is_due = True
        running = self._then(GRADIENTS, give)
        found: Tensor | None = running.result() if has_weights else None
        return found

    def _end(self, number: int) -> None:
        """The backward pass has ended."""
        if self._pass != number:
            raise ArgumentError("a backward pass inside another one, both of which reach lookups; allowed: one of them")
        self._pass = None
        self._waiting.clear()
        if self._gave_outside and sums_over_slices(number) and self._steps.gradients_are != "sum":
            self._give_up()
            raise ArgumentError(
                "gradients of a lookup came before the backward pass went through SlicedReplicas, whose losses add up; "
                'allowed: gradients="sum"'
            )
        if self._is_due:
            self._take(number)
        self._steps.optimizer.leave_gradients()
        if self._steps.optimizer.scaler is not None:
            # After a DDP around has set the gradients of parameters, those of tables too.
            at_end_of_backward(self._tell_scaler)

    def _tell_scaler(self) -> None:
        self.finish()
        self._steps.optimizer.tell_scaler(is_finite=self._steps.was_finite)

    def _take(self, number: int, give: Callable[[], object] | None = None) -> None:
        """Takes the step of backward pass `number` when its last lookup `give`s; or keeps its gradients for later."""
        self._is_due = False
        is_kept = not self.is_synchronised or self._accumulates or is_held(number)
        self._has_taken = not is_kept
        self._count_pass(is_kept)
        finish = self._steps.settle if is_kept else self._taking()

        def take() -> GradientError | None:
            if give is not None:
                give()
            return finish()

        # Rows that `step` may still change are not looked up ahead.
        self._untold.append(self._then(GRADIENTS if is_kept else UPDATE, take))

    def _count_pass(self, is_kept: bool) -> None:
        self._kept, self._taken = (self._kept + 1, self._taken) if is_kept else (0, self._taken + 1)

    def _taking(self) -> Callable[[], GradientError | None]:
        """Takes a step with the rates and the scale of now."""
        steps, optimizer = self._steps, self._steps.optimizer
        has_stepped(optimizer)
        rates, scale = optimizer.rates(), 1.0 if optimizer.scaler is None else optimizer.scaler.get_scale()
        steps.check_rates(rates)
        return functools.partial(steps.take, rates, scale=scale)

    def step(self) -> None:
        """Takes a step with the gradients that backward passes have kept, if there are any. Not collective."""
        self._end_failed()
        if self._kept:
            self._count_pass(is_kept=False)
            self._untold.append(self._then(UPDATE, self._taking()))

    def why_no_norm(self) -> ArgumentError | None:
        """What is wrong with a call of `norm`. Not collective."""
        self._end_failed()
        if self._kept:
            return None
        return ArgumentError(
            "gradients that have updated their rows in the backward pass; allowed: those of a pass inside `no_sync`"
        )

    def norm(self) -> float:
        """The 2-norm of the gradients that backward passes have kept, without the scale of a scaler. Collective.

        Call `finish` before.
        """
        scaler = self._steps.optimizer.scaler
        return math.sqrt(self._steps.squared_norm()) / (1.0 if scaler is None else scaler.get_scale())

    def _then(self, name: str, call: Callable[[], Any]) -> Running:
        """Calls a part of an update, after those before it."""
        before, steps = self._update, self._steps

        def update() -> Any:
            if before is not None:
                before.result()
            with torch.no_grad(), steps.wire.over(self._group), steps.wire.phase("sparse update"):
                try:
                    return call()
                except Exception:
                    # What a pass has given is in no step, also if it has ended meanwhile.
                    steps.drop(all_of_them=False)
                    raise

        if name == UPDATE:
            self._ahead = None
        self._update = Done(update()) if self._run is None else self._run(name, update)
        return self._update

    def forget(self) -> None:
        """Forgets all gradients that no step has taken yet, as `zero_grad` does."""
        if self._kept or self._pass is not None:
            self.finish()
            self._kept = 0
            self._steps.drop(all_of_them=True)

    def errors(self) -> Callable[[], GradientError | None]:
        """Returns a function that waits for the updates which began since the last call, and says what was wrong.

        Another thread may call it.
        """
        untold, self._untold = self._untold, []
        return lambda: next((bad for update in untold if (bad := update.result()) is not None), None)

    def finish(self) -> None:
        """Waits for lookups and updates. Raises errors of updates. The use of a lookup's result raises its error."""
        self._steps.check_caller()
        if self._lookup is not None and not self._lookup.is_done:
            with contextlib.suppress(Exception):
                self._lookup.result()
        update, self._update = self._update, None  # An error is raised once.
        if update is not None:
            running = not update.is_done
            with self._steps.wire.phase("wait for sparse update") if running else contextlib.nullcontext():
                update.result()
