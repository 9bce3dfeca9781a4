# SPDX-License-Identifier: Apache-2.0
"""A sharded embedding table, the virtual shards that it is made of, and the memory that its rows may lie in.

Row shards and column shards belong to the model, as a table's name and precision do: they decide bits. Which rank has
a shard is the placement's business (`placement`), and decides time alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Generator, Tensor

from sennit.runtime.kernels.id_directory import Eviction as Eviction
from sennit.runtime.kernels.id_sketch import COUNT_MAX
from sennit.runtime.kernels.optimizers import Decay as Decay
from sennit.runtime.kernels.optimizers import Optimizer as Optimizer
from sennit.runtime.kernels.optimizers import OptimizerSpec as OptimizerSpec
from sennit.runtime.kernels.spec import MAX_DIM, ShardSpec
from sennit.runtime.kernels.spec import Bounds as Bounds
from sennit.runtime.kernels.spec import Pooling as Pooling
from sennit.runtime.kernels.spec import Precision as Precision
from sennit.runtime.kernels.spec import Rounding as Rounding
from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.runtime.sharded.shards import expected
from sennit.transport.errors import ConfigError

MAX_SHARDS = 1 << 12

Initial = Callable[[Tensor, Generator], object]
"""Fills float32 rows [n, dim] in place from the generator, which is theirs alone."""


class Home(Enum):
    """The memory that the rows of a table lie in. It belongs to the run and decides no bit (`homes`)."""

    FILE = "file"
    """Files of the module's store, behind a cache of rows in memory."""

    DRAM = "dram"
    """Host memory."""

    HBM = "hbm"
    """Memory of the module's device."""


class Range(NamedTuple):
    """Rows or columns `low` up to, not including, `high`."""

    low: int
    high: int

    @property
    def size(self) -> int:
        return self.high - self.low


Score = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Ids, int64 [n]; how often each was looked up since it was admitted, int64 [n]; steps since it last was, int64 [n] ->
floats [n]: the rows with the lowest go first. A function of its arguments alone, so that all ranks agree."""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 1 << 32


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicIds:
    """Ids that nobody lists: any 64-bit integers, each of which gets a row when it comes (decision 0074).

    The clock is the step of the table. All of it belongs to the model.
    """

    admit_after: int = 1
    """An id gets its row in the batch in which it has come this often. Before, it reads its own initial row, and
    nothing of it is learned."""

    admit_count: str = "exact"
    """How ids that are not admitted yet are counted: "exact", in a list of as many ids as the table has rows, or
    "sketch", in a count-min sketch, which estimates counts of any number of ids (`kernels.id_sketch`)."""

    eviction: Eviction | Score = Eviction.LRU
    """Which rows go when a shard is full: "lru", "lfu", or those that a function scores lowest."""

    evicted_share: float = 1 / 16
    """How much of a full shard goes at once, at least: to look for the right ones costs a pass over its ids."""

    expire_after: int | None = None
    """A row that no training batch has had for so many steps goes, a 16th of them later at most. So does the
    exact count of an id that is not admitted yet. None: never."""

    unadmitted: str = "own"
    """What an id without a row reads: "own", its initial row; or "shared", a row that all such ids of a row shard have
    in common, and train."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            admit_after: int = 1,
            admit_count: str = "exact",
            eviction: Eviction | str | Score = Eviction.LRU,
            evicted_share: float = 1 / 16,
            expire_after: int | None = None,
            unadmitted: str = "own",
        ) -> None: ...

    def __post_init__(self) -> None:
        member = _member(Eviction, self.eviction)
        if member is None and not callable(self.eviction):
            allowed = ", ".join(one.value for one in Eviction)
            raise ConfigError(f"eviction {self.eviction}; allowed: {allowed}, or a function that scores ids")
        object.__setattr__(self, "eviction", member or self.eviction)
        if not _is_count(self.admit_after):
            raise ConfigError(f"admit_after {self.admit_after!r}; allowed: 1 to 2^32 - 1")
        if self.admit_count not in ("exact", "sketch"):
            raise ConfigError(f"admit_count {self.admit_count!r}; allowed: exact, sketch")
        if self.admit_count == "sketch" and self.admit_after > COUNT_MAX:
            raise ConfigError(f"admit_after {self.admit_after} with a sketch; allowed: 1 to {COUNT_MAX}")
        if not isinstance(self.evicted_share, int | float) or not 0 < self.evicted_share <= 1:
            raise ConfigError(f"evicted_share {self.evicted_share!r}; allowed: above 0, up to 1")
        if self.expire_after is not None and not _is_count(self.expire_after):
            raise ConfigError(f"expire_after {self.expire_after!r}; allowed: 1 to 2^32 - 1, or None")
        if self.unadmitted not in ("own", "shared"):
            raise ConfigError(f"unadmitted {self.unadmitted}; allowed: own, shared")

    def __str__(self) -> str:
        """The same on all ranks: functions by their names."""
        told = {one.name: getattr(self, one.name) for one in fields(self)}
        if not isinstance(self.eviction, Eviction):
            told["eviction"] = getattr(self.eviction, "__qualname__", type(self.eviction).__qualname__)
        return f"DynamicIds({', '.join(f'{name}={value}' for name, value in told.items())})"

    @property
    def directories(self) -> tuple[str, ...]:
        """The states of a shard that this needs (`ShardSpec.directories`)."""
        if self.admit_after == 1:
            return ("ids",)
        return ("ids", "candidates" if self.admit_count == "exact" else "sketch")


