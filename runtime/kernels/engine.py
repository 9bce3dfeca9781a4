# SPDX-License-Identifier: Apache-2.0
"""Owns embedding tables with their optimizer states, and runs one implementation of the operator on them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch, RowSums
from sennit.runtime.kernels.checks import GradientError, check_gradient, places_of_outputs, resolve
from sennit.runtime.kernels.implementations import implementation, products
from sennit.runtime.kernels.layout import ShardMemory
from sennit.runtime.kernels.optimizers import OptimizerSpec
from sennit.runtime.kernels.spec import Bounds, Pooling, Rounding, ShardSpec
from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.runtime.kernels.tensor_train_tables import TensorTrainTables, Update
from sennit.transport.errors import ArgumentError, ConfigError, Unsupported


class EmbeddingEngine:
    """Tables that share an optimizer.

    `lookup` reads, `update` takes one optimizer step. Batches are on the tables' device or in host memory, gradients on
    the device. Not thread-safe.
    """

    def __init__(
        self,
        tables: Iterable[ShardSpec],
        optimizer: OptimizerSpec,
        *,
        implementation_name: str = "native",
        bounds: Bounds = Bounds.ERROR,
        rounding: Rounding = Rounding.STOCHASTIC,
        seed: int = 0,
        device: torch.device | str = "cpu",
        memory: Sequence[ShardMemory | None] | None = None,
        threads: int = 1,
    ) -> None:
        """Makes tables of zeros; fill `weight(name)`. `seed`, 64 bits, is for stochastic rounding.

        `memory`: existing memory of the tables, in their order; None for those that get their own. `threads`: how many
        threads of the native implementation share each call; results do not depend on it. A table may be a tensor train
        (`TensorTrainSpec`). Each of its cores is then a table, with the name in its spec.
        """
        self.specs = tuple(tables)
        self.optimizer, self.bounds, self.rounding, self.seed = optimizer, bounds, rounding, seed
        if not 0 <= seed < 1 << 64:
            raise ConfigError(f"seed {seed}; allowed: 0 to 2^64 - 1")
        self.device = torch.device(device)
        self._implementation = implementation(implementation_name, threads=threads)
        if self.device.type != self._implementation.device_type:
            raise ConfigError(
                f"implementation {implementation_name} with tables on {self.device}; "
                f"allowed: {self._implementation.device_type} (triton reaches cuda, all others the cpu)"
            )
        if str(self.device) == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())  # as tensors have it
        self._tables = TensorTrainTables(
            self.specs,
            optimizer,
            self.device,
            operator=self._implementation,
            of_cores=implementation(implementation_name, threads=threads),
            products=products(implementation_name),
            memory=memory,
        )
        names = Counter(table.name for table in self.specs)
        names.update(core.spec.name for core in self._tables.cores)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ConfigError(f"two tables are called {twice[0]}")
        self._by_name = {table.spec.name: table for table in self._tables.memories}
        self.step = 0
        """Optimizer steps taken. Checkpoints must hold it."""
        self.ids_outside: Counter[str] = Counter()
        """Ids out of range in lookups, by table."""
        self.rows_skipped: Counter[str] = Counter()
        """Rows that updates skipped because their gradient was not finite, by table or core."""
        self.on_update: Callable[[Batch], None] | None = None
        """Called with the checked batch of each update, before any row changes."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raises `Unsupported`, in deepcopy and pickle: implementations have native parts."""
        raise Unsupported("a copy of an embedding engine", "save weight(name) and states(name) of its names, and step")

    @property
    def names(self) -> tuple[str, ...]:
        """The memory of everything with weights and states: tables, and the cores of tensor trains."""
        return tuple(self._by_name)

    def weight(self, name: str) -> Tensor:
        """[row_count, dim] in the table's precision; the engine's own memory. For a core, each row is a slice."""
        return self._by_name[name].weight

    def put(self, number: int, memory: ShardMemory) -> None:
        """Table `number`, no tensor train, is in `memory` from now on, which may have more rows."""
        self._tables.put(number, memory)
        self.specs = tuple(memory.spec if one == number else spec for one, spec in enumerate(self.specs))
        self._by_name = {table.spec.name: table for table in self._tables.memories}

    def materialise(self, name: str, first: int, count: int) -> Tensor:
        """Float32 [count, dim], a copy of the rows from `first` on, as a lookup returns them."""
        for number, spec in enumerate(self.specs):
            if spec.name == name:
                if not 0 <= first <= first + count <= spec.row_count:
                    raise ArgumentError(
                        f"table {name}: rows {first} to {first + count}; allowed: within 0 to {spec.row_count}"
                    )
                return self._tables.materialise(number, first, count)
        raise ArgumentError(f"table {name!r}; allowed: {', '.join(spec.name for spec in self.specs)}")

    def states(self, name: str) -> dict[str, Tensor]:
        """The optimizer states of a table by name (`OptimizerSpec.states`); the engine's own memory."""
        return self._by_name[name].states

    @property
    def memory(self) -> list[Tensor]:
        """Weight and states of each of `names`, in that order: all tensors that an update may change."""
        return [tensor for table in self._tables.memories for tensor in (table.weight, *table.states.values())]

    @contextmanager
    def placed(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside the block, the engine reads and writes `tensors` in place of its own `memory`."""
        if all(one.data_ptr() == other.data_ptr() for one, other in zip(tensors, self.memory, strict=True)):
            yield
            return
        own = self._by_name
        with self._tables.placed(tensors):
            self._by_name = {table.spec.name: table for table in self._tables.memories}
            try:
                yield
            finally:
                self._by_name = own

    def lookup(self, batch: Batch) -> Tensor:
        """The flat float32 result: for each block [bags, dim], or [lookups, dim] without pooling.

        Raises `ArgumentError` for bad lengths and, where bounds are `ERROR`, `IdError` for ids out of range.
        """
        batch, outside = self._checked(batch)
        batch = batch.to(self.device)
        for table, count in outside.items():
            self.ids_outside[self.specs[table].name] += count
        batch = self._tables.prepare(batch)
        if is_weighted_mean(batch):
            sums = self._implementation.lookup(self._tables.tables, as_sum(batch))
            return divided(sums, batch, self.specs)
        return self._implementation.lookup(self._tables.tables, batch)

    def weight_gradient(self, batch: Batch, gradient: Tensor) -> Tensor:
        """Float32 [lookups]: the gradient of `batch.weights`.

        It is computed from the result's gradient and the rows as they are now.
        """
        if batch.weights is None:
            raise ArgumentError("the batch has no weights")
        checked, _ = self._checked(batch)
        check_gradient(checked, gradient, self.specs, self.device)
        batch, gradient = self._on_sums(checked.to(self.device), gradient)
        batch = self._tables.prepare(batch)
        return self._implementation.weight_gradient(self._tables.tables, batch, gradient)

    def update(self, batch: Batch, gradient: Tensor, *, rate: float) -> None:
        """Takes one optimizer step at learning rate `rate` on the rows of `batch`, from the gradient of its lookup's
        result.

        Rows whose summed gradient is not finite are left unchanged and counted. After all others are updated,
        `GradientError` is raised.
        """
        checked, _ = self._checked(batch)
        check_gradient(checked, gradient, self.specs, self.device)
        constants = self.optimizer.constants(step=self.step + 1, rate=rate)
        if self.on_update is not None:
            self.on_update(checked)
        batch, gradient = self._on_sums(checked.to(self.device), gradient)
        self.step += 1
        update = Update(kind=self.optimizer.kind, constants=constants, rounding=self.rounding, seed=self.seed)
        bad = self._tables.update(batch, gradient, update)
        for part in bad:
            self.rows_skipped[part.name] += part.row_count
        if bad:
            raise GradientError(
                f"step {self.step}: the gradient of {sum(part.row_count for part in bad)} rows is not finite, "
                f"first table {bad[0].name} row {bad[0].first_row}; they were left as they were"
            )

    def sum_rows(self, batch: Batch, gradient: Tensor) -> list[RowSums]:
        """The summed gradients of all rows of `batch`, table by table; an update would make its step with these.

        Sums that are not finite are among them. Raises `Unsupported` for a tensor train, and otherwise as `update`.
        """
        checked, _ = self._checked(batch)
        check_gradient(checked, gradient, self.specs, self.device)
        batch, gradient = self._on_sums(checked.to(self.device), gradient)
        for table in batch.table_of_block:
            if isinstance(self.specs[table], TensorTrainSpec):
                raise Unsupported("sums of rows", f"table {self.specs[table].name} is a tensor train")
        return self._implementation.sum_rows(self._tables.tables, batch, gradient)

    def _on_sums(self, batch: Batch, gradient: Tensor) -> tuple[Batch, Tensor]:
        """A batch and its gradient as implementations take them."""
        if not is_weighted_mean(batch):
            return batch, gradient
        return as_sum(batch), scaled(gradient, batch, self.specs)

    def _checked(self, batch: Batch) -> tuple[Batch, dict[int, int]]:
        """What `resolve` returns. A batch in host memory is checked there, so that nobody waits for the device."""
        if batch.lengths.device not in (self.device, torch.device("cpu")):
            raise ArgumentError(f"the batch is on {batch.lengths.device}, the tables are on {self.device}")
        return resolve(batch, self.specs, self.bounds)


# Implementations know weighted sums, but no weighted means. So the engine makes weighted means from sums, for all of
# them: `(w · row + …) / float(length)`, as FBGEMM does. It takes one more pass over the vectors of bags.


def is_weighted_mean(batch: Batch) -> bool:
    return batch.weights is not None and batch.pooling is Pooling.MEAN


def as_sum(batch: Batch) -> Batch:
    """The batch whose sums are to be divided."""
    return dataclasses.replace(batch, pooling=Pooling.SUM)


def divided(sums: Tensor, batch: Batch, specs: Sequence[ShardSpec]) -> Tensor:
    """The flat result of a lookup, float32, from that of `as_sum(batch)`, which it overwrites."""
    for block, part in places_of_outputs(batch, specs):
        lengths = batch.lengths[block.bags].clamp(min=1).to(torch.float32)
        sums[part].view(block.bag_count, -1).div_(lengths.unsqueeze(1))
    return sums


def scaled(gradient: Tensor, batch: Batch, specs: Sequence[ShardSpec]) -> Tensor:
    """The gradient of the sums, from that of the means. Both are flat and float32."""
    found = torch.empty_like(gradient)
    for block, part in places_of_outputs(batch, specs):
        factors = torch.ones((), device=gradient.device) / batch.lengths[block.bags].clamp(min=1).to(torch.float32)
        torch.mul(
            factors.unsqueeze(1),
            gradient[part].view(block.bag_count, -1),
            out=found[part].view(block.bag_count, -1),
        )
    return found
