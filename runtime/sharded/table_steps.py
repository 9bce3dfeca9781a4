# SPDX-License-Identifier: Apache-2.0
"""The steps of a module's tables: a batch is sent and looked up, and then its rows are updated or released.

A module takes steps in its caller's thread, and `overlap` takes them in another thread. Both use this class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.sharded.agreement import exchange_headers, rows_on_all
from sennit.runtime.sharded.engines import Engines
from sennit.runtime.sharded.features import Ids, features_of, ids_of
from sennit.runtime.sharded.sent import Refused
from sennit.runtime.sharded.shards import Rates
from sennit.runtime.sharded.tables import Table, output_names


class TableRates(torch.optim.Optimizer):
    """The learning rates of tables, which torch's schedulers can set: a parameter group for each table, in their order.

    A table is frozen while the parameter of its group requires no gradient.
    `step` and `zero_grad` do nothing, because the backward pass has updated the rows.
    """

    def __init__(self, tables: Sequence[Table], *, lr: float) -> None:
        """`lr`: of tables that have none of their own."""
        groups = [
            {"params": [nn.Parameter(torch.empty(0))], "table": table.name, "lr": lr if table.lr is None else table.lr}
            for table in tables
        ]
        super().__init__(groups, {"lr": lr})

    def rates(self) -> Rates:
        """What the next backward pass would use."""
        return tuple(float(group["lr"]) if group["params"][0].requires_grad else None for group in self.param_groups)

    def freeze(self, number: int, frozen: bool) -> None:
        """Freezes a table, or ends it."""
        self.param_groups[number]["params"][0].requires_grad_(not frozen)

    @property
    def are_frozen(self) -> bool:
        """Whether all tables are."""
        return all(rate is None for rate in self.rates())

    def step(self, closure: Any = None) -> Any:
        return None if closure is None else closure()


class TableSteps(ABC):
    """The steps of a module's tables. A subclass decides whether a lookup gives sums of bags or rows.

    `send` makes a step, which the other methods take. Only the subclass knows what is in it.
    """

    poolings: ClassVar[tuple[Pooling, ...]]
    """What the tables may do with the rows of a bag."""

    def __init__(self, engines: Sequence[Engines], rates: TableRates, *, divisor: int) -> None:
        """`divisor`: what gradients are divided by, so that they are averaged over ranks."""
        settings = engines[0].settings
        self.tables, self.slices, self.wire = settings.tables, settings.slices, settings.wire
        self.device = settings.device
        """Where results and gradients are."""

        self.divisor = divisor
        self.features = features_of(self.tables)
        self.feature_names = output_names(self.tables)
        """The names of the results, in the model's order."""

        self.is_synchronised = True
        """Whether a backward pass updates rows. If not, its gradients are kept for a later pass."""

        self.bad: GradientError | None = None
        """What was wrong with gradients on this rank, until all ranks have been told."""

        self.anchor = torch.empty(0, requires_grad=True)
        """An argument of every lookup: autograd calls a backward pass only if an argument requires a gradient. It is no
        parameter, so DDP does not see it."""

        self._rates = rates
        self.connect(engines)

    def connect(self, engines: Sequence[Engines]) -> None:
        """Works on these engines from now on. A move of shards makes new ones."""
        settings = engines[0].settings
        self.engines = list(engines)
        self.has_files = bool(settings.homes.in_files(settings.tables, settings.placement.replicated))
        """Whether tables are in files, on whichever rank."""

    @property
    @abstractmethod
    def is_accumulating(self) -> bool:
        """Whether gradients are kept for a later pass."""

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
    def result_size(self, step: Any) -> int:
        """The number of floats in `results`."""

    def weights(self, step: Any) -> Tensor | None:
        """The weights of this rank's ids, if they require gradients."""
        return None

    def rates(self) -> list[Rates | None]:
        """The learning rates of this backward pass, for each of `engines`; None if the pass updates no rows."""
        return [self._rates.rates() if self.is_synchronised else None] * len(self.engines)

    def alike(self, rates: Rates) -> dict[str, str]:
        """The settings that a rank tells all others in each call, because the program may change them at any time."""
        return {
            f"table {table.name}": "frozen" if rate is None else f"lr {rate}"
            for table, rate in zip(self.tables, rates, strict=True)
        }

    @abstractmethod
    def update(
        self, step: Any, gradients: Sequence[Tensor], rates: Sequence[Rates | None]
    ) -> tuple[GradientError | None, Tensor | None]:
        """Updates rows by the gradients of `results`, and ends the step. Collective. `rates`: what `rates` returned.

        Returns what is wrong with gradients of this rank's rows, and the gradients of `weights`.
        """

    @abstractmethod
    def release(self, step: Any) -> None:
        """Ends a step without an update. Not collective."""

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
                ids = ids_of(given, self.tables)
                batch = self.slices.global_batch(ids.sample_count, global_batch)
                mine = [list(row) for row in counts(ids)]
            except Exception as bad:  # Any type, because the other ranks wait for this one.
                error = bad
        arriving = exchange_headers(error, batch, mine, self.wire.group, alike=self.alike(rates))
        assert ids is not None
        return ids, batch, arriving