ENTRY_BYTES: Final = 16
INDEX_BYTES: Final = 6.25
"""Of a directory, for each row: what is known of its id, and where it is found."""

_KINDS: Final[dict[str, type[Enum]]] = {
    "pooling": Pooling, "precision": Precision, "rounding": Rounding, "bounds": Bounds, "home": Home
}  # fmt: skip


def _member(kind: type[Enum], given: object) -> Enum | None:
    """The member of `kind` that is given: itself, its name or value, or a data type of torch. None: no member."""
    for one in kind:
        names = (one.name.lower(), str(one.value).removeprefix("torch."))
        if given is one or given is one.value or (isinstance(given, str) and given.lower() in names):
            return one
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One embedding table of the model. All ranks give the same.

    Members of enumerations may be given by name, as torch takes them: `pooling="mean"`, `precision="bf16"` or
    `torch.bfloat16`.
    """

    name: str
    rows: int
    dim: int
    features: tuple[str, ...] = ()
    """The features that look ids up in it. Empty: one feature, with the table's name. Tables may share a feature."""

    pooling: Pooling = Pooling.SUM
    """`SUM` or `MEAN` for `ShardedEmbeddingBags`, `NONE` for `ShardedEmbeddings`."""

    precision: Precision = Precision.FP32
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """May be given by name, such as "adam" (`OptimizerSpec.named`), or as `Optimizer.ADAM`."""

    lr: float | None = None
    """Its learning rate, where it differs from its module's. It belongs to the run, and decides no group of tables."""

    rounding: Rounding = Rounding.STOCHASTIC
    """How updated weights are stored in fp16 and bf16."""

    bounds: Bounds = Bounds.ERROR
    """What is done with ids outside [0, rows). A dynamic table takes all ids; with `IGNORE` all but -1, the padding."""

    ids: DynamicIds | None = None
    """Ids are not row numbers, but any 64-bit integers, which get rows as they come: `ids="dynamic"`, or
    `DynamicIds(...)`. `rows` is then the most rows that the table may have, and memory grows with those in use. None:
    an id is the number of its row.
    """

    initial: Initial | None = None
    """Called as `initial(rows, generator)`: fills float32 `rows`, [n, dim], in place, with numbers of this
    `torch.Generator` alone: `initial=lambda rows, generator: rows.normal_(std=0.01, generator=generator)`. Each block
    of 4,096 rows has a call and a generator of its own.

    None: uniform within 1 / sqrt(rows), as in the reference code of DLRM (Naumov et al. 2019). Rows that are there
    already are set afterwards, by `TableHandle.set_rows`.
    """

    row_shards: int = 1
    """The number of ranges of rows. A bag is summed inside each range, and then over ranges in the canonical tree.

    With fewer rows than shards some shards are empty.
    """

    column_shards: int = 1
    """The number of ranges of columns. Each range has its own row-wise optimizer states."""

    train_rank: int | None = None
    """The table is a tensor train of this rank: three small cores, from which its rows are computed."""

    home: Home | None = None
    """Where its rows are. None: in files if the module has a store, else in the memory of the module's device.

    It belongs to the run: a checkpoint may be read with another home.
    """

    if TYPE_CHECKING:
        # What the generated one takes: fields have members alone, for those who read them.
        def __init__(
            self,
            *,
            name: str,
            rows: int,
            dim: int,
            features: Sequence[str] = (),
            pooling: Pooling | str = Pooling.SUM,
            precision: Precision | str | torch.dtype = Precision.FP32,
            optimizer: OptimizerSpec | Optimizer | str = ...,
            lr: float | None = None,
            rounding: Rounding | str = Rounding.STOCHASTIC,
            bounds: Bounds | str = Bounds.ERROR,
            ids: DynamicIds | str | None = None,
            initial: Initial | None = None,
            row_shards: int = 1,
            column_shards: int = 1,
            train_rank: int | None = None,
            home: Home | str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        def refuse(what: str, allowed: str) -> None:
            raise ConfigError(f"table {self.name}: {what} {getattr(self, what)}; allowed: {allowed}")

        for what, kind in _KINDS.items():
            given = getattr(self, what)
            if given is None and what == "home":
                continue
            member = _member(kind, given)
            if member is None:
                refuse(what, ", ".join(one.name.lower() for one in kind))
            object.__setattr__(self, what, member)
        if isinstance(self.ids, str) and self.ids == "dynamic":
            object.__setattr__(self, "ids", DynamicIds())
        if self.ids is not None and not isinstance(self.ids, DynamicIds):
            refuse("ids", '"dynamic", DynamicIds(...), or None')
        if isinstance(self.optimizer, str):
            try:
                object.__setattr__(self, "optimizer", OptimizerSpec.named(self.optimizer))
            except ConfigError as error:
                raise ConfigError(f"table {self.name}: {error}") from None
        if isinstance(self.optimizer, Optimizer):
            object.__setattr__(self, "optimizer", OptimizerSpec(kind=self.optimizer))
        if isinstance(self.features, list):
            object.__setattr__(self, "features", tuple(self.features))
        if not isinstance(self.optimizer, OptimizerSpec):
            refuse("optimizer", "an OptimizerSpec, a member of Optimizer, or a name")
        if not isinstance(self.features, tuple):
            refuse("features", "a tuple or a list of names")
        if self.initial is not None and not callable(self.initial):
            refuse("initial", "a function of rows [n, dim] and a torch.Generator, or None")
        if self.lr is not None and not 0 <= self.lr < math.inf:
            refuse("lr", "0 or more, or None")
        if not self.features:
            object.__setattr__(self, "features", (self.name,))
        if self.rows < 1:
            refuse("rows", "1 or more")
        if self.dim < 1:
            refuse("dim", "1 or more")
        if not 1 <= self.row_shards <= MAX_SHARDS:
            refuse("row_shards", f"1 to {MAX_SHARDS}")
        if not 1 <= self.column_shards <= min(self.dim, MAX_SHARDS):
            refuse("column_shards", f"1 to {min(self.dim, MAX_SHARDS)}")
        if -(-self.dim // self.column_shards) > MAX_DIM:
            refuse("dim", f"at most {MAX_DIM} columns a shard; give more column_shards")
        if self.train_rank is not None:
            for what, least in (("row_shards", 1), ("column_shards", 1), ("initial", None)):
                if getattr(self, what) != least:
                    refuse(what, f"{least} with a train_rank")
            if self.home is Home.FILE:
                raise ConfigError(f"table {self.name}: home file with a train_rank; allowed: dram, hbm")
            self.spec_of(0, 0)
        if self.ids is not None:
            if self.train_rank is not None:
                raise ConfigError(f"table {self.name}: dynamic ids with a train_rank; allowed: one of them")
            if self.bounds is Bounds.WRAP:
                raise ConfigError(f"table {self.name}: bounds wrap with dynamic ids; allowed: error, ignore")
            if self.ids.unadmitted == "shared" and self.pooling is Pooling.NONE:
                # Owners get the sum of an id's gradients in several slices. A row of several ids has another order.
                raise ConfigError(f"table {self.name}: unadmitted shared with pooling none; allowed: own")
            if self.ids.unadmitted == "shared" and self.rows < 2 * self.row_shards:
                refuse("rows", f"{2 * self.row_shards} or more: each row shard has a row that ids share")
            if "sketch" in self.ids.directories and self.rows < 2 * self.row_shards:
                refuse("rows", f"{2 * self.row_shards} or more: the sketch of a row shard has a row fewer")

    def spec_of(self, row: int, column: int) -> ShardSpec:
        """A shard as a table of an engine."""
        rows, columns, name = self.row_range(row), self.column_range(column), f"{self.name}/{row}.{column}"
        if self.train_rank is not None:
            return TensorTrainSpec.of_rank(
                name=name, row_count=self.rows, dim=self.dim, rank=self.train_rank, precision=self.precision
            )
        return ShardSpec(
            name=name,
            row_count=rows.size,
            dim=columns.size,
            precision=self.precision,
            first_row=rows.low,
            # Rows of one column shard take their random numbers from one stream, wherever rows are cut.
            stream_name=f"{self.name}/{column}",
            directories=() if self.ids is None else self.ids.directories,
        )

    def as_train(self, rank: int) -> Table:
        """The table as a tensor train of this rank, if that has fewer parameters; else the table itself."""
        train = replace(self, train_rank=rank, home=None if self.home is Home.FILE else self.home)
        spec = train.spec_of(0, 0)
        return train if isinstance(spec, TensorTrainSpec) and spec.compression > 1 else self

    def row_range(self, shard: int) -> Range:
        """The rows of a row shard."""
        return Range(shard * self.rows // self.row_shards, (shard + 1) * self.rows // self.row_shards)

    def id_of_first_row(self, shard: int) -> int:
        """What is subtracted from ids that go to a row shard. Those of a dynamic table stay as they are."""
        return 0 if self.ids is not None else self.row_range(shard).low

    @property
    def has_wide_ids(self) -> bool:
        """Whether ids need 64 bits on their way."""
        return self.ids is not None or self.rows > 1 << 31

    @property
    def row_borders(self) -> list[int]:
        """Where each row shard begins, and the end of the last one."""
        return [self.row_range(row).low for row in range(self.row_shards)] + [self.rows]

    def column_range(self, shard: int) -> Range:
        """The columns of a column shard."""
        return Range(shard * self.dim // self.column_shards, (shard + 1) * self.dim // self.column_shards)


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """A virtual shard of a table: the rows of one row shard, the columns of one column shard."""

    table: int
    """The number of the table in the model."""

    row: int
    column: int


def shards_of(tables: Sequence[Table]) -> list[Shard]:
    """All shards of the model, in its order."""
    return [
        Shard(number, row, column)
        for number, table in enumerate(tables)
        for row in range(table.row_shards)
        for column in range(table.column_shards)
    ]


def shard_name(tables: Sequence[Table], shard: Shard) -> str:
    """The name of a shard in checkpoints and placements. It does not depend on who has it."""
    return f"{tables[shard.table].name}/{shard.row}.{shard.column}"


def shard_spec(tables: Sequence[Table], shard: Shard) -> ShardSpec:
    """The shard as a table of an engine."""
    return tables[shard.table].spec_of(shard.row, shard.column)


def shard_bytes(tables: Sequence[Table], shard: Shard) -> int:
    """Memory of a shard with its optimizer states."""
    tensors = expected(shard_spec(tables, shard), tables[shard.table].optimizer).values()
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors)


def directory_bytes(tables: Sequence[Table], shard: Shard) -> float:
    """Memory of the directories of a shard, which stay in memory where its rows are in a file: 16 bytes a row for each,
    which are a part of `shard_bytes`, and what finds an id there (decision 0074).
    """
    table = tables[shard.table]
    if table.ids is None:
        return 0
    rows = table.row_range(shard.row).size
    return sum(rows * (ENTRY_BYTES + (0 if name == "sketch" else INDEX_BYTES)) for name in table.ids.directories)


def output_names(tables: Sequence[Table]) -> tuple[str, ...]:
    """The name of each feature's output, in the model's order: FEATURE, or FEATURE@TABLE if several tables have it."""
    named = Counter(feature for table in tables for feature in table.features)
    return tuple(
        feature if named[feature] == 1 else f"{feature}@{table.name}" for table in tables for feature in table.features
    )


def check_tables(tables: Sequence[Table]) -> None:
    """Raises `ConfigError` unless names of tables and of outputs are unique."""
    for what, names in (
        ("table", [table.name for table in tables]),
        ("output", output_names(tables)),
    ):
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ConfigError(f"two {what}s are called {twice[0]}")
    if not tables:
        raise ConfigError("a model without tables; allowed: one or more")


_CPU: Final = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Homes:
    """The kinds of memory that a module, or a run, has for tables: where the rows of each table lie.

    A table names its home itself, or its module decides. No home changes a bit.
    """

    device_type: str = _CPU
    """The type of the module's device: "cpu" or "cuda"."""

    has_store: bool = False
    """Whether there is a place for files."""

    @property
    def memory(self) -> Home:
        """The memory of the module's device."""
        return Home.DRAM if self.device_type == _CPU else Home.HBM

    def of(self, table: Table, *, is_replicated: bool = False) -> Home:
        """Where the table is. `is_replicated`: every rank has all of its rows. Such rows are never in files.

        Raises `ConfigError` if the table names a home that cannot be, and for dynamic ids with a copy on every rank.
        """
        if table.ids is not None and is_replicated:
            # A rank would number the ids of its own samples alone.
            raise ConfigError(
                f"table {table.name}: dynamic ids with a copy on every rank (data_parallel); allowed: other placements"
            )
        if table.home is None:
            # Tensor trains are small.
            is_in_file = self.has_store and table.train_rank is None and not is_replicated
            return Home.FILE if is_in_file else self.memory
        reason = None
        if table.home is Home.FILE and not self.has_store:
            reason = "without a table store"
        elif table.home is Home.FILE and is_replicated:
            reason = "with a copy on every rank (data_parallel)"
        elif table.home is Home.HBM and self.memory is not Home.HBM:
            reason = f"with tables on {self.device_type}"
        if reason is not None:
            allowed = ", ".join(dict.fromkeys((Home.DRAM.value, self.memory.value)))
            raise ConfigError(f"table {table.name}: home {table.home.value} {reason}; allowed: {allowed}")
        return table.home

    def is_on_host(self, table: Table) -> bool:
        """Whether the table is in host memory beside tables on a device, and so needs an engine there."""
        return table.home is Home.DRAM and self.memory is not Home.DRAM

    def in_files(self, tables: Sequence[Table], replicated: Collection[int]) -> list[str]:
        """The names of tables in files. `replicated`: numbers of the tables that every rank has whole.

        Raises `ConfigError` if a home cannot be.
        """
        return [
            table.name
            for number, table in enumerate(tables)
            if self.of(table, is_replicated=number in replicated) is Home.FILE
        ]


IN_MEMORY: Final = Homes()
"""The homes of a module on the CPU without a store."""
