# SPDX-License-Identifier: Apache-2.0
"""Sharded embedding tables without pooling, as a module for any model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.sharded.accumulation import Steps
from sennit.runtime.sharded.engines import Engines
from sennit.runtime.sharded.features import Ids
from sennit.runtime.sharded.module import ShardedTables
from sennit.runtime.sharded.replicated import SparseAllReduce
from sennit.runtime.sharded.rows import Fetched, Node, RowExchange
from sennit.transport.errors import ArgumentError


class ShardedEmbeddings(ShardedTables):
    """Embedding tables in shards on all ranks; each id gives its row (sequences).

    A rank gets each distinct row once, and sends the sum of its gradients back once. Everything else is as in
    `ShardedEmbeddingBags`.
    """

    _poolings = (Pooling.NONE,)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sequences = [Sequences(engines) for engines in self._engines]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: Any, *, global_batch: int | None = None) -> dict[str, Tensor]:
        """Float32 [ids, dim] by feature: the row of each id of this rank's samples, in the order of the ids.

        Arguments and errors are those of `ShardedEmbeddingBags`. Ids have no weights.
        """

        def prepared(ids: Ids) -> list[list[int]]:
            if ids.weights is not None:
                raise ArgumentError("weights for ids that are not pooled; allowed: none")
            return [[]] * self.slices.world_size

        ids, batch, _ = self._agreed(features, global_batch, prepared)
        found: tuple[Tensor, ...] = _Lookup.apply(self._anchor[0], self, ids, batch)  # type: ignore[no-untyped-call]
        return dict(zip(self.feature_names, found, strict=True))

    def _fetch(self, ids: Ids, global_batch: int) -> list[Step]:
        return [sequences.fetch(ids, global_batch) for sequences in self._sequences]

    def _by_lookup(self, steps: Sequence[Step]) -> tuple[Tensor, ...]:
        found: dict[int, Tensor] = {}
        for sequences, step in zip(self._sequences, steps, strict=True):
            found |= sequences.by_lookup(step)
        return tuple(found[feature] for feature in range(len(self._features)))

    def _update(self, steps: Sequence[Step], gradients: Sequence[Tensor]) -> None:
        scaled = dict(enumerate(gradients))
        if self._divisor != 1:
            scaled = {feature: gradient / self._divisor for feature, gradient in scaled.items()}
        for number, (sequences, step) in enumerate(zip(self._sequences, steps, strict=True)):
            self._bad = sequences.update(step, scaled, rate=self._rate(number)) or self._bad


class Sequences:
    """Lookups of rows in the tables of one group of engines. Exchanges are collective."""

    def __init__(self, engines: Engines) -> None:
        settings = engines.settings
        self._slices = settings.slices
        world, own = range(settings.slices.world_size), (settings.slices.rank,)
        self._sharded = RowExchange(settings, engines.sharded, engines.number_of, engines.features, world)
        self._replicated = RowExchange(
            settings, engines.replicated, engines.replica_of, engines.replicated_features, own
        )
        self._steps = Steps(engines.sharded, settings.slices.count)
        self._replica_steps = Steps(engines.replicated, settings.slices.count)
        self._sparse = SparseAllReduce(engines.replicated, settings.slices, settings.wire)

    def fetch(self, ids: Ids, global_batch: int) -> Step:
        """Gets the rows of this rank's ids."""
        sharded, replicated = self._sharded.nodes(ids, global_batch), self._replicated.nodes(ids, global_batch)
        return Step(
            sharded=sharded,
            rows=self._sharded.fetch(sharded),
            replicated=replicated,
            replicas=self._replicated.fetch(replicated),
        )

    def by_lookup(self, step: Step) -> dict[int, Tensor]:
        """The row of each id: float32 [ids, dim] by feature."""
        found = self._sharded.by_lookup(step.sharded, step.rows)
        return found | self._replicated.by_lookup(step.replicated, step.replicas)

    def update(self, step: Step, gradients: dict[int, Tensor], *, rate: float | None) -> GradientError | None:
        """Takes one step from the gradients of `by_lookup`, or keeps them for it where `rate` is None.

        Returns what is wrong with gradients of this rank's rows.
        """
        arrived = self._sharded.sums(step.sharded, step.rows, gradients)
        error = self._steps.add(step.rows.batch, arrived, rate=rate)
        if not self._replicated.has_tables:
            return error
        own = self._replicated.sums(step.replicated, step.replicas, gradients)
        return self._replica_steps.add(*self._sparse.of_all(step.replicas.batch, own), rate=rate) or error


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Rows that were looked up, and may get gradients."""

    sharded: list[Node]
    rows: Fetched
    replicated: list[Node]
    replicas: Fetched


class _Lookup(torch.autograd.Function):
    """Rows by feature. Its backward pass is the optimizer step."""

    @staticmethod
    def forward(
        context: Any, anchor: Tensor, tables: ShardedEmbeddings, ids: Ids, global_batch: int
    ) -> tuple[Tensor, ...]:
        context.tables, context.steps = tables, tables._fetch(ids, global_batch)
        return tables._by_lookup(context.steps)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        context.tables._update(context.steps, gradients)
        return torch.empty(0), None, None, None
