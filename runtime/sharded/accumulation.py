# SPDX-License-Identifier: Apache-2.0
"""Gradients that wait for an optimizer step of their rows: those of several lookups, and of several backward passes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import MAX_SLICES, Batch
from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.sharded.batch_parts import chosen_blocks
from sennit.runtime.sharded.engines import Engines, groups_of
from sennit.runtime.sharded.exchange import Given
from sennit.runtime.sharded.replicated import SparseAllReduce
from sennit.runtime.sharded.shards import Announced, Rates, Shards
from sennit.runtime.sharded.tables import Shard
from sennit.transport.errors import ArgumentError


class Gradients:
    """The gradients that the tables of one `Engines` have got since their last step."""

    def __init__(self, engines: Engines) -> None:
        settings = engines.settings
        self._tables = frozenset(groups_of(settings.tables)[engines.group])
        self._sharded_of = {number: shard for shard, number in engines.number_of.items()}
        self._replica_of = {number: shard for shard, number in engines.replica_of.items()}
        self._sharded = Waiting(engines.sharded, settings.slices.count)
        self._replicated = Waiting(engines.replicated, settings.slices.count)
        self._sparse = SparseAllReduce(engines.replicated, settings.slices, settings.wire)

    @property
    def is_empty(self) -> bool:
        return self._sharded.is_empty and self._replicated.is_empty

    def add(self, lookup: int, tables: Collection[int], sharded: Given, replicated: Given | None = None) -> None:
        """Keeps the gradients of a lookup until `take`. Collective if there are `replicated` tables.

        `lookup`: its number in the order of calls. `tables`: those that the loss depends on, on whichever rank. If none
        is of this group, the group takes no step for this lookup. All engines of a group take as many.
        """
        if self._tables.isdisjoint(tables):
            self._sharded.forget(sharded.announced)
            return
        self._sharded.add(lookup, self._sharded.of_tables(sharded, tables))
        if replicated is None:
            return
        own = self._replicated.of_tables(replicated, tables)
        if own.batch.table_of_block:
            batch, gradient = self._sparse.of_all(own.batch, own.gradient, before=self._replicated.pooling)
            own = Given(own.announced, batch, gradient)
        self._replicated.add(lookup, own)

    def take(self, rates: Rates, *, factor: float) -> GradientError | None:
        """Takes one step with everything that was kept; none if that is nothing. Not collective.

        `rates`: of all tables. `factor`: what gradients are multiplied by. Returns what is wrong with gradients of this
        rank's rows.
        """
        bad = self._sharded.take(rates, factor=factor)
        return self._replicated.take(rates, factor=factor) or bad

    def squares(self, *, with_replicas: bool) -> Iterator[tuple[Shard, float]]:
        """The sum of the squares of the gradient of each shard here. Not for tensor trains."""
        for number, square in self._sharded.squares():
            yield self._sharded_of[number], square
        if with_replicas:
            for number, square in self._replicated.squares():
                yield self._replica_of[number], square

    def settle(self) -> None:
        """A backward pass has ended without a step. From now on only `drop(all_of_them=True)` forgets its gradients."""
        self._sharded.settle()
        self._replicated.settle()

    def drop(self, *, all_of_them: bool) -> None:
        """Forgets gradients: those of a backward pass that has not ended, or all."""
        self._sharded.drop(all_of_them=all_of_them)
        self._replicated.drop(all_of_them=all_of_them)


class Waiting:
    """The gradients of one engine's shards, lookup by lookup.

    Lookup m of a step has the slices from m · V on. So M lookups are summed as one batch of M · V slices, and the V
    slices of one lookup are a node of the tree.
    """

    def __init__(self, shards: Shards, slices: int) -> None:
        self._shards, self._slices = shards, slices
        self._kept: list[tuple[int, Given]] = []
        self._settled = 0

    @property
    def is_empty(self) -> bool:
        return not self._kept

    @property
    def pooling(self) -> Pooling | None:
        """How what is kept is pooled; None if that is nothing. Lookups of a step have to be alike."""
        return next((given.batch.pooling for _, given in self._kept if given.batch.table_of_block), None)

    def of_tables(self, given: Given, tables: Collection[int]) -> Given:
        """The blocks of these `tables`."""
        batch = given.batch
        places = [place for place, shard in enumerate(batch.table_of_block) if self._shards.tables[shard] in tables]
        if len(places) == len(batch.table_of_block):
            return given
        dims = [spec.dim for spec in self._shards.specs]
        return Given(given.announced, *chosen_blocks(batch, given.gradient, places, dims))

    def add(self, lookup: int, given: Given) -> None:
        if (len(self._kept) + 1) * self._slices > MAX_SLICES:
            raise ArgumentError(
                f"more than {len(self._kept)} lookups of {self._slices} slices in a step; allowed: {MAX_SLICES:,} "
                "slices in all"
            )
        self._kept.append((lookup, given))

    def _in_order(self) -> list[Given]:
        return [given for _, given in sorted(self._kept, key=lambda one: one[0])]

    def squares(self) -> Iterator[tuple[int, float]]:
        """The number of each shard in the engine, and the sum of the squares of its gradient."""
        if not self.is_empty:
            batch, gradient = _joined(self._in_order(), self._slices)
            if batch.table_of_block:
                for found in self._shards.engine.sum_rows(batch, gradient):
                    yield found.table, float(found.sums.double().square().sum())

    def take(self, rates: Rates, *, factor: float) -> GradientError | None:
        taken = [given._replace(batch=self._shards.current(given.announced, given.batch)) for given in self._in_order()]
        self._kept, self._settled = [], 0
        if not taken:
            return None
        try:
            batch, gradient = _joined(taken, self._slices)
            self._shards.update(batch, gradient if factor == 1 else gradient * factor, rate=rates)
        except GradientError as bad:
            return bad
        finally:
            for given in taken:
                self._shards.release(given.announced, is_dirty=True)
        return None

    def settle(self) -> None:
        self._settled = len(self._kept)

    def drop(self, *, all_of_them: bool) -> None:
        if all_of_them:
            self._settled = 0
        for _, given in self._kept[self._settled :]:
            self.forget(given.announced)
        del self._kept[self._settled :]

    def forget(self, announced: Announced) -> None:
        """Ends a lookup without an update."""
        self._shards.release(announced, is_dirty=False)


def _joined(lookups: Sequence[Given], slices: int) -> tuple[Batch, Tensor]:
    """One batch of the blocks of all lookups, with its gradient. Lookups without blocks add nothing."""
    found = [(number, given) for number, given in enumerate(lookups) if given.batch.table_of_block]
    if len(found) <= 1:
        _, batch, gradient = found[0][1] if found else lookups[0]
        return batch, gradient
    batches = [given.batch for _, given in found]
    weights = None
    if any(batch.weights is not None for batch in batches):
        # A weight of 1 changes no bit.
        of_batch = [(torch.ones_like(one.values, dtype=torch.float32), one.weights) for one in batches]
        weights = torch.cat([ones if given is None else given for ones, given in of_batch])
    return Batch(
        table_of_block=tuple(table for batch in batches for table in batch.table_of_block),
        bags_of_block=tuple(bags for batch in batches for bags in batch.bags_of_block),
        slice_of_block=tuple(
            number * slices + own for number, given in found for own in given.batch.slice_of_block or ()
        ),
        lengths=torch.cat([batch.lengths for batch in batches]),
        values=torch.cat([batch.values for batch in batches]),
        weights=weights,
        pooling=batches[0].pooling,
    ), torch.cat([given.gradient for _, given in found])


# The last backward passes that only accumulate, and those that sum over slices. Several threads may run some at a time.
_HELD: Final = deque[int](maxlen=64)
_SUMMED: Final = deque[int](maxlen=64)


def hold(backward_pass: int) -> None:
    """A backward pass only accumulates gradients: no table takes a step at its end."""
    _HELD.append(backward_pass)


# What may still call `hold`, while anything refers to it.
_HOLDERS: Final = weakref.WeakSet[object]()


def begin_holder(holder: object) -> None:
    """`holder` will call `hold` in the backward pass that reaches it, if one does."""
    _HOLDERS.add(holder)


def end_holder(holder: object) -> None:
    """The backward pass that `holder` has held is over."""
    _HOLDERS.discard(holder)


def may_be_held() -> bool:
    """Whether a backward pass may be held that is not held yet."""
    return bool(_HOLDERS)


def is_held(backward_pass: int) -> bool:
    """Whether `hold` was called for a backward pass."""
    return backward_pass in _HELD


def sum_over_slices(backward_pass: int) -> None:
    """The losses of all ranks add up to the loss of a backward pass, as those of `SlicedReplicas` do."""
    _SUMMED.append(backward_pass)


def sums_over_slices(backward_pass: int) -> bool:
    """Whether `sum_over_slices` was called for a backward pass."""
    return backward_pass in _SUMMED
