# SPDX-License-Identifier: Apache-2.0
"""Sharded embedding tables with pooling, as a module for any model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.sharded.accumulation import Given
from sennit.runtime.sharded.engines import Engines
from sennit.runtime.sharded.features import Outgoing
from sennit.runtime.sharded.module import ShardedTables
from sennit.runtime.sharded.owner import Arrived
from sennit.runtime.sharded.placement import alone
from sennit.runtime.sharded.pooled import Exchange, Packed
from sennit.runtime.sharded.shards import Rates
from sennit.runtime.sharded.slices import Slices
from sennit.runtime.sharded.table_steps import TableSteps
from sennit.runtime.sharded.wire import Wire
from sennit.transport.errors import ArgumentError

_KINDS: Final = ("no weights", "weights", "weights that require gradients")


class BagSteps(TableSteps):
    """Steps whose results are the pooled rows of bags."""

    poolings = (Pooling.SUM, Pooling.MEAN)

    def connect(self, engines: Sequence[Engines]) -> None:
        super().connect(engines)
        self._pools = [Pools(one) for one in engines]

    def send(self, given: Any, global_batch: int | None, rates: Rates) -> _Step:
        outgoing: list[tuple[Packed, Packed]] = []

        def prepared(ids: Outgoing) -> list[list[int]]:
            outgoing.extend(pools.outgoing(ids) for pools in self._pools)
            kind = _kind_of(ids.weights)
            return [[*(there.counts[rank] for there, _ in outgoing), kind] for rank in range(self.slices.world_size)]

        ids, batch, arriving = self.agreed(given, global_batch, rates, prepared, len(self._pools) + 1)
        for rank, (*_, kind) in enumerate(arriving):
            if kind != (own := _kind_of(ids.weights)):
                kinds = f"{_KINDS[own]} on rank {self.slices.rank}, {_KINDS[kind]} on rank {rank}"
                raise ArgumentError(f"{kinds}; all ranks must give the same")
        return _Step(
            arrivals=[
                pools.send(one, [row[number] for row in arriving], batch)
                for number, (pools, one) in enumerate(zip(self._pools, outgoing, strict=True))
            ],
            ids=ids,
            lengths={
                feature: ids.given_lengths[feature].clamp(min=1).to(torch.float32).unsqueeze(1).to(self.device)
                for feature, (_, table) in enumerate(self.features)
                if self.tables[table].pooling is Pooling.MEAN
            },
        )

    def fetch(self, step: _Step) -> None:
        for pools, arrivals in zip(self._pools, step.arrivals, strict=True):
            pools.fetch(arrivals)

    def results(self, step: _Step) -> tuple[Tensor, ...]:
        found: dict[int, Tensor] = {}
        for pools, arrivals in zip(self._pools, step.arrivals, strict=True):
            found |= pools.bags(arrivals, step.ids.sample_count)
        for feature, lengths in step.lengths.items():
            found[feature] = found[feature] / lengths
        return tuple(found[feature] for feature in range(len(self.features)))

    def result_rows(self, step: _Step) -> list[int]:
        return [step.ids.sample_count] * len(self.features)

    def weights(self, step: _Step) -> Tensor | None:
        return step.ids.weights if _kind_of(step.ids.weights) == 2 else None

    def exchange(
        self, step: _Step, gradients: Sequence[Tensor]
    ) -> tuple[list[tuple[Given, Given | None]], Tensor | None]:
        scaled: dict[int, Tensor] = {}
        for feature, gradient in enumerate(gradients):
            own = gradient if self.divisor == 1 else gradient / self.divisor
            lengths = step.lengths.get(feature)
            scaled[feature] = own if lengths is None else (torch.ones(()) / lengths) * own
        ids = step.ids if self.weights(step) is not None else None
        found: list[tuple[Given, Given | None]] = []
        of_weights: dict[int, Tensor] = {}
        for pools, arrivals in zip(self._pools, step.arrivals, strict=True):
            sharded, replicated, own_weights = pools.return_gradients(arrivals, scaled, weighted=ids)
            found.append((sharded, replicated))
            of_weights |= own_weights
        if ids is None:
            return found, None
        # A weight belongs to the loss of this rank alone, which is no mean over ranks.
        whole = torch.cat([of_weights[feature] for feature in range(len(self.features))]).mul_(self.divisor)
        return found, whole.to(ids.weights.device) if ids.weights is not None else whole

    def release(self, step: _Step) -> None:
        for pools, arrivals in zip(self._pools, step.arrivals, strict=True):
            pools.release(arrivals)


class ShardedEmbeddingBags(ShardedTables):
    """Embedding tables in shards on all ranks; each feature's ids of a sample are pooled.

    A call returns float32 [B, dim] by feature: the pooled rows of this rank's B samples. The result of a whole table is
    a part of what arrived, without a copy.

    The backward pass updates the rows that were used, with the tables' own optimizers (Mudigere et al., ISCA 2022,
    section 4.1): a gradient of a table never exists. All lookups that it reaches make one step of each row. Weights
    have the same bits in any world, with any placement and transport, if `gradients` is "sum" and the rest of the model
    works slice by slice (`SlicedReplicas`).
    """

    _kind = BagSteps


class Pools:
    """Pooled lookups in the tables of one `Engines`. Exchanges are collective."""

    def __init__(self, engines: Engines) -> None:
        settings = engines.settings
        self._engines = engines
        self._slices = settings.slices
        self._exchange = Exchange(
            settings.tables,
            engines.features,
            settings.placement,
            settings.slices,
            engines.sharded,
            engines.number_of,
            settings.wire,
        )
        self._local = Exchange(
            settings.tables,
            engines.replicated_features,
            alone(engines.replica_of),
            Slices(count=settings.slices.count, rank=0, world_size=1),
            engines.replicated,
            engines.replica_of,
            Wire(rank=0, world_size=1, group=None),
        )

    def outgoing(self, ids: Outgoing) -> tuple[Packed, Packed]:
        """This rank's ids: for the owners of shards, and for its own replicated tables. Not collective."""
        return self._exchange.outgoing(ids), self._local.outgoing(ids)

    def send(self, outgoing: tuple[Packed, Packed], counts: Sequence[int], global_batch: int) -> Arrivals:
        """Sends ids to their owners. `counts`: how many ids each rank sends to this one."""
        there, here = outgoing
        return Arrivals(
            sharded=self._exchange.send(there, counts, global_batch),
            replicated=self._local.owner.arrive(
                [self._exchange.source(self._slices.rank, global_batch)], here.lengths, here.values, here.weights
            ),
        )

    def fetch(self, arrivals: Arrivals) -> None:
        """Waits for this rank's rows. Rows of replicated tables are always in memory. Not collective."""
        self._exchange.owner.fetch(arrivals.sharded)

    def bags(self, arrivals: Arrivals, samples: int) -> dict[int, Tensor]:
        """Sums of bags by feature, [samples, dim], on the device of the module."""
        found = self._exchange.bags(self._exchange.answers(arrivals.sharded), samples)
        found |= self._local.bags(self._local.owner.answer(arrivals.replicated), samples)
        return self._engines.from_tables(found)

    def return_gradients(
        self, arrivals: Arrivals, gradients: dict[int, Tensor], *, weighted: Outgoing | None
    ) -> tuple[Given, Given | None, dict[int, Tensor]]:
        """Sends the gradients of `bags` to the owners of rows. Returns those for this rank's shards and its replicas.

        `weighted`: this rank's ids, if their weights require gradients. The gradients of those weights, [ids] by
        feature, come last.
        """
        gradients = self._engines.to_tables(gradients)
        arrived = self._exchange.return_gradients(arrivals.sharded, gradients)
        own = self._local.packed(gradients)
        of_weights = {}
        if weighted is not None:
            of_weights = self._exchange.weight_gradients(weighted, arrivals.sharded, arrived)
            of_weights |= self._local.weight_gradients(weighted, arrivals.replicated, own)
        sharded = Given(arrivals.sharded.announced, *self._exchange.owner.by_slice(arrivals.sharded, arrived))
        replicated = None
        if self._local.features:
            by_slice = self._local.owner.by_slice(arrivals.replicated, own)
            replicated = Given(arrivals.replicated.announced, *by_slice)
        return sharded, replicated, self._engines.from_tables(of_weights)

    def release(self, arrivals: Arrivals) -> None:
        """Ends a step without an update."""
        self._exchange.owner.release(arrivals.sharded)
        self._local.owner.release(arrivals.replicated)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """The ids of a step that this rank looks up."""

    sharded: Arrived
    replicated: Arrived


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A forward pass. A backward pass may follow."""

    arrivals: list[Arrivals]
    ids: Outgoing
    lengths: dict[int, Tensor]
    """Float32 [samples, 1] by feature, where the table takes means: what sums are divided by, at least 1."""


def _kind_of(weights: Tensor | None) -> int:
    """The index in `_KINDS`."""
    return 0 if weights is None else 1 + weights.requires_grad
