# SPDX-License-Identifier: Apache-2.0
"""Sharded embedding tables without pooling, as a module for any model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.sharded.accumulation import Given
from sennit.runtime.sharded.engines import Engines
from sennit.runtime.sharded.features import Outgoing
from sennit.runtime.sharded.module import ShardedTables
from sennit.runtime.sharded.rows import Asked, Node, RowExchange
from sennit.runtime.sharded.shards import Rates
from sennit.runtime.sharded.table_steps import TableSteps
from sennit.runtime.sharded.wire import Wire
from sennit.transport.errors import ArgumentError


class SequenceSteps(TableSteps):
    """Steps whose results are the rows of ids."""

    poolings = (Pooling.NONE,)

    def connect(self, engines: Sequence[Engines]) -> None:
        super().connect(engines)
        self._sequences = [Sequences(one) for one in engines]

    def send(self, given: Any, global_batch: int | None, rates: Rates) -> _Step:
        def prepared(ids: Outgoing) -> list[list[int]]:
            if ids.weights is not None:
                raise ArgumentError("weights for ids that are not pooled; allowed: none")
            return [[]] * self.slices.world_size

        ids, batch, _ = self.agreed(given, global_batch, rates, prepared, 0)
        return _Step(
            parts=[sequences.send(ids, batch) for sequences in self._sequences],
            counts=ids.given_lengths.sum(1, dtype=torch.int64).tolist(),
            kept={feature: kept.nonzero().view(-1).to(self.device) for feature, kept in ids.kept.items()},
        )

    def fetch(self, step: _Step) -> None:
        for sequences, one in zip(self._sequences, step.parts, strict=True):
            sequences.fetch(one)

    def results(self, step: _Step) -> tuple[Tensor, ...]:
        found: dict[int, Tensor] = {}
        for sequences, one in zip(self._sequences, step.parts, strict=True):
            found |= sequences.by_lookup(one)
        for feature, kept in step.kept.items():
            rows = found[feature]
            found[feature] = rows.new_zeros(step.counts[feature], rows.shape[1]).index_copy_(0, kept, rows)
        return tuple(found[feature] for feature in range(len(self.features)))

    def result_rows(self, step: _Step) -> list[int]:
        return step.counts

    def exchange(self, step: _Step, gradients: Sequence[Tensor]) -> tuple[list[tuple[Given, Given | None]], None]:
        scaled = dict(enumerate(gradients))
        for feature, kept in step.kept.items():
            scaled[feature] = scaled[feature].index_select(0, kept)
        if self.divisor != 1:
            scaled = {feature: gradient / self.divisor for feature, gradient in scaled.items()}
        parts = zip(self._sequences, step.parts, strict=True)
        return [sequences.return_gradients(one, scaled) for sequences, one in parts], None

    def release(self, step: _Step) -> None:
        for sequences, one in zip(self._sequences, step.parts, strict=True):
            sequences.release(one)


class ShardedEmbeddings(ShardedTables):
    """Embedding tables in shards on all ranks; each id gives its row (sequences).

    A call returns float32 [ids, dim] by feature: the row of each id of this rank's samples, in the order of the ids. An
    ignored id (`Bounds.IGNORE`) has a row of zeros.
    Ids have no weights. A rank gets each distinct row once, and sends the sum of its gradients back once. Everything
    else is as in `ShardedEmbeddingBags`.
    """

    _kind = SequenceSteps


class Sequences:
    """Lookups of rows in the tables of one `Engines`. Exchanges are collective."""

    def __init__(self, engines: Engines) -> None:
        settings = engines.here
        self._engines = engines
        self._slices = settings.slices
        world, own = range(settings.slices.world_size), (settings.slices.rank,)
        self._sharded = RowExchange(
            settings, engines.sharded, engines.number_of, engines.features, world, settings.wire
        )
        alone = Wire(rank=0, world_size=1, group=None)
        self._replicated = RowExchange(
            settings, engines.replicated, engines.replica_of, engines.replicated_features, own, alone
        )

    def send(self, ids: Outgoing, global_batch: int) -> Step:
        """Asks the owners for the rows of this rank's ids."""
        sharded, replicated = self._sharded.nodes(ids, global_batch), self._replicated.nodes(ids, global_batch)
        return Step(
            sharded=sharded,
            asked=self._sharded.ask(sharded),
            replicated=replicated,
            replicas=self._replicated.ask(replicated),
        )

    def fetch(self, step: Step) -> None:
        """Waits for this rank's rows. Rows of replicated tables are always in memory. Not collective."""
        self._sharded.fetch(step.asked)

    def by_lookup(self, step: Step) -> dict[int, Tensor]:
        """The row of each id: float32 [ids, dim] by feature, on the device of the module."""
        found = self._sharded.by_lookup(step.sharded, step.asked)
        return self._engines.from_tables(found | self._replicated.by_lookup(step.replicated, step.replicas))

    def return_gradients(self, step: Step, gradients: dict[int, Tensor]) -> tuple[Given, Given | None]:
        """Sends the gradients of `by_lookup` to owners of rows. Returns those for this rank's shards and replicas."""
        gradients = self._engines.to_tables(gradients)
        asked = step.asked.announced
        sharded = Given(asked, asked.batch, self._sharded.sums(step.sharded, step.asked, gradients))
        replicated = None
        if self._replicated.has_tables:
            own = step.replicas.announced
            replicated = Given(own, own.batch, self._replicated.sums(step.replicated, step.replicas, gradients))
        return sharded, replicated

    def release(self, step: Step) -> None:
        """Ends a step without an update."""
        self._sharded.release(step.asked)
        self._replicated.release(step.replicas)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Rows that were asked for. They can be looked up, and may get gradients afterwards."""

    sharded: list[Node]
    asked: Asked
    replicated: list[Node]
    replicas: Asked


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A forward pass. A backward pass may follow."""

    parts: list[Step]
    """Of each of the engines."""

    counts: list[int]
    """The ids that were given of each feature: the rows of its result."""

    kept: dict[int, Tensor]
    """For each feature of which ids are ignored: int64 [ids that are looked up], their places in the result."""
