# SPDX-License-Identifier: Apache-2.0
"""Sharded embedding tables without pooling, as a module for any model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.sharded.accumulation import Steps
from sennit.runtime.sharded.engines import Engines
from sennit.runtime.sharded.features import Ids
from sennit.runtime.sharded.module import ShardedTables
from sennit.runtime.sharded.replicated import SparseAllReduce
from sennit.runtime.sharded.rows import Asked, Node, RowExchange
from sennit.runtime.sharded.table_steps import TableSteps
from sennit.runtime.sharded.wire import Wire
from sennit.transport.errors import ArgumentError


class SequenceSteps(TableSteps):
    """Steps whose results are the rows of ids."""

    poolings = (Pooling.NONE,)

    def connect(self, engines: Sequence[Engines]) -> None:
        super().connect(engines)
        self._sequences = [Sequences(one) for one in engines]

    @property
    def is_accumulating(self) -> bool:
        return any(sequences.is_accumulating for sequences in self._sequences)

    def send(self, given: Any, global_batch: int | None) -> list[Step]:
        def prepared(ids: Ids) -> list[list[int]]:
            if ids.weights is not None:
                raise ArgumentError("weights for ids that are not pooled; allowed: none")
            return [[]] * self.slices.world_size

        ids, batch, _ = self.agreed(given, global_batch, prepared, 0)
        return [sequences.send(ids, batch) for sequences in self._sequences]

    def fetch(self, step: Sequence[Step]) -> None:
        for sequences, one in zip(self._sequences, step, strict=True):
            sequences.fetch(one)

    def results(self, step: Sequence[Step]) -> tuple[Tensor, ...]:
        found: dict[int, Tensor] = {}
        for sequences, one in zip(self._sequences, step, strict=True):
            found |= sequences.by_lookup(one)
        return tuple(found[feature] for feature in range(len(self.features)))

    def result_size(self, step: Sequence[Step]) -> int:
        return sum(
            (piece.stop - piece.start) * self.tables[self.features[feature][1]].dim
            for one in step
            for node in (*one.sharded, *one.replicated)
            for feature, piece in node.lookups.pieces
        )

    def update(
        self, step: Sequence[Step], gradients: Sequence[Tensor], rates: Sequence[float | None]
    ) -> tuple[GradientError | None, None]:
        scaled = dict(enumerate(gradients))
        if self.divisor != 1:
            scaled = {feature: gradient / self.divisor for feature, gradient in scaled.items()}
        error: GradientError | None = None
        for number, (sequences, one) in enumerate(zip(self._sequences, step, strict=True)):
            error = sequences.update(one, scaled, rate=rates[number]) or error
        return error, None

    def release(self, step: Sequence[Step]) -> None:
        for sequences, one in zip(self._sequences, step, strict=True):
            sequences.release(one)


class ShardedEmbeddings(ShardedTables):
    """Embedding tables in shards on all ranks; each id gives its row (sequences).

    A call returns float32 [ids, dim] by feature: the row of each id of this rank's samples, in the order of the ids.
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
        self._steps = Steps(engines.sharded, settings.slices.count)
        self._replica_steps = Steps(engines.replicated, settings.slices.count)
        self._sparse = SparseAllReduce(engines.replicated, settings.slices, settings.wire)

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients are kept for a later update."""
        return self._steps.is_begun or self._replica_steps.is_begun

    def send(self, ids: Ids, global_batch: int) -> Step:
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

    def update(self, step: Step, gradients: dict[int, Tensor], *, rate: float | None) -> GradientError | None:
        """Updates rows by the gradients of `by_lookup`; where `rate` is None, keeps the gradients for a later update.

        Returns what is wrong with gradients of this rank's rows.
        """
        gradients = self._engines.to_tables(gradients)
        arrived = self._sharded.sums(step.sharded, step.asked, gradients)
        error = self._steps.add(step.asked.announced, step.asked.announced.batch, arrived, rate=rate)
        if not self._replicated.has_tables:
            return error
        own = self._replicated.sums(step.replicated, step.replicas, gradients)
        replicas = step.replicas.announced
        return self._replica_steps.add(replicas, *self._sparse.of_all(replicas.batch, own), rate=rate) or error

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
