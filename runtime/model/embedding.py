# SPDX-License-Identifier: Apache-2.0
"""This rank's embedding tables as the trainer uses them, and their initial weights.

Initial weights depend on the seed and the tables' names alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from torch import Generator, Tensor

from sennit.offload.ingest.facts import TableFacts
from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import TableSpec
from sennit.runtime.kernels.tensor_train import TensorTrainSpec, initialise
from sennit.runtime.model.tensor_train import TensorTrainRule, parts, table_spec

ROW_WISE_ADAGRAD: Final = OptimizerSpec(kind=Optimizer.ROW_WISE_ADAGRAD, epsilon=1e-8)
"""Neo, Mudigere et al. 2022, section 4.1.4."""


class EmbeddingTables(Protocol):
    """The tables of one rank, wherever their rows are. Every batch is announced, looked up, and updated or released."""

    batches_ahead: int
    """How many batches after the current one should have been announced."""

    step: int
    """Number of updates so far."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tables."""

    def announce(self, batch: Batch) -> Any:
        """Announces a batch, and returns at once. The result is the argument of `lookup`, `update` and `release`."""

    def lookup(self, announced: Any) -> Tensor:
        """The flat float32 result (`EmbeddingEngine.lookup`)."""

    def update(self, announced: Any, gradient: Tensor, *, rate: float) -> None:
        """Takes one optimizer step on the rows of the batch that was looked up."""

    def release(self, announced: Any) -> None:
        """Ends a batch without an update."""

    def weights(self) -> dict[str, Tensor]:
        """Float32 [row_count, dim] of each table, as `table.NAME`."""

    def state(self) -> dict[str, Tensor]:
        """Weights and the optimizer's float32 [row_count] as `row_state.NAME`, for checkpoints."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes over the tensors of `state` with new values. No batch may be announced."""

    def counters(self) -> dict[str, int]:
        """Counters of the cache before a store, by name; empty if there is none."""

    def close(self) -> None:
        """Releases everything that is not memory."""


class ResidentTables:
    """Tables in this process's memory."""

    batches_ahead = 0

    def __init__(
        self,
        tables: Sequence[TableFacts],
        *,
        dim: int,
        seed: int,
        optimizer: OptimizerSpec = ROW_WISE_ADAGRAD,
        tensor_train: TensorTrainRule | None = None,
    ) -> None:
        self.engine = embedding_engine(tables, dim=dim, seed=seed, optimizer=optimizer, tensor_train=tensor_train)

    @property
    def step(self) -> int:
        return self.engine.step

    @step.setter
    def step(self, step: int) -> None:
        self.engine.step = step

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.engine.specs)

    def announce(self, batch: Batch) -> Batch:
        return batch

    def lookup(self, announced: Batch) -> Tensor:
        return self.engine.lookup(announced)

    def update(self, announced: Batch, gradient: Tensor, *, rate: float) -> None:
        self.engine.update(announced, gradient, rate=rate)

    def release(self, announced: Batch) -> None:
        pass

    def weights(self) -> dict[str, Tensor]:
        """Weights by name. A tensor train has its cores, as `table.NAME.core1` and so on."""
        return {f"table.{name}": self.engine.weight(name) for name in self.engine.names}

    def state(self) -> dict[str, Tensor]:
        """The tables' own memory, so that loading writes into it."""
        return self.weights() | {f"row_state.{name}": self.engine.states(name)["sum"] for name in self.engine.names}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def embedding_engine(
    tables: Sequence[TableFacts],
    *,
    dim: int,
    seed: int,
    optimizer: OptimizerSpec = ROW_WISE_ADAGRAD,
    tensor_train: TensorTrainRule | None = None,
) -> EmbeddingEngine:
    """An engine with the tables that one rank owns, in float32."""
    engine = EmbeddingEngine([table_spec(table, dim=dim, rule=tensor_train) for table in tables], optimizer)
    for table, spec in zip(tables, engine.specs, strict=True):
        if isinstance(spec, TensorTrainSpec):
            # The variance of the distribution of `fill`.
            deviation = (3 * table.row_count) ** -0.5
            initialise(spec, [engine.weight(core.name) for core in spec.cores], deviation, stream(table, seed))
        else:
            fill(engine.weight(table.name), table, stream(table, seed))
    return engine


def table_bytes(spec: TableSpec, optimizer: OptimizerSpec = ROW_WISE_ADAGRAD) -> int:
    """Memory for a table, or for the cores of a tensor train, with optimizer states."""
    return sum(
        part.row_count * part.dim * part.precision.dtype.itemsize
        + sum(4 * math.prod(optimizer.state_shape(name, part)) for name in optimizer.states)
        for part in parts(spec)
    )


def table_specs(tables: Sequence[TableFacts], *, dim: int) -> list[TableSpec]:
    return [TableSpec(name=table.name, row_count=table.row_count, dim=dim) for table in tables]


def stream(table: TableFacts, seed: int) -> Generator:
    """The generator of the table's initial weights, which are drawn row after row."""
    return torch_stream(seed, "table", table.name)


def fill(rows: Tensor, table: TableFacts, generator: Generator) -> None:
    """Draws initial weights for the next rows of a table.

    They are uniform within 1 / sqrt(row_count), as in the reference code of Naumov et al. 2019.
    """
    bound = table.row_count**-0.5
    rows.uniform_(-bound, bound, generator=generator)
