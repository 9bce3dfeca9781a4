# SPDX-License-Identifier: Apache-2.0
"""The shards of one engine on this rank: owners look them up and update them. Their rows are in memory here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch, Block
from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.optimizers import OptimizerSpec
from sennit.runtime.kernels.spec import ShardSpec
from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.runtime.kernels.uploads import Uploads
from sennit.runtime.sharded.batch_parts import chosen_blocks

Rates = tuple[float | None, ...]
"""The learning rate of each table of a model, in its order. None: the table is frozen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A shard that this rank holds, or a core of a tensor train."""

    name: str
    weight: Tensor
    """[rows, columns] in the table's precision. The table's own memory, or a copy if rows are in a file."""

    states: dict[str, Tensor]
    """The states of the optimizer, float32; and the directories of a dynamic table, int64 [rows, 2]."""


class Announced:
    """A batch whose rows will be looked up, and then updated or released."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        """The lookups as the engine takes them, once `Shards.fetch` has returned."""

        self.given_up: list[Mapping[int, Tensor]] = []
        """Rows by table that other ids have got since this batch was looked up (`Shards.current`)."""

        self.trained: frozenset[int] = frozenset()
        """The tables of the model whose rows this batch will update: `fetch` gives rows to new ids of dynamic ones."""

        self.admits = False
        """Whether each of its ids gets a row, however often it has come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evicted:
    """Rows of a dynamic table that went, with their last values."""

    table: str
    ids: Tensor
    """Int64 [n]"""

    rows: Tensor
    """[n, columns] in the table's precision, in host memory."""

    columns: slice
    """The columns of the table that these are: all of them, unless it has column shards."""


