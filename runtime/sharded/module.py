# SPDX-License-Identifier: Apache-2.0
"""What modules of sharded tables have in common: the model that all ranks agree on, its shards here, their rates."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.sharded.agreement import check_agreement, check_codec, exchange_headers, made_on_all, rows_on_all
from sennit.runtime.sharded.beside import Beside
from sennit.runtime.sharded.description import described, homes, owners
from sennit.runtime.sharded.engines import Settings, engines_of, groups_of, with_files
from sennit.runtime.sharded.features import Ids, features_of, ids_of
from sennit.runtime.sharded.files import TableStore
from sennit.runtime.sharded.homes import Homes
from sennit.runtime.sharded.local_ranks import local_ranks
from sennit.runtime.sharded.moving import moved
from sennit.runtime.sharded.overlap import Lookup
from sennit.runtime.sharded.pending import RunBeside
from sennit.runtime.sharded.phases import PhaseClock
from sennit.runtime.sharded.placement import Placement, place
from sennit.runtime.sharded.rates import TableRates
from sennit.runtime.sharded.sent import Refused, Sent
from sennit.runtime.sharded.slices import DEFAULT_SLICES, Slices
from sennit.runtime.sharded.state import HeldTables
from sennit.runtime.sharded.tables import Table, check_tables, output_names
from sennit.runtime.sharded.uncompiled import uncompiled
from sennit.runtime.sharded.wire import Wire
from sennit.transport.codecs import Codec
from sennit.transport.errors import ArgumentError, ConfigError


class ShardedTables(HeldTables):
    """Tables in shards on all ranks. Forward and backward passes are collective.

    Tables hold no `nn.Parameter`, so DDP and FSDP2 leave them alone.
    """

    _poolings: tuple[Pooling, ...] = ()
    """What tables of this module may do with the rows of a bag."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        rate: float,
        placement: Placement | str | Mapping[str, str] = "table_wise",
        slices: int = DEFAULT_SLICES,
        gradients: str = "mean",
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        implementation_name: str | None = None,
        device: torch.device | str = "cpu",
        threads: int = 1,
        store: TableStore | None = None,
        codec: Codec | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        """`rate`: the learning rate of all tables; a scheduler may change it (`optimizer`).

        `placement`: who has which shard; or the name of a sharding, for all tables or by table (`place`).
        `slices`: V, a power of two that belongs to the model, not to the run.
        `gradients`: "mean" if every rank's loss is the mean over its own samples, as with DDP; then gradients are
        averaged over ranks. "sum" if the losses of all ranks add up to the loss.
        `seed`: of initial values and of stochastic rounding.
        `device`: where results and gradients are, and tables that have no other home; "cpu" or "cuda"
        (docs/reference/sharded.md, "On a GPU").
        `implementation_name`: None takes native on the CPU, and triton on "cuda".
        `codec`: of sums, rows and gradients that travel (docs/reference/sharded.md, "Codecs").
        `clock`: measures the phases of a step.
        `store`: a place for tables larger than memory: shards are in files there, but for those of tensor trains, of
        replicated tables, and of tables whose `home` is elsewhere. A module with tables in files sends batches ahead
        (`batches_ahead`); `close` ends it.

        Collective. Raises `ConfigError` on all ranks if they do not describe the same model, or if a table cannot be at
        its home. Raises on one rank, and `SennitError`, which names it, on the others: `Unsupported` if it has no such
        device; with a `store` also `DeviceError`, if the disk is full or broken, and `ConfigError`, if memory for its
        cache is too small.
        """
        super().__init__()
        self.tables = tuple(tables)
        check_tables(self.tables)
        if gradients not in ("mean", "sum"):
            raise ConfigError(f"gradients {gradients!r}; allowed: mean, sum")
        for table in self.tables:
            if table.pooling not in self._poolings:
                allowed = ", ".join(pooling.value for pooling in self._poolings)
                what = f"table {table.name} has pooling {table.pooling.value}"
                raise ConfigError(f"{what}; allowed in {type(self).__name__}: {allowed}")
        world_size = dist.get_world_size(group)
        self.slices = Slices(count=slices, rank=dist.get_rank(group), world_size=world_size)
        if not isinstance(placement, Placement):
            placement = place(self.tables, world_size, placement, local_ranks=local_ranks(group))
        if placement.world_size != world_size:
            raise ConfigError(f"a placement for {placement.world_size} ranks, but there are {world_size}")
        self.placement = placement
        self.device = torch.device(device)
        """Where results and gradients are, and tables that have no other home."""
        self._group = group
        self._divisor = world_size if gradients == "mean" else 1
        self._features = features_of(self.tables)
        check_agreement(
            described(self.tables, placement, slices=slices, gradients=gradients, seed=seed)
            | homes(self.tables)
            | {"codec": str(codec), "table store": str(store is not None), "device": self.device.type},
            group,
        )
        check_codec(codec, group)
        self._wire = Wire(rank=self.slices.rank, world_size=world_size, group=group, codec=codec, clock=clock)
        self._homes = Homes(device_type=self.device.type, has_store=store is not None)
        self.tables_in_files = self._in_files_with(placement)
        """The tables whose rows are in files, on whichever rank."""
        settings = Settings(
            tables=self.tables,
            placement=placement,
            slices=self.slices,
            seed=seed,
            implementation_name=implementation_name or ("native" if self.device.type == "cpu" else "triton"),
            device=self.device,
            homes=self._homes,
            threads=threads,
            wire=self._wire,
        )
        # Nothing can fail on one rank alone but files and devices.
        if store is not None:
            what = "make its table store"
            self._engines = made_on_all(lambda: engines_of(with_files(settings, store)), what, group)
        elif self.device.type != "cpu":
            self._engines = made_on_all(lambda: engines_of(settings), f"make its tables on {self.device}", group)
        else:
            self._engines = engines_of(settings)
        names = [[self.tables[number].name for number in numbers] for numbers in groups_of(self.tables)]
        self.optimizer = TableRates(names, rate=rate)
        """Holds the learning rates, for `torch.optim.lr_scheduler`. Its `step` does nothing."""
        # Autograd calls the backward pass only if an argument requires a gradient. It is no parameter, so that nobody
        # sends it around.
        self._anchor = [torch.empty(0, requires_grad=True)]
        self._bad: GradientError | None = None
        self._synchronised = True
        self._expected: dict[int, tuple[Any, Sent]] = {}
        self._beside: Beside | None = None
        self._connect()

    @uncompiled
    def forward(self, features: Any, *, global_batch: int | None = None) -> Mapping[str, Tensor]:
        """The float32 result of each feature, by its name (`feature_names`): a dict, or `Pending` with `overlap`.

        `features`: ids of this rank's B samples, in any form of `ids_of`, or a batch that was sent (`send`, `expect`).
        `global_batch`: the samples of all ranks; needed only where slices differ in size.

        Raises `IdError`, `ArgumentError`; the other ranks then raise `PeerInputError`, which names the rank. Raises
        `GradientError` on all ranks if the step before had gradients that are not finite.
        """
        if id(features) in self._expected:
            features = self._expected.pop(id(features))[1]
        elif not isinstance(features, Sent):
            features = self.send(features, global_batch=global_batch)
        elif global_batch is not None:
            raise ArgumentError("global_batch for a batch that was sent; allowed: in send")
        step, lookup = features.take(self._engines, "looked up"), features.lookup
        if self._beside is not None and torch.is_grad_enabled() and self._weights(step) is None:
            return self._beside.pending(step, lookup)
        self.finish()
        if torch.is_grad_enabled():
            found: tuple[Tensor, ...] = Lookup.apply(self._anchor[0], self, step, self._weights(step))  # type: ignore[no-untyped-call]
        else:
            with self._wire.phase("lookup"):
                found = self._found(step)
            self._release(step)
        return dict(zip(self.feature_names, found, strict=True))

    def overlap(self, run: RunBeside | None, group: dist.ProcessGroup | None = None) -> Beside | None:
        """From now on lookups and updates run in the thread of `run`, over `group`, which has the same ranks.

        A call then returns `Pending`. The backward pass does not wait for its update: `finish` does. Calls without
        gradients, and with weights that require them, stay here. None: everything stays here.
        """
        before, self._beside = self._beside, None if run is None else Beside(self, run, group)
        if before is not None:
            before.finish()
            for update in before.untold():
                self._bad = update.result() or self._bad
        return self._beside

    def finish(self) -> None:
        """Waits for what runs in another thread. Raises errors of updates."""
        if self._beside is not None:
            self._beside.finish()

    @uncompiled
    def send(self, features: Any, *, global_batch: int | None = None) -> Sent:
        """Sends ids to the owners of their rows, for a later call of this module. Collective.

        Owners can then fetch rows while earlier batches are computed. Several batches may be sent before the first is
        looked up. Arguments and errors are those of a call.
        """
        return self.sender(None)(features, global_batch)

    def sender(self, group: dist.ProcessGroup | None) -> Callable[[Any, int | None], Sent]:
        """(features, global batch) -> `send`, once. Another thread may call it, `over` another group of these ranks.

        Made in the thread of the passes: an error of the last backward pass goes out with this batch. `Refused`
        features tell all ranks why this one has none.
        """
        untold = [] if self._beside is None else self._beside.untold()
        before, self._bad = self._bad, None

        def send(features: Any, global_batch: int | None) -> Sent:
            bad = next((bad for update in untold if (bad := update.result()) is not None), before)
            with self._wire.phase("input exchange"), self._wire.over(group):
                return Sent(self._engines, self._send(features if bad is None else Refused(bad), global_batch))

        return send

    def expect(self, features: Any, sent: Sent) -> None:
        """A later call with this very object looks `sent` up. So a model needs no word about batches ahead."""
        self._expected[id(features)] = features, sent

    def expects(self, features: Any) -> bool:
        """Whether such a call is still to come."""
        return id(features) in self._expected

    def drop(self, sent: Sent) -> None:
        """Forgets a sent batch that will not be looked up. Raises `ArgumentError` for any other."""
        step = sent.take(self._engines, "dropped")
        if sent.lookup is not None:
            try:
                sent.lookup.result()
            except Exception:
                return  # It has ended its step itself.
        self._release(step)

    @property
    def batches_ahead(self) -> int:
        """How many batches should be sent before one is looked up: 1 if rows are fetched from a store, else 0."""
        return 1 if self.tables_in_files else 0

    @property
    def looks_ahead(self) -> bool:
        """Whether the next batch is looked up while the step of the one before still runs (`overlap`)."""
        return self._beside is not None and self._beside.looks_ahead

    def result_bytes(self, sent: Sent) -> int:
        """What the result of a sent batch takes, where `device` is. Its gradients take as much again."""
        return self._result_size(sent.step) * torch.float32.itemsize

    def wait_for_rows(self) -> None:
        """Waits until the rows of all sent batches are here, from a store. A call does so for its own batch."""
        for engines in self._engines:
            engines.sharded.wait()

    def cache_counters(self) -> dict[str, int]:
        """Counters of this rank's caches before its files and of the files, by name; empty if there are none."""
        found: Counter[str] = Counter()
        for engines in self._engines:
            found.update(engines.counters())
        return dict(found)

    def close(self) -> None:
        """Removes this rank's files. Nothing can be looked up afterwards, if there were any."""
        for engines in self._engines:
            engines.close()

    def move(self, placement: Placement) -> int:
        """Moves shards to the ranks of another placement: rows and optimizer states travel. Collective, and exact.

        Returns the bytes that came to this rank. Batches that were sent before can no longer be looked up; if tables
        are in files, they have to be looked up or dropped first. All files are then written anew, beside the old ones.

        Raises `ConfigError` on all ranks if they name different placements; `ArgumentError` between the backward passes
        of one step. With tables in files it raises what the constructor raises, and `ArgumentError` for batches that
        are not done, on that rank; `SennitError` on the others. Nothing has moved then.
        """
        self.finish()
        in_files = self._in_files_with(placement)
        if placement.world_size != (world_size := self.slices.world_size):
            raise ConfigError(f"a placement for {placement.world_size} ranks, but there are {world_size}")
        if self._is_accumulating:
            raise ArgumentError("shards cannot move between the backward passes of a step; allowed: after the last")
        check_agreement(owners(self.tables, placement), self._group)
        self._engines, size_bytes = moved(self._engines, placement, self._group)
        self.placement, self.tables_in_files = placement, in_files
        self._connect()
        if self._changes:
            self.track_changes()
            for changes in self._changes:
                changes.mark_all()
        return size_bytes

    def _in_files_with(self, placement: Placement) -> list[str]:
        """The tables that are in files with a placement. Raises `ConfigError` if a table cannot be at its home."""
        return self._homes.in_files(self.tables, placement.replicated)

    def _connect(self) -> None:
        """Makes what a step needs of `_engines`."""
        raise NotImplementedError

    @property
    def _is_accumulating(self) -> bool:
        """Whether backward passes are kept for a later step."""
        raise NotImplementedError

    def _send(self, given: Any, global_batch: int | None) -> Any:
        """Sends ids to their owners. Returns what the methods below take as `step`."""
        raise NotImplementedError

    def _found(self, step: Any) -> tuple[Tensor, ...]:
        """`_look_up`, once all ranks have the rows of the step. If one does not get them, ends it on all."""
        if self.tables_in_files:
            try:
                rows_on_all(lambda: self._fetch(step), self._wire.group)
            except Exception:
                self._release(step)
                raise
        return self._look_up(step)

    def _fetch(self, step: Any) -> None:
        """Waits for this rank's rows of a step. Not collective."""
        raise NotImplementedError

    def _look_up(self, step: Any) -> tuple[Tensor, ...]:
        """The result of each feature. Collective."""
        raise NotImplementedError

    def _update(
        self, step: Any, gradients: Sequence[Tensor], rates: Sequence[float | None]
    ) -> tuple[GradientError | None, Tensor | None]:
        """Takes the optimizer step from the gradients of `_look_up`. Collective. `rates`: those of `_rates`.

        Returns what is wrong with gradients of this rank's rows, and the gradients of `_weights`, if they require any.
        """
        raise NotImplementedError

    def _result_size(self, step: Any) -> int:
        """Floats of `_look_up`."""
        raise NotImplementedError

    def _weights(self, step: Any) -> Tensor | None:
        """The weights of this rank's ids, if they require gradients."""
        return None

    def _release(self, step: Any) -> None:
        """Ends a step without an update. Not collective."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes made inside update no row: the next one from outside takes one step with all of them.

        Their gradients are added up as those of one batch, M passes of V slices each as M · V slices. The same bits in
        every world. Gradients travel in each pass.
        """
        before, self._synchronised = self._synchronised, False
        try:
            yield
        finally:
            self._synchronised = before

    def _rates(self) -> list[float | None]:
        """The learning rates of this backward pass, of each of `_engines`; None if it takes no step."""
        return [self.optimizer.rate(one.group) if self._synchronised else None for one in self._engines]

    @property
    def _counts_told(self) -> int:
        """How many numbers a rank tells each other one before the exchanges of a step."""
        return 0

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the outputs, in the model's order."""
        return output_names(self.tables)

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes that this rank has given other ranks so far, by what they were: ids, sums, gradients and so on."""
        return dict(self._wire.sent_bytes)

    def check(self) -> None:
        """Raises `GradientError` on all ranks if the last backward pass had gradients that are not finite.

        Collective. Such rows were left as they were. The next forward pass raises the same error.
        """
        self.finish()
        for update in [] if self._beside is None else self._beside.untold():
            self._bad = update.result() or self._bad
        bad, self._bad = self._bad, None
        exchange_headers(bad, 0, [[]] * self.slices.world_size, self._group)

    def _agreed(
        self, given: Any, global_batch: int | None, counts: Callable[[Ids], Sequence[Sequence[int]]]
    ) -> tuple[Ids, int, list[list[int]]]:
        """This rank's ids, the samples of all ranks, and the `counts` that all ranks send here.

        `counts` makes what this rank tells each other one; it may raise, too. Raises on all ranks if one has bad input.
        """
        error: Exception | None = given.error if isinstance(given, Refused) else None
        batch, mine = 0, [[0] * self._counts_told] * self.slices.world_size
        ids = None
        if error is None:
            try:
                ids = ids_of(given, self.tables)
                batch = self.slices.global_batch(ids.sample_count, global_batch)
                mine = [list(row) for row in counts(ids)]
            except Exception as bad:  # Of any type: the other ranks wait for this one.
                error = bad
        arriving = exchange_headers(error, batch, mine, self._wire.group)
        assert ids is not None
        return ids, batch, arriving
