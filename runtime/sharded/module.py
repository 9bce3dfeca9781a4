# SPDX-License-Identifier: Apache-2.0
"""Modules of sharded tables: all ranks agree on the model, hold its shards, and call it together."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Self, SupportsIndex, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.backend.process_group import local_ranks
from sennit.runtime.backend.torch_versions import runs_ddp
from sennit.runtime.sharded.agreement import (
    check_agreement,
    check_codec,
    described,
    described_homes,
    described_owners,
    described_placement,
    exchange_headers,
    made_on_all,
)
from sennit.runtime.sharded.engines import Settings, engines_of, with_files
from sennit.runtime.sharded.exchange import Exchange
from sennit.runtime.sharded.files import TableStore
from sennit.runtime.sharded.handle import TableHandle
from sennit.runtime.sharded.initial import check_initial
from sennit.runtime.sharded.memory_limits import limits_by_home
from sennit.runtime.sharded.moving import moved
from sennit.runtime.sharded.optimizer import TableOptimizer
from sennit.runtime.sharded.outputs import KeyedVectors, concatenated, nested
from sennit.runtime.sharded.parameters import TableParameters
from sennit.runtime.sharded.passes import Passes
from sennit.runtime.sharded.phases import PhaseClock
from sennit.runtime.sharded.placement import Placement, check_placement, check_room, place
from sennit.runtime.sharded.pooled import PooledExchange
from sennit.runtime.sharded.row_access import RowAccess
from sennit.runtime.sharded.rows import RowExchange
from sennit.runtime.sharded.sent import Pending, Refused, RunBeside, Sent
from sennit.runtime.sharded.shards import Evicted
from sennit.runtime.sharded.slices import DEFAULT_SLICES, Slices
from sennit.runtime.sharded.state import NO_COPY, HeldTables
from sennit.runtime.sharded.table_steps import TableSteps
from sennit.runtime.sharded.tables import Homes, Table, check_tables
from sennit.runtime.sharded.wire import Wire
from sennit.transport.codecs import Codec
from sennit.transport.errors import ArgumentError, ConfigError, Unsupported

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """A function that `torch.compile` leaves alone, as with `torch.compiler.disable`.

    `torch.compiler.disable` imports torch's compiler at once, which takes a second of processor time. Here the first
    call imports it, so programs that only start ranks never do.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*arguments, **options)

    return call  # type: ignore[return-value]


class _Path:
    """Has attributes of any public name."""

    def __getattr__(self, name: str) -> _Path:
        if name.startswith("_"):
            raise AttributeError(name)
        return self


