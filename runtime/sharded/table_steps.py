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
from torch import Tensor

from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.sharded.accumulation import Given, Gradients
from sennit.runtime.sharded.agreement import exchange_headers, rows_on_all
from sennit.runtime.sharded.engines import Engines
from sennit.runtime.sharded.features import Outgoing, features_of, ids_of
from sennit.runtime.sharded.optimizer import TableOptimizer
from sennit.runtime.sharded.sent import Refused
from sennit.runtime.sharded.shards import Rates
from sennit.runtime.sharded.tables import output_names, shards_of
from sennit.transport.errors import ArgumentError, ConfigError, Unsupported


class TableSteps(ABC):
    """The steps of a module's tables. A subclass decides whether a lookup gives sums of bags or rows.

    `send` makes a step, which the other methods take. Only the subclass knows what is in it.
    """

    poolings: ClassVar[tuple[Pooling, ...]]
    """What the tables may do with the rows of a bag."""

    def __init__(self, engines: Sequence[Engines], optimizer: TableOptimizer, *, divisor: int) -> None:
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
        counts: Callable[[Outgoing], Sequence[Sequence[int]]],
        width: int,
    ) -> tuple[Outgoing, int, list[list[int]]]:
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
