# SPDX-License-Identifier: Apache-2.0
"""The steps of a module's tables: batches are sent and looked up, get gradients, and then their rows are updated.

A module takes steps in its caller's thread, and `overlap` takes them in another thread. Both use this class.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sennit.runtime.backend.torch_versions import times_changed
from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.sharded.accumulation import Gradients
from sennit.runtime.sharded.agreement import exchange_headers, rows_on_all
from sennit.runtime.sharded.engines import Engines
from sennit.runtime.sharded.exchange import Arrived, Exchange, Given, Ready
from sennit.runtime.sharded.features import Outgoing, features_of, ids_of
from sennit.runtime.sharded.optimizer import TableOptimizer
from sennit.runtime.sharded.row_numbers import COUNTED
from sennit.runtime.sharded.sent import Refused, Sent
from sennit.runtime.sharded.shards import Evicted, Rates
from sennit.runtime.sharded.tables import output_names, shards_of
from sennit.runtime.sharded.telling import Telling
from sennit.transport.errors import ArgumentError, ConfigError, Unsupported

_KINDS: Final = ("no weights", "weights", "weights that require gradients")


class Told(NamedTuple):
    """What a rank tells all others in each call, because the program may change it at any time."""

    rates: Rates
    kept: int
    """Backward passes whose gradients are kept (`no_sync`)."""

    steps: int
    """Steps since the call before."""

    multiplied: float
    """What gradients were multiplied by since the call before."""


class TableSteps:
    """The steps of a module's tables, one for each batch that `send` sends."""

    def __init__(
        self,
        engines: Sequence[Engines],
        exchange: type[Exchange[Any]],
        optimizer: TableOptimizer,
        *,
        gradients: str | None,
    ) -> None:
        """`exchange`: whether a lookup gives sums of bags or rows. `gradients`: "mean", "sum", or None (`give`)."""
        settings = engines[0].settings
        self.tables, self.slices, self.wire = settings.tables, settings.slices, settings.wire
        self.device = settings.device
        """Where results and gradients are."""

        self._exchange = exchange
        self.gradients_are = gradients
        """What the gradients of ranks are of that of the loss: "mean", "sum", or None: `give` finds out."""

        self.features = features_of(self.tables)
        self.feature_names = output_names(self.tables)
        """The names of the results, in the model's order."""

        self.include_last_offset = False
        """Whether offsets of ids have one more, where the last sample ends."""

        self._alike: tuple[Told | None, dict[str, str]] = None, {}
        self.was_finite = True
        """Whether the gradients of the last step, or of the next one, were finite on all ranks. Known only with a
        scaler."""

        self._telling: Telling | None = None
        self._counted: dict[int, Counter[str]] = {}
        """What ids of dynamic tables have done here before their shards moved, by table."""
        self.engines: list[Engines] = []
        self.anchor = torch.empty(0, requires_grad=True)
        """An argument of every lookup: autograd calls a backward pass only if an argument requires a gradient. It is no
        parameter, so DDP does not see it."""

        self.optimizer = optimizer
        self.writes = 0
        """How often the program has written rows, by `set_rows` and loads: the same on all ranks."""

        self._updates = 0

        self.refills = 0
        """How often ids without rows may have got the rows of others, in lookups that do not train: as above."""

        # Of the step that is to be taken: whether gradients are finite so far, those of passes that have ended and all;
        # and what clipping multiplies them by.
        self._were_finite = self._is_finite = True
        self._factor = self._multiplied = 1.0
        self.connect(engines)

    def connect(self, engines: Sequence[Engines]) -> None:
        """Works on these engines from now on. A move of shards makes new ones."""
        settings = engines[0].settings
        for number, counts in self.id_counters().items():
            # A rank keeps what it has counted when rows go.
            self._counted[number] = Counter({name: counts[name] for name in COUNTED})
        self.engines = list(engines)
        self._exchanges = [self._exchange.of(one) for one in engines]
        self.gradients = [Gradients(one) for one in engines]
        self.has_files = bool(settings.homes.in_files(settings.tables, settings.placement.replicated))
        """Whether tables are in files, on whichever rank."""
        self.dynamic = frozenset(number for number, table in enumerate(settings.tables) if table.ids is not None)
        """Whether owners number the ids of a table when they look a batch up."""
        for one in self.engines:
            one.sharded.on_evicted(self._telling)

    def on_evicted(self, told: Callable[[Evicted], object] | None) -> None:
        """`Shards.on_evicted`, of all tables, also after a move."""
        self._telling = None if told is None else Telling(told)
        for one in self.engines:
            one.sharded.on_evicted(self._telling)

    def check_caller(self) -> None:
        """Raises `ArgumentError` in a function that hears of evicted rows."""
        if self._telling is not None:
            self._telling.check()

    def id_counters(self) -> dict[int, Counter[str]]:
        """`Shards.id_counters` of all tables, with what was counted before a move."""
        found = {number: Counter({"rows": 0, "used": 0, **counts}) for number, counts in self._counted.items()}
        for one in self.engines:
            for number, counts in one.sharded.id_counters().items():
                found.setdefault(number, Counter()).update(counts)
        return found

    def take_failure(self) -> Exception | None:
        """What the function of `on_evicted` has raised and nobody was told, once."""
        failures = [one.sharded.take_failure() for one in self.engines]
        return next((error for error in failures if error is not None), None)

    @property
    def changes(self) -> int:
        """How often rows have changed: the same on all ranks."""
        return self._updates + self.writes

    @property
    def versions(self) -> int:
        """How often torch has written to this rank's rows, as a program may do through the tensors of a state.

        0 if there are rows in files or dynamic tables, where lookups write to memory.
        """
        if self.has_files or self.dynamic:
            return 0
        all_shards = [shards for one in self.engines for shards in (one.sharded, one.replicated)]
        return sum(times_changed(one.engine.weight(name)) for one in all_shards for name in one.engine.names)

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients are kept for a later step."""
        return not all(one.is_empty for one in self.gradients)

    def send(self, given: Any, global_batch: int | None, told: Told) -> Sent:
        """Sends the ids in `given` to the owners of their rows. Collective.

        `told`: what this rank tells all others. Raises on all ranks if the input of one is bad, or if they do not tell
        the same (`alike`).
        """
        error: Exception | None = given.error if isinstance(given, Refused) else None
        mine = [[0] * (len(self._exchanges) + 2)] * self.slices.world_size
        outgoing: Outgoing | None = None
        ready: list[list[Ready]] = []
        if error is None:
            try:
                self.check_rates(told.rates)
                self.optimizer.check_groups()
                outgoing = ids_of(given, self.tables, include_last_offset=self.include_last_offset)
                sizes = self.slices.own_sizes(outgoing.sample_count, global_batch)
                ready = [[one.ready(outgoing, sizes) for one in exchanges] for exchanges in self._exchanges]
                kind = _kind_of(outgoing.weights)
                counts = zip(*(sharded.counts for sharded, *_ in ready), strict=True)
                mine = [[outgoing.sample_count, kind, *of_rank] for of_rank in counts]
            except Exception as bad:  # Any type, because the other ranks wait for this one.
                error = bad
        arriving = exchange_headers(error, global_batch, mine, self.wire.group, alike=self.alike(told))
        assert outgoing is not None
        batch = self.slices.batch_of([samples for samples, *_ in arriving], global_batch)
        for rank, (_, kind, *_) in enumerate(arriving):
            if kind != (own := _kind_of(outgoing.weights)):
                kinds = f"{_KINDS[own]} on rank {self.slices.rank}, {_KINDS[kind]} on rank {rank}"
                raise ArgumentError(f"{kinds}; all ranks must give the same")
        return Sent(
            self.engines,
            [
                [
                    sharded.send([row[place] for row in arriving], batch),
                    *(one.send(one.counts, batch) for one in replicated),
                ]
                for place, (sharded, *replicated) in enumerate(ready, start=2)
            ],
            lengths=outgoing.given_lengths,
            result_rows=self._exchange.result_rows(outgoing),
            weights=outgoing.weights if _kind_of(outgoing.weights) == 2 else None,
        )

    def look_up(self, sent: Sent) -> tuple[Tensor, ...]:
        """Waits for rows on all ranks, and returns the float32 result of each feature. Collective.

        If a rank does not get its rows, the step ends on all ranks with an error.
        """
        with self.wire.phase("lookup"):
            if self.has_files or self.dynamic:
                try:
                    rows_on_all(lambda: self._fetch(sent), self.wire.group)
                except Exception:
                    self.release(sent)
                    raise
                for exchange, arrived in self._parts(sent):
                    exchange.settle(arrived)
            return self._results(sent)

    def _parts(self, sent: Sent) -> Iterator[tuple[Exchange[Any], Arrived]]:
        for exchanges, arrived in zip(self._exchanges, sent.arrived, strict=True):
            yield from zip(exchanges, arrived, strict=True)

    def _fetch(self, sent: Sent) -> None:
        """Waits for this rank's rows. Not collective."""
        for exchange, arrived in self._parts(sent):
            arrived.announced.trained = sent.trained
            exchange.fetch(arrived)

    def _results(self, sent: Sent) -> tuple[Tensor, ...]:
        """The result of each feature, where all ranks have fetched their rows. Collective."""
        found: dict[int, Tensor] = {}
        for engines, exchanges, arrived in zip(self.engines, self._exchanges, sent.arrived, strict=True):
            for exchange, one in zip(exchanges, arrived, strict=True):
                found |= engines.from_tables(exchange.results(one))
        return tuple(found[feature] for feature in range(len(self.features)))

    def result_size(self, sent: Sent) -> int:
        """The number of floats in the results."""
        rows = zip(sent.result_rows, self.features, strict=True)
        return sum(count * self.tables[table].dim for count, (_, table) in rows)

    def alike(self, told: Told) -> dict[str, str]:
        """What ranks compare in each call, with its names for errors."""
        before, found = self._alike
        if before != told:
            found = {
                f"table {table.name}": "frozen" if rate is None else f"lr {rate}"
                for table, rate in zip(self.tables, told.rates, strict=True)
            }
            found["backward passes whose gradients are kept (no_sync)"] = str(told.kept)
            found["steps of tables since the call before"] = str(told.steps)
            found["factor of gradients since the call before (multiply_grads)"] = str(told.multiplied)
            self._alike = told, found
        return found

    def give(
        self, sent: Sent, lookup: int, gradients: Sequence[Tensor | None], *, is_kept: bool, in_slices: bool
    ) -> Tensor | None:
        """Gives the gradients of results to the owners of rows, who keep them until `take`. Collective.

        `lookup`: the number of the lookup in the order of calls. A gradient is None if this rank's loss does not depend
        on the result. Tables on which no rank's loss depends take no step. `is_kept`: inside `no_sync`. `in_slices`:
        the backward pass goes through `SlicedReplicas`, so the losses of ranks add up to the loss.

        Returns the gradients of the weights that require some, from the rows as they are. Raises `ArgumentError` on all
        ranks if their losses depend on different lookups, if some are inside `no_sync` and others not, if they have
        other scales, or if gradients are a mean although losses add up.
        """
        scale = 0.0 if self.optimizer.scaler is None else self.optimizer.scaler.get_scale()
        # In the order of the numbers, which are not negative.
        (scale_bits,) = struct.unpack("<q", struct.pack("<d", scale))
        is_sum = in_slices if self.gradients_are is None else self.gradients_are == "sum"
        flags = [*(one is not None for one in gradients), not self._are_finite(gradients), is_kept, not is_kept]
        numbers = [*flags, in_slices, not in_slices, lookup, -lookup, scale_bits, -scale_bits]
        told = self.wire.largest_of(torch.tensor(numbers, dtype=torch.int64))
        given, of_weights = self._returned(sent, gradients, 1 if is_sum else self.slices.world_size)
        *in_loss, is_bad, any_kept, any_not_kept, any_in_slices, any_outside, last, first, most_bits, least_bits = (
            told().tolist()
        )
        if last != -first:
            raise ArgumentError(
                f"a loss of lookup {lookup} (number 0 was the first); that of another rank depends on lookup "
                f"{last if lookup != last else -first} instead; allowed: the same on all ranks"
            )
        if any_kept and any_not_kept:
            here, there = ("inside", "outside") if is_kept else ("outside", "inside")
            raise ArgumentError(
                f"a backward pass {here} of no_sync, on another rank {there}; allowed: the same on all ranks"
            )
        if most_bits != -least_bits:
            other = struct.unpack("<d", struct.pack("<q", most_bits if scale_bits != most_bits else -least_bits))[0]
            ours, theirs = (f"a GradScaler of scale {one}" if one else "no GradScaler" for one in (scale, other))
            raise ArgumentError(
                f"{ours} (`embeddings.optimizer.scaler`), on another rank {theirs}; allowed: the same on all ranks"
            )
        if any_in_slices and any_outside:
            raise ArgumentError(
                "a loss that goes through SlicedReplicas on some ranks alone; allowed: on all ranks, or on none"
            )
        if any_in_slices and self.gradients_are == "mean":
            raise ArgumentError(
                'gradients "mean" of a loss through SlicedReplicas, where losses of ranks add up; allowed: "sum", None'
            )
        self._is_finite &= not is_bad
        tables = {table for (_, table), is_used in zip(self.features, in_loss, strict=True) if is_used}
        for one, own in zip(self.gradients, given, strict=True):
            one.add(lookup, tables, *own)
        return of_weights

    def _returned(
        self, sent: Sent, gradients: Sequence[Tensor | None], divisor: int
    ) -> tuple[list[list[Given]], Tensor | None]:
        """Sends the gradients of results, divided by `divisor`, to the owners of rows. Collective.

        Returns those for this rank's rows, for each of `engines`, and those of weights that require some.
        """
        whole: dict[int, Tensor] = {}
        for feature, (one, rows, (_, table)) in enumerate(zip(gradients, sent.result_rows, self.features, strict=True)):
            if one is None:
                one = torch.zeros(rows, self.tables[table].dim, device=self.device)
            whole[feature] = one if divisor == 1 else one / divisor
        given: list[list[Given]] = []
        of_weights: dict[int, Tensor] = {}
        for engines, exchanges, arrived in zip(self.engines, self._exchanges, sent.arrived, strict=True):
            own = engines.to_tables(whole)
            found = [exchange.give(one, own) for exchange, one in zip(exchanges, arrived, strict=True)]
            given.append([one for one, _ in found])
            for _, own_weights in found:
                of_weights |= engines.from_tables(own_weights)
        if sent.weights is None:
            return given, None
        # A weight belongs to the loss of this rank alone, which is no mean over ranks.
        joined = torch.cat([of_weights[feature] for feature in range(len(self.features))]).mul_(divisor)
        return given, joined.to(sent.weights.device)

    def _are_finite(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether a scaler finds no overflow in the gradients of this rank. Without one nobody asks."""
        if self.optimizer.scaler is None:
            return True
        return all(bool(one.isfinite().all()) for one in gradients if one is not None)

    def take(self, rates: Rates, *, scale: float = 1.0) -> GradientError | None:
        """Takes one step with all gradients that were given. Not collective.

        `rates`: of all tables. `scale`: what gradients are divided by. If they were not finite on any rank, and there
        is a scaler, no rank takes the step.

        Returns what is wrong with gradients of this rank's rows. Such rows are left as they were.
        """
        self.was_finite, self._is_finite, self._were_finite = self._is_finite, True, True
        self._updates += self.is_accumulating
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
        """Multiplies the gradients that were given. Not collective, but all ranks must do the same (`alike`)."""
        if self.is_accumulating:
            self._factor *= factor
            self._multiplied *= factor

    def take_multiplied(self) -> float:
        """What gradients were multiplied by since the call before."""
        found, self._multiplied = self._multiplied, 1.0
        return found

    def drop(self, *, all_of_them: bool) -> None:
        """Forgets gradients: those of a backward pass that has not ended, or all. Not collective."""
        for one in self.gradients:
            one.drop(all_of_them=all_of_them)
        if not self.is_accumulating:
            self._were_finite, self._factor = True, 1.0
        self._is_finite = self._were_finite

    def release(self, sent: Sent) -> None:
        """Ends a step without an update. Not collective."""
        for exchange, arrived in self._parts(sent):
            exchange.release(arrived)

    def check_rates(self, rates: Rates) -> None:
        """Raises `ConfigError` for a rate that is negative, or not finite: a scheduler may set any."""
        for table, rate in zip(self.tables, rates, strict=True):
            if rate is not None and not 0 <= rate < math.inf:
                raise ConfigError(f"table {table.name}: lr {rate}; allowed: 0 or more")


def _kind_of(weights: Tensor | None) -> int:
    """The index in `_KINDS`."""
    return 0 if weights is None else 1 + weights.requires_grad