class ShardedTables(HeldTables):
    """Tables in shards on all ranks. Forward and backward passes are collective.

    Parameters of one element stand for them (`handles`), which DDP, FSDP2 and optimizers may take.
    """

    _exchange: ClassVar[type[Exchange[Any]]]
    """What a lookup returns: sums of bags, or rows."""

    _outputs: ClassVar[tuple[str, ...]]
    """The forms in which these tables give results."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        lr: float,
        optimizer: None = None,
        placement: Placement | str | Mapping[str, str] = "table_wise",
        slices: int = DEFAULT_SLICES,
        gradients: str | None = None,
        outputs: str = "dict",
        include_last_offset: bool = False,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        implementation_name: str | None = None,
        device: torch.device | str = "cpu",
        threads: int = 1,
        store: TableStore | None = None,
        rank_memory_bytes: int | None = None,
        codec: Codec | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        """`lr`: the learning rate of tables without one of their own. Schedulers may change it (`optimizer`).
        `optimizer`: each table has its own, `Table(optimizer=...)`; given here it is a `ConfigError` that says so.

        `placement`: which rank has which shard; or the name of a sharding, for all tables or by table (`place`).
        `slices`: V, a power of two that belongs to the model, not to the run.
        `gradients`: "mean" if every rank's loss is the mean over its own samples, as with DDP; then gradients are
        averaged over ranks. "sum" if the losses of all ranks add up to the loss. None: "sum" in backward passes that go
        through `SlicedReplicas`, else "mean".
        `outputs`: the form of what a call returns (docs/reference/sharded.md, "Output").
        `include_last_offset`: offsets of ids have one more, where the last sample ends, as in `nn.EmbeddingBag`.
        `seed`: decides initial values and stochastic rounding.
        `device`: "cpu" or "cuda". Results and gradients are there, and tables that name no other home
        (docs/reference/sharded.md, "On a GPU").
        `implementation_name`: None takes native on the CPU, and triton on "cuda".
        `codec`: codes sums, rows and gradients that travel (docs/reference/sharded.md, "Codecs").
        `clock`: measures the phases of a step.
        `store`: a place for tables larger than memory. Shards are in files there, except tensor trains, replicated
        tables, and tables with another `home`. A module with tables in files sends batches ahead (`batches_ahead`);
        `close` ends it.
        `rank_memory_bytes`: what this rank has for tables in memory, with optimizer states. None: its share of what its
        host or GPU has available (`memory_limits`).

        Collective. Raises `ConfigError` on all ranks if they do not describe the same model, if tables do not fit the
        memory of the ranks, or if a table cannot be at its home. The following errors are raised on the rank that has
        them, and `SennitError`, which names that rank, on the others: `Unsupported` for a device that is not there;
        with a `store` also `DeviceError` for a full or broken disk, and `ConfigError` for a cache that does not fit its
        memory.
        """
        if torch.get_default_device().type == "meta":
            reason = 'their rows have to be somewhere; make them outside of `torch.device("meta")`'
            raise Unsupported("sharded tables on the device meta", reason)
        tables = tuple(tables)
        check_tables(tables)
        if not 0 <= lr < math.inf:
            raise ConfigError(f"lr {lr}; allowed: 0 or more")
        if optimizer is not None:
            raise ConfigError(f"optimizer {optimizer} for all tables; allowed: Table(optimizer=...), for each")
        if gradients not in (None, "mean", "sum"):
            raise ConfigError(f"gradients {gradients!r}; allowed: mean, sum, or None")
        for table in tables:
            if table.pooling not in self._exchange.poolings:
                allowed = ", ".join(pooling.value for pooling in self._exchange.poolings)
                what = f"table {table.name} has pooling {table.pooling.value}"
                given = f'Table(pooling="{self._exchange.poolings[0].value}")'
                raise ConfigError(f"{what}; allowed in {type(self).__name__}: {allowed}, as in {given}")
        if outputs not in self._outputs:
            raise ConfigError(f"outputs {outputs!r}; allowed: {', '.join(self._outputs)}")
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        own_slices = Slices(count=slices, rank=rank, world_size=world_size)
        if isinstance(placement, Placement):
            check_placement(tables, placement, world_size)
        device = torch.device(device)
        model = described(tables, lr=lr, slices=slices, gradients=str(gradients), seed=seed)
        check_agreement(
            model
            | described_placement(tables, placement)
            | described_homes(tables)
            | {"codec": str(codec), "table store": str(store is not None), "device": device.type},
            group,
        )
        for table in tables:
            check_initial(table, model[f"table {table.name}: initial"])
        homes = Homes(device_type=device.type, has_store=store is not None)
        limits = limits_by_home(tables, homes, rank_memory_bytes, group, device=device, store=store)
        if isinstance(placement, Placement):
            check_room(tables, placement, limits, homes)
        else:
            local = local_ranks(group)
            placement = place(tables, world_size, placement, local_ranks=local, limits=limits, homes=homes)
        check_codec(codec, group)
        in_files = homes.in_files(tables, placement.replicated)
        settings = Settings(
            tables=tables,
            placement=placement,
            slices=own_slices,
            seed=seed,
            implementation_name=implementation_name or ("native" if device.type == "cpu" else "triton"),
            device=device,
            homes=homes,
            threads=threads,
            wire=Wire(rank=rank, world_size=world_size, group=group, codec=codec, clock=clock),
        )
        # Files, devices and initial values can fail on one rank alone.
        if store is not None:
            engines = made_on_all(lambda: engines_of(with_files(settings, store)), "make its table store", group)
        else:
            engines = made_on_all(lambda: engines_of(settings), f"make its tables on {device}", group)
        own_optimizer = TableOptimizer(tables, lr=lr, device=device)
        super().__init__(TableSteps(engines, self._exchange, own_optimizer, gradients=gradients), group)
        self._steps.include_last_offset = include_last_offset
        self.slices, self.placement, self._form = own_slices, placement, outputs
        self.device = device
        """Where results and gradients are, and tables that name no other home."""
        self.optimizer = own_optimizer
        """Holds the learning rates, for `torch.optim.lr_scheduler`. Its `step` takes a step with the gradients that
        backward passes have kept (`no_sync`), its `zero_grad` forgets them. `scaler` is for mixed precision."""
        self.handles = TableParameters([table.name for table in tables], own_optimizer.parameters)
        self._homes = homes
        self.tables_in_files = in_files
        """The names of tables whose rows are in files, on whichever rank."""
        self._expected: dict[int, tuple[Any, Sent]] = {}

    def __getitem__(self, name: str) -> TableHandle:
        """The handle of a table by its name: learning rate, freezing, rows by id."""
        for number, table in enumerate(self.tables):
            if table.name == name:
                access = functools.partial(self._access_rows, number)
                return TableHandle(table, number, self.optimizer, self.device, access)
        raise KeyError(f"table {name!r}; allowed: {', '.join(table.name for table in self.tables)}")

    def __contains__(self, name: object) -> bool:
        return any(table.name == name for table in self.tables)

    def __iter__(self) -> Iterator[str]:
        """The names of the tables."""
        return (table.name for table in self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def extra_repr(self) -> str:
        return "\n".join(repr(self[name]) for name in self)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """False freezes all tables, as `TableHandle.frozen` freezes one. True ends it. All ranks must do the same."""
        for number in range(len(self.tables)):
            self.optimizer.freeze(number, not requires_grad)
        return super().requires_grad_(requires_grad)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `half`, `cuda` and the like call. Raises `Unsupported` if it would change what tables are."""
        was = torch.empty(0, device=self.device)
        now = fn(was)
        if now.dtype is not was.dtype:
            reason = f"they are not cast to {now.dtype}; use Table(precision=...), and cast the other modules alone"
            raise Unsupported("sharded tables in another precision", reason)
        if now.device != was.device:
            reason = f"they are not moved to {now.device}; use device=..., and move the other modules alone"
            raise Unsupported("sharded tables on another device", reason)
        if now.device.type == "cpu" and now.is_shared():  # type: ignore[no-untyped-call]
            reason = "each rank has shards of its own; start ranks in place of processes that share a model"
            raise Unsupported("sharded tables in shared memory", reason)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if now is not was:  # `to_empty`, after which any rows would do: tables keep theirs.
            with torch.no_grad():
                for parameter in self.handles.parameters():
                    parameter.zero_()
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raises `Unsupported`: pickle, deepcopy, `torch.save` of a model and `AveragedModel` would copy one rank."""
        raise Unsupported("a copy of sharded tables", NO_COPY)

    def __getattr__(self, name: str) -> Any:
        # torch.distributed.checkpoint.state_dict follows the names of a state attribute by attribute: `user/0`, `0`,
        # `weight`. It takes the tensors from the state.
        if any(name.startswith(f"{table.name}/") for table in self.__dict__.get("tables", ())):
            return _Path()
        return super().__getattr__(name)

    def _access_rows(self, number: int, ids: Tensor, error: Exception | None, *, writes: bool) -> RowAccess:
        """Begins it when what runs in another thread is done."""
        self.finish()
        return RowAccess(self._steps, number, self._passes.told(), ids, error, writes=writes)

    @uncompiled
    def forward(self, features: Any, *, global_batch: int | None = None) -> Any:
        """The float32 result of each feature, by its name (`feature_names`): a dict, or `Pending` with `overlap`.

        With `outputs` "keyed", "tensor" or "nested" the same in that form.

        `features`: ids of this rank's B samples, in any form of `ids_of`, or a batch that was sent (`send`, `expect`).
        `global_batch`: the samples of all ranks; needed where slices differ in size, unless all ranks have equally many
        samples.

        Raises `IdError`, `ArgumentError`; the other ranks then raise `PeerInputError`, which names the rank. Raises
        `GradientError` on all ranks if the step before had gradients that are not finite.
        """
        if self._steps.gradients_are == "sum" and runs_ddp():
            raise ArgumentError('gradients="sum" inside of a DDP, which averages gradients; allowed: "mean" or None')
        if id(features) in self._expected:
            features = self._expected.pop(id(features))[1]
        elif not isinstance(features, Sent):
            features = self.send(features, global_batch=global_batch)
        elif global_batch is not None:
            raise ArgumentError("global_batch for a batch that was sent; allowed: in send")
        features.take(self._steps.engines, "looked up")
        found = self.handles.used(self._passes.results(features))
        match self._form:
            case "keyed":
                return KeyedVectors(found)
            case "tensor":
                return concatenated(found)
            case "nested":
                lengths = features.lengths
                if isinstance(found, Pending):
                    return Pending(lambda: nested(found.wait(), lengths))
                return nested(found, lengths)
        return found

    def overlap(self, run: RunBeside | None, group: dist.ProcessGroup | None = None) -> Passes:
        """From now on `run` runs lookups and updates in another thread, over `group`, which has the same ranks.

        A call then returns `Pending`. The backward pass does not wait for its update: `finish` does. Calls without
        gradients, and with weights that require gradients, are still looked up in the caller's thread. With None all
        calls are.
        """
        self._passes.overlap(run, group)
        return self._passes

    @uncompiled
    def send(self, features: Any, *, global_batch: int | None = None) -> Sent:
        """Sends ids to the owners of their rows, for a later call of this module. Collective.

        Owners can then fetch rows while earlier batches are computed. Several batches may be sent before the first is
        looked up. Arguments and errors are those of a call.
        """
        return self.sender(None)(features, global_batch)

    def sender(self, group: dist.ProcessGroup | None) -> Callable[[Any, int | None], Sent]:
        """Returns `send(features, global_batch)` for one batch. Another thread may call it, `over` its own group.

        The thread of the passes calls `sender`, so that an error of the last backward pass goes out with this batch.
        `group` has the ranks of the module. `Refused` features tell all ranks why this one has no batch.
        """
        steps, told = self._steps, self._passes.told()
        error_of_updates = self._passes.errors()

        def send(features: Any, global_batch: int | None) -> Sent:
            bad = error_of_updates()
            with steps.wire.phase("input exchange"), steps.wire.over(group):
                return steps.send(features if bad is None else Refused(bad), global_batch, told)

        return send

    def expect(self, features: Any, sent: Sent) -> None:
        """A later call with this very object looks `sent` up. So a model need not know that batches are sent ahead."""
        self._expected[id(features)] = features, sent

    def expects(self, features: Any) -> bool:
        """Whether such a call is still to come."""
        return id(features) in self._expected

    def drop(self, sent: Sent) -> None:
        """Forgets a sent batch that will not be looked up. Raises `ArgumentError` for any other."""
        sent.take(self._steps.engines, "dropped")
        if sent.lookup is not None:
            try:
                sent.lookup.result()
            except Exception:
                return  # A lookup that fails ends its step itself.
        self._steps.release(sent)

    @property
    def batches_ahead(self) -> int:
        """How many batches should be sent before one is looked up: 1 if rows are fetched from a store, else 0."""
        return 1 if self.tables_in_files else 0

    @property
    def looks_ahead(self) -> bool:
        """Whether the next batch is looked up while the step of the one before still runs (`overlap`)."""
        return self._passes.looks_ahead

    def result_bytes(self, sent: Sent) -> int:
        """The bytes of a sent batch's result, on `device`. Its gradients take as much again."""
        return self._steps.result_size(sent) * torch.float32.itemsize

    def wait_for_rows(self) -> None:
        """Waits until the rows of all sent batches are here, from a store. A call does so for its own batch."""
        for engines in self._steps.engines:
            engines.sharded.wait()

    def cache_counters(self) -> dict[str, int]:
        """Counters of this rank's files and of the caches before them, by name; empty if there are none."""
        found: Counter[str] = Counter()
        for engines in self._steps.engines:
            found.update(engines.counters())
        return dict(found)

    def id_counters(self) -> dict[str, dict[str, int]]:
        """What this rank's shards of each dynamic table have done, by the table's name.

        docs/reference/dynamic-tables.md, "Counters", lists the names.
        """
        return {self.tables[number].name: dict(counts) for number, counts in self._steps.id_counters().items()}

    def on_evicted(self, told: Callable[[Evicted], object] | None) -> None:
        """From now on `told` hears of rows that dynamic tables take away on this rank; None: nobody does.

        It is called in the thread that looks a batch up, before the batch's new ids begin in these rows: by table, by
        row shard, and rising by row. Calls of this module, and collectives of torch, raise `ArgumentError` in it. What
        it raises is raised on all ranks by the next call, or `check`; without them, on this rank by `close`.
        """
        self.finish()
        self._steps.on_evicted(told)

    def close(self) -> None:
        """Removes this rank's files. Nothing can be looked up afterwards, if there were any.

        Raises what the function of `on_evicted` has raised, if no call has.
        """
        for engines in self._steps.engines:
            engines.close()
        if (error := self._steps.take_failure()) is not None:
            raise error

    def move(self, placement: Placement) -> int:
        """Moves shards to the ranks of another placement: rows and optimizer states travel. Collective, and exact.

        Returns the bytes that came to this rank. Batches that were sent before can no longer be looked up; if tables
        are in files, they have to be looked up or dropped first. All files are then written anew, beside the old ones.

        Raises `ConfigError` on all ranks if they name different placements; `ArgumentError` between the backward passes
        of one step. With tables in files it raises what the constructor raises, and `ArgumentError` for batches that
        are not done, on that rank; `SennitError` on the others. Nothing has moved then.
        """
        self.finish()
        in_files = self._homes.in_files(self.tables, placement.replicated)
        error: Exception | None = None
        try:
            check_placement(self.tables, placement, self.slices.world_size)
        except ConfigError as wrong:
            error = wrong
        if self._steps.is_accumulating:
            error = ArgumentError("shards cannot move between the backward passes of a step; allowed: after the last")
        self._agree(error)
        check_agreement(described_owners(self.tables, placement), self._group)
        engines, size_bytes = moved(self._steps.engines, placement, self._group)
        self.placement, self.tables_in_files = placement, in_files
        self._steps.connect(engines)
        self._track_moved()
        return size_bytes

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes made inside update no row: the next one from outside takes one step with all of them, or
        `optimizer.step` does.

        So do those of a DDP's `no_sync` if the DDP calls this module, and of `SlicedReplicas.no_sync`. `zero_grad`
        forgets what is kept. M lookups are summed as one batch of M · V slices, in the order of the calls. The same
        bits in every world. Gradients travel in each pass.
        """
        before, self._passes.is_synchronised = self._passes.is_synchronised, False
        try:
            yield
        finally:
            self._passes.is_synchronised = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients that are kept for a later step."""
        super().zero_grad(set_to_none)
        self._passes.forget()

    def grad_norm(self) -> float:
        """The 2-norm of the gradients that are kept for a later step, of tables that are not frozen. Collective.

        A `GradScaler` does not count. Raises `Unsupported` for tensor trains, and `ArgumentError` on all ranks if the
        last backward pass has updated rows.
        """
        error = self._passes.why_no_norm()
        self.finish()
        self._agree(error)
        return self._passes.norm()

    def multiply_grads(self, factor: float) -> None:
        """Multiplies the gradients that are kept for a later step.

        All ranks must do the same: the next collective call raises `ConfigError` on all ranks otherwise.
        """
        self.finish()
        self._steps.multiply(factor)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the outputs, in the model's order."""
        return self._steps.feature_names

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes that this rank has given other ranks so far, by what they were: ids, sums, gradients and so on."""
        return dict(self._steps.wire.sent_bytes)

    def check(self) -> None:
        """Raises `GradientError` on all ranks if the last backward pass had gradients that are not finite, and what the
        function of `on_evicted` has raised in the last batch.

        Collective. Such rows were left as they were. The next forward pass raises the same error.
        """
        self.finish()
        self._agree(self._passes.errors()() or self._steps.take_failure())

    def _agree(self, error: Exception | None) -> None:
        """Collective. Raises on all ranks if one has an error, or has done what others have not (`alike`)."""
        alike = self._steps.alike(self._passes.told())
        exchange_headers(error, None, [[]] * self.slices.world_size, self._group, alike=alike)


class ShardedEmbeddingBags(ShardedTables):
    """Embedding tables in shards on all ranks; each feature's ids of a sample are pooled.

    A call returns float32 [B, dim] by feature: the pooled rows of this rank's B samples. The result of a whole table is
    a part of what arrived, without a copy. `outputs="tensor"` puts them side by side: float32 [B, the sum of all dims];
    "keyed" has the methods of TorchRec's `KeyedTensor` (`KeyedVectors`).

    The backward pass updates the rows that were used, with the tables' own optimizers (Mudigere et al., ISCA 2022,
    section 4.1): a gradient of a table never exists. All lookups that it reaches make one step of each row. Weights
    have the same bits in any world, with any placement and transport, if the rest of the model works slice by slice
    (`SlicedReplicas`).
    """

    _exchange = PooledExchange
    _outputs = ("dict", "keyed", "tensor")


class ShardedEmbeddings(ShardedTables):
    """Embedding tables in shards on all ranks; each id gives its row (sequences).

    A call returns float32 [ids, dim] by feature: the row of each id of this rank's samples, in the order of the ids. An
    ignored id (`Bounds.IGNORE`) has a row of zeros. `outputs="nested"` gives them by sample: `torch.nested`,
    [B, *, dim] of layout `torch.jagged`.

    Ids have no weights. A rank gets each distinct row once, and sends the sum of its gradients back once. Everything
    else is as in `ShardedEmbeddingBags`.
    """

    _exchange = RowExchange
    _outputs = ("dict", "nested")