class Expected(NamedTuple):
    """The shape and type of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Shards:
    """Tables of an engine in memory. Batches are announced, looked up, and then updated or released."""

    def __init__(self, engine: EmbeddingEngine, tables: Sequence[int], spares: Sequence[int] = ()) -> None:
        """`tables`: the number of each shard's table in the model. `spares`: for each shard, how many rows the engine
        has behind its own; empty: none.
        """
        self.engine, self.tables = engine, tuple(tables)
        counts = spares or [0] * len(engine.specs)
        self.specs: tuple[ShardSpec, ...] = tuple(
            replace(spec, row_count=spec.row_count - count) if count else spec
            for spec, count in zip(engine.specs, counts, strict=True)
        )
        self._uploads: Uploads | None = None

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.engine.step

    @step.setter
    def step(self, step: int) -> None:
        self.engine.step = step

    def announce(self, batch: Batch, begins: Mapping[int, Tensor] | None = None) -> Announced:
        """Starts to fetch the rows of a batch, and to copy its ids to a GPU. Returns at once.

        `begins`, int64 [n] by shard: rows that `begin_rows` gives values to before the batch is looked up, so that
        nobody has to read them.
        """
        device = self.engine.device
        if device.type == "cpu" or batch.lengths.device.type != "cpu" or not len(batch.lengths):
            return Announced(batch)
        return Announced(batch.uploaded(self._copies))

    def fetch(self, announced: Announced) -> None:
        """Waits for the rows of a batch. If they do not come, the batch can only be released."""

    def settle(self, announced: Announced) -> None:
        """The rows of a batch have been fetched on all ranks. A batch that is released before has changed nothing."""

    def lookup(self, announced: Announced) -> Tensor:
        """The flat float32 result (`EmbeddingEngine.lookup`) of a batch that was fetched."""
        return self.engine.lookup(announced.batch)

    def weight_gradient(self, announced: Announced, gradient: Tensor) -> Tensor:
        """`EmbeddingEngine.weight_gradient` of a batch that was looked up."""
        return self.engine.weight_gradient(announced.batch, gradient)

    def update(self, batch: Batch, gradient: Tensor, *, rate: Rates) -> None:
        """`EmbeddingEngine.update`, with blocks of batches that were looked up (`Announced.batch`).

        Tables that are frozen, or whose rate is 0, stay as they are, and so do their states. All others take the same
        step, with one update for each rate.
        """
        of_rate: dict[float, list[int]] = {}
        for place, table in enumerate(batch.table_of_block):
            if own := rate[self.tables[table]]:
                of_rate.setdefault(own, []).append(place)
        dims, before = [spec.dim for spec in self.specs], self.engine.step
        error: GradientError | None = None
        for own, places in of_rate.items():
            is_whole = len(places) == len(batch.table_of_block)
            part = (batch, gradient) if is_whole else chosen_blocks(batch, gradient, places, dims)
            self.engine.step = before
            try:
                self.engine.update(*part, rate=own)
            except GradientError as bad:
                error = error or bad
        self.engine.step = before + 1
        if error is not None:
            raise error

    def ids(self, batch: Batch, block: Block) -> Tensor:
        """Int64 [lookups]: the ids of a block of a batch that was looked up."""
        return batch.values[block.lookups].to(torch.int64)

    def spare_line(self, number: int) -> int:
        """The line of the last spare row of a shard, which no batch has for longer than a step. A line is a row as the
        engine takes it.
        """
        return self.engine.specs[number].row_count - 1

    def begin_rows(self, announced: Announced, number: int, rows: Tensor, values: Tensor) -> None:
        """Rows of a batch that was fetched, int64 [n], begin anew: weights are `values`, float32 [n, columns], and
        states are 0.
        """
        self._begin(number, self._lines_of(announced, number, rows), values)

    def _begin(self, number: int, lines: Tensor, values: Tensor) -> None:
        """What is in `lines`, int64 [n], begins anew (`begin_rows`)."""
        name = self.engine.specs[number].name
        weight = self.engine.weight(name)
        lines, values = self._there(lines, values.to(weight.dtype))
        weight.index_copy_(0, lines, values)
        for state in self.engine.states(name).values():
            state.index_fill_(0, lines, 0)

    def _there(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors in host memory, in the memory of the tables. Nobody waits for the copies."""
        return tensors if self.engine.device.type == "cpu" else self._copies.begin(tensors).take()

    @property
    def _copies(self) -> Uploads:
        if self._uploads is None:
            self._uploads = Uploads(self.engine.device)
        return self._uploads

    def _lines_of(self, announced: Announced, number: int, rows: Tensor) -> Tensor:
        """Int64 [n]: the line of each of `rows`, distinct rows of a batch that was fetched."""
        return rows

    def weights(self, number: int, rows: Tensor) -> Tensor:
        """A copy in host memory of the weights of `rows`, int64 [n], of a shard, between updates."""
        return self.engine.weight(self.engine.specs[number].name)[rows]

    def release(self, announced: Announced, *, is_dirty: bool) -> None:
        """Ends a batch. `is_dirty`: its rows were updated."""

    def held(self) -> Iterator[Held]:
        """The shards, one after the other."""
        own = {spec.name: spec.row_count for spec in self.specs}
        for name in self.engine.names:
            weight, states = self.engine.weight(name), self.engine.states(name)
            # A core of a tensor train has a name of its own.
            if (count := own.get(name, len(weight))) < len(weight):
                weight, states = weight[:count], {key: state[:count] for key, state in states.items()}
            yield Held(name=name, weight=weight, states=states)

    def changes(self, changed: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields tensors with the `changed` rows (int64, rising, by shard), copied to host memory.

        Cores of tensor trains are not among `changed`: they come whole, and are the tables' own memory.
        """
        yield from changed_of(self.held(), changed)

    def in_memory(self) -> Iterator[Held]:
        """The shards of `held` that are the tables' own memory, and no copies."""
        return self.held()

    def check_idle(self) -> None:
        """Raises `ArgumentError` if rows of a file are fetched for a batch that is not done."""

    @property
    def in_files(self) -> frozenset[str]:
        """The names of the shards in files. `held` copies them."""
        return frozenset()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes over the tensors of a checkpoint, by the names of `expected`."""
        self.load_memory(state)

    def load_memory(self, state: Mapping[str, Tensor]) -> None:
        """`load`, but for shards in files."""
        for held in self.in_memory():
            for key, tensor in tensors_of(held).items():
                tensor.copy_(state[key])

    def wait(self) -> None:
        """Waits until the rows of all batches that are announced are here, or cannot come."""

    def counters(self) -> dict[str, int]:
        """Counters of the caches before files, by name; empty if there is none."""
        return {}

    def current(self, announced: Announced, batch: Batch) -> Batch:
        """Blocks of `announced`, without rows that other ids have got since it was looked up."""
        return batch

    def follow_directories(self) -> None:
        """From now on `changed_entries` knows which entries of directories change."""

    def changed_entries(self, *, clear: bool) -> dict[int, Tensor]:
        """For each dynamic table, by its number here: int64 [n], the rows of which an entry of a directory has changed
        since `follow_directories`, or the last call with `clear`.
        """
        return {}

    def id_counters(self) -> dict[int, Counter[str]]:
        """For each dynamic table, by its number in the model: `rows` here, `used` of them; `lookups` of ids, and
        `hits`, those that had a row before; ids `admitted`, `evicted`, `expired`; and distinct ids of batches that got
        none (`without_row`).
        """
        return {}

    def on_evicted(self, told: Callable[[Evicted], object] | None) -> None:
        """From now on `told` hears of rows that dynamic tables take away; None: nobody does."""

    def take_failure(self) -> Exception | None:
        """What `told` has raised and nobody was told, once."""
        return None

    def close(self) -> None:
        """Releases everything that is not memory."""


def parts_of(spec: ShardSpec) -> tuple[ShardSpec, ...]:
    """The tables that store `spec`: the cores of a tensor train, or itself."""
    return spec.cores if isinstance(spec, TensorTrainSpec) else (spec,)


def expected(spec: ShardSpec, optimizer: OptimizerSpec) -> dict[str, Expected]:
    """The tensors of a shard in a checkpoint, by name."""
    found = {}
    for part in parts_of(spec):
        found[f"{part.name}.weight"] = Expected((part.row_count, part.dim), part.precision.dtype)
        for name in optimizer.states:
            found[f"{part.name}.{name}"] = Expected(optimizer.state_shape(name, part), torch.float32)
        for name in part.directories:
            found[f"{part.name}.{name}"] = Expected((part.row_count, 2), torch.int64)
    return found


def changed_of(held: Iterable[Held], changed: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """`Shards.changes` for shards in memory."""
    for one in held:
        rows = changed.get(one.name)
        for key, tensor in tensors_of(one).items():
            yield key, tensor if rows is None else tensor.index_select(0, rows.to(tensor.device)).cpu()


def tensors_of(held: Held) -> dict[str, Tensor]:
    """The tensors of a shard by their names in a checkpoint."""
    return {f"{held.name}.weight": held.weight} | {f"{held.name}.{name}": held.states[name] for name in held.states}
