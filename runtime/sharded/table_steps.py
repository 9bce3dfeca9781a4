# SPDX-License-Identifier: Apache-2.0
"""The steps of a module's tables: batches are sent and looked up, get gradients, and then their rows are updated.

A module takes steps in its caller's thread, and `overlap` takes them in another thread. Both use this class.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.sharded.accumulation import Given, Gradients
from sennit.runtime.sharded.agreement import exchange_headers, rows_on_all
from sennit.runtime.sharded.engines import Engines
from sennit.runtime.sharded.features import Ids, features_of, ids_of
from sennit.runtime.sharded.sent import Refused
from sennit.runtime.sharded.shards import Rates
from sennit.runtime.sharded.tables import Table, output_names, shards_of
from sennit.transport.errors import ArgumentError, ConfigError, Unsupported


class TableRates(torch.optim.Optimizer):
    """The learning rates of tables, which torch's schedulers can set: a parameter group for each table, in their order.

    A table is frozen while the parameter of its group requires no gradient. The backward pass updates rows. `step` and
    `zero_grad` are for gradients that it has kept (`no_sync`): `step` takes a step with them, `zero_grad` forgets them.
    """

    # `GradScaler.step` then calls `step` after an overflow, too. Meanwhile `found_inf` and `grad_scale` are set.
    _step_supports_amp_scaling = True
    found_inf: Tensor
    grad_scale: Tensor

    on_step: Callable[[], None] | None = None
    on_zero_grad: Callable[[], None] | None = None
    """What `step` and `zero_grad` call."""

    _scaler: torch.amp.GradScaler | None = None
    _has_left_gradients = False

    def __init__(self, tables: Sequence[Table], *, lr: float, device: torch.device) -> None:
        """`lr`: of tables that have none of their own. `device`: of the parameters, as a DDP takes one kind alone."""
        self.parameters = [nn.Parameter(torch.zeros(1, device=device)) for _ in tables]
        """What stands for each table (`TableParameters`)."""

        groups = [
            {"params": [parameter], "table": table.name, "lr": lr if table.lr is None else table.lr}
            for table, parameter in zip(tables, self.parameters, strict=True)
        ]
        super().__init__(groups, {"lr": lr})

    def rates(self) -> Rates:
        """What the next step would use."""
        return tuple(
            float(group["lr"]) if parameter.requires_grad else None
            for group, parameter in zip(self.param_groups, self.parameters, strict=True)
        )

    def freeze(self, number: int, frozen: bool) -> None:
        """Freezes a table, or ends it."""
        self.parameters[number].requires_grad_(not frozen)

    @property
    def are_frozen(self) -> bool:
        """Whether all tables are."""
        return not any(parameter.requires_grad for parameter in self.parameters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises `ArgumentError` once there is a group for each table."""
        if len(self.param_groups) == len(self.parameters):
            raise ArgumentError("a group of parameters for the optimizer of tables; allowed: none but those of tables")
        super().add_param_group(param_group)

    @property
    def were_zeroed(self) -> bool:
        """Whether the program has taken away all gradients that were left: `zero_grad` of a model or an optimizer."""
        return self._has_left_gradients and all(one.grad is None for one in self.parameters)

    def leave_gradients(self) -> None:
        """Gives parameters without a gradient one of 0: optimizers of the program keep no state for unused ones."""
        self._has_left_gradients = any(one.requires_grad for one in self.parameters)
        zeros = torch.zeros(len(self.parameters), 1, device=self.parameters[0].device).unbind()
        for parameter, zero in zip(self.parameters, zeros, strict=True):
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = zero

    def step(self, closure: Any = None) -> Any:
        """Raises `ArgumentError` if a `GradScaler` calls it and `scaler` is not set."""
        loss = None if closure is None else closure()
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and self._scaler is None:
            del self.found_inf, self.grad_scale
            raise ArgumentError(
                "a GradScaler that tables were not told of; set `embeddings.optimizer.scaler = scaler` before the "
                "first backward pass"
            )
        # After an overflow there is no step, and nothing of it is kept.
        call = self.on_step if found_inf is None or not float(found_inf) else self.on_zero_grad
        if call is not None:
            call()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.on_zero_grad is not None:
            self.on_zero_grad()

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales the losses. Tables divide their gradients by its scale. If the gradients of any rank are not
        finite, no rank takes the step."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise ArgumentError(f"a scaler of type {type(scaler).__name__}; allowed: a torch.amp.GradScaler, or None")
        self._scaler = scaler if scaler is None or scaler.is_enabled() else None

    def tell_scaler(self, *, is_finite: bool) -> None:
        """Leaves what `scaler.step` looks at: whether the gradients of the last step were finite."""
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, 0.0 if is_finite else torch.inf)


class TableSteps(ABC):
    """The steps of a module's tables. A subclass decides whether a lookup gives sums of bags or rows.

    `send` makes a step, which the other methods take. Only the subclass knows what is in it.
    """

    poolings: ClassVar[tuple[Pooling, ...]]
    """What the tables may do with the rows of a bag."""

    def __init__(self, engines: Sequence[Engines], optimizer: TableRates, *, divisor: int) -> None:
        """`divisor`: what gradients are divided by, so that they are averaged over ranks."""
        settings = engines[0].settings
        self.tables, self.slices, self.wire = settings.tables, settings.slices, settings.wire
        self.device = settings.device
        """Where results and gradients are."""

        self.divisor = divisor
        self.features = features_of(self.tables)
        self.feature_names = output_names(self.tables)
        """The names of the results, in the model's order."""

        self._alike: tuple[Rates, dict[str, str]] = (), {}
        self.was_finite = True
        """Whether the gradients of the last step, or of the next one, were finite on all ranks. Known only with a
        scaler."""

        self.anchor = torch.empty(0, requires_grad=True)
        """An argument of every lookup: autograd calls a backward pass only if an argument requires a gradient. It is no
        parameter, so DDP does not see it."""

        self.optimizer = optimizer
        self.changes = 0
        """How often rows have changed: the same on all ranks."""

        # Of the step that is to be taken: whether gradients are finite so far, those of passes that have ended and all;
        # and what clipping multiplies them by.
        self._were_finite = self._is_finite = True
        self._factor = 1.0
        self.connect(engines)

    def connect(self, engines: Sequence[Engines]) -> None:
        """Works on these engines from now on. A move of shards makes new ones."""
        settings = engines[0].settings
        self.engines = list(engines)
        self.gradients = [Gradients(one) for one in engines]
        self.has_files = bool(settings.homes.in_files(settings.tables, settings.placement.replicated))
        """Whether tables are in files, on whichever rank."""

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients are kept for a later step."""
        return not all(one.is_empty for one in self.gradients)

    @abstractmethod
    def send(self, given: Any, global_batch: int | None, rates: Rates) -> Any:
        """Sends the ids in `given` to the owners of their rows, and returns the step. Collective.

        `rates`: those of this rank. All ranks must have the same (`alike`).
        """

    def look_up(self, step: Any) -> tuple[Tensor, ...]:
        """Waits for rows on all ranks, and returns the float32 result of each feature. Collective.

        If a rank does not get its rows, the step ends on all ranks with an error.
        """
        with self.wire.phase("lookup"):
            if self.has_files:
                try:
                    rows_on_all(lambda: self.fetch(step), self.wire.group)
                except Exception:
                    self.release(step)
                    raise
            return self.results(step)

    @abstractmethod
    def fetch(self, step: Any) -> None:
        """Waits for this rank's rows of a step. Not collective."""

    @abstractmethod
    def results(self, step: Any) -> tuple[Tensor, ...]:
        """The result of each feature, where all ranks have fetched their rows. Collective."""

    @abstractmethod
    def result_rows(self, step: Any) -> list[int]:
        """The rows of the result of each feature."""

    def result_size(self, step: Any) -> int:
        """The number of floats in `results`."""
        rows = zip(self.result_rows(step), self.features, strict=True)
        return sum(count * self.tables[table].dim for count, (_, table) in rows)

    def weights(self, step: Any) -> Tensor | None:
        """The weights of this rank's ids, if they require gradients."""
        return None

    def alike(self, rates: Rates) -> dict[str, str]:
        """The settings that a rank tells all others in each call, because the program may change them at any time."""
        before, found = self._alike
        if before != rates:
            found = {
                f"table {table.name}": "frozen" if rate is None else f"lr {rate}"
                for table, rate in zip(self.tables, rates, strict=True)
            }
            self._alike = rates, found
        return found

    def give(self, step: Any, lookup: int, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Gives the gradients of `results` to the owners of rows, who keep them until `take`. Collective.

        `lookup`: the number of the lookup in the order of calls. A gradient is None if this rank's loss does not depend
        on the result. Tables on which no rank's loss depends take no step.

        Returns the gradients of `weights`, from the rows as they are. Raises `ArgumentError` on all ranks if their
        losses depend on different lookups.
        """
        flags = [*(one is not None for one in gradients), not self._are_finite(gradients), lookup, -lookup]
        told = self.wire.largest_of(torch.tensor(flags, dtype=torch.int64))
        rows = zip(gradients, self.result_rows(step), self.features, strict=True)
        whole = [
            torch.zeros(count, self.tables[table].dim, device=self.device) if one is None else one
            for one, count, (_, table) in rows
        ]
        found, of_weights = self.exchange(step, whole)
        *in_loss, is_bad, last, first = told().tolist()
        if last != -first:
            raise ArgumentError(
                f"a loss of lookup {lookup} (number 0 was the first); that of another rank depends on lookup "
                f"{last if lookup != last else -first} instead; allowed: the same on all ranks"
            )
        self._is_finite &= not is_bad
        tables = {table for (_, table), is_used in zip(self.features, in_loss, strict=True) if is_used}
        for one, (sharded, replicated) in zip(self.gradients, found, strict=True):
            one.add(lookup, tables, sharded, replicated)
        return of_weights

    def _are_finite(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether a scaler finds no overflow in the gradients of this rank. Without one nobody asks."""
        if self.optimizer.scaler is None:
            return True
        return all(bool(one.isfinite().all()) for one in gradients if one is not None)

    @abstractmethod
    def exchange(
        self, step: Any, gradients: Sequence[Tensor]
    ) -> tuple[list[tuple[Given, Given | None]], Tensor | None]:
        """Sends the gradients of `results` to the owners of rows. Collective.

        Returns what `Gradients.add` takes, for each of `engines`, and the gradients of `weights`.
        """

    def take(self, rates: Rates, *, scale: float = 1.0) -> GradientError | None:
        """Takes one step with all gradients that were given. Not collective.

        `rates`: of all tables. `scale`: what gradients are divided by. If they were not finite on any rank, and there
        is a scaler, no rank takes the step.

        Returns what is wrong with gradients of this rank's rows. Such rows are left as they were.
        """
        self.was_finite, self._is_finite, self._were_finite = self._is_finite, True, True
        self.changes += self.is_accumulating
        factor, self._factor = self._factor / scale, 1.0
        if not self.was_finite:
            self.drop(all_of_them=True)
        bad: GradientError | None = None
        for one in self.gradients:
            bad = one.take(rates, factor=factor) or bad
        return bad

    def settle(self) -> None:
        """Keeps all gradients for a later step."""
        self.was_finite = self._were_finite = self._is_finite
        for one in self.gradients:
            one.settle()

    def squared_norm(self) -> float:
        """The sum of the squares of the gradients that were given, of tables that are not frozen. Collective.

        The same bits in every world: each shard has a sum of its own, and these are added up in the model's order.
        Raises `Unsupported` on all ranks if there are tensor trains, whose rows are computed.
        """
        trains = [table.name for table in self.tables if table.train_rank is not None]
        if trains:
            raise Unsupported("the norm of gradients", f"table {trains[0]} is a tensor train")
        shards, rates = shards_of(self.tables), self.optimizer.rates()
        number_of = {shard: number for number, shard in enumerate(shards) if rates[shard.table] is not None}
        own = torch.zeros(len(shards), dtype=torch.float64)
        for one in self.gradients:
            # All ranks have the replicas, and one tells.
            for shard, square in one.squares(with_replicas=self.slices.rank == 0):
                if shard in number_of:
                    own[number_of[shard]] = square
        everyone = self.wire.all_gather("counts", own, [len(own)] * self.slices.world_size)
        return float(everyone.view(-1, len(own)).sum(0).sum()) * self._factor**2

    def multiply(self, factor: float) -> None:
        """Multiplies the gradients that were given. Not collective, but all ranks must do the same."""
        if self.is_accumulating:
            self._factor *= factor

    def drop(self, *, all_of_them: bool) -> None:
        """Forgets gradients: those of a backward pass that has not ended, or all. Not collective."""
        for one in self.gradients:
            one.drop(all_of_them=all_of_them)
        if not self.is_accumulating:
            self._were_finite, self._factor = True, 1.0
        self._is_finite = self._were_finite

    @abstractmethod
    def release(self, step: Any) -> None:
        """Ends a step without an update. Not collective."""

    def check_finite(self, rates: Rates) -> None:
        """Raises `ConfigError` for a rate that is not finite."""
        for table, rate in zip(self.tables, rates, strict=True):
            if rate is not None and not math.isfinite(rate):
                raise ConfigError(f"table {table.name}: lr {rate}; allowed: finite")

    def agreed(
        self,
        given: Any,
        global_batch: int | None,
        rates: Rates,
        counts: Callable[[Ids], Sequence[Sequence[int]]],
        width: int,
    ) -> tuple[Ids, int, list[list[int]]]:
        """Reads this rank's ids, and tells the other ranks that they are good. Collective.

        `counts` returns `width` numbers for each rank, which that rank is told. It may raise, as reading ids may.
        Returns the ids, the samples of all ranks, and the numbers that each rank told this one. Raises on all ranks if
        the input of one is bad, or if `rates` differ.
        """
        error: Exception | None = given.error if isinstance(given, Refused) else None
        batch, mine = 0, [[0] * width] * self.slices.world_size
        ids = None
        if error is None:
            try:
                self.check_finite(rates)
                ids = ids_of(given, self.tables)
                batch = self.slices.global_batch(ids.sample_count, global_batch)
                mine = [list(row) for row in counts(ids)]
            except Exception as bad:  # Any type, because the other ranks wait for this one.
                error = bad
        arriving = exchange_headers(error, batch, mine, self.wire.group, alike=self.alike(rates))
        assert ids is not None
        return ids, batch, arriving
