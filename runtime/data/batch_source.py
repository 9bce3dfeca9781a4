# SPDX-License-Identifier: Apache-2.0
"""Where a trainer takes its batches from. The first source there is: samples that lie in this process's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sennit.offload.sketch import Sketch
from sennit.runtime.data.combined import CombinedBatch
from sennit.runtime.data.features import RawSamples
from sennit.runtime.data.order import Order
from sennit.runtime.data.prepared import PreparedData
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.samples import Samples
from sennit.runtime.model.sharding import Table
from sennit.runtime.training.config import TrainingConfig


class BatchSource(Protocol):
    """The batches of one rank, by their number in the order.

    They are taken one after the other, from the one it begins with onwards, and each is released before the next.
    """

    order: Order
    tables: tuple[Table, ...]
    dense_count: int
    fingerprint: str
    """Of the data set."""

    preprocessing: Preprocessing | None
    """What was fitted to its training rows; None where only the feeders know."""

    def begin(self, number: int, table_order: Sequence[int]) -> None:
        """The first batch that will be taken, and the order of tables in all of them."""

    def take(self, number: int) -> CombinedBatch:
        """This rank's part of the batch."""

    def release(self, number: int) -> None:
        """The batch is used up: its tensors may be overwritten from now on."""

    def counters(self) -> dict[str, int | float]:
        """What was done to get them, by name; empty where nothing was."""

    def sketch(self) -> Sketch | None:
        """How often rows of tables were in this rank's batches, by the tables' names; None where nobody counts."""


class MemorySource:
    """Samples in memory, which every rank holds."""

    def __init__(self, data: PreparedData, *, rank: int, world_size: int) -> None:
        """Of that rank of so many."""
        self.order = data.order
        self.tables = tuple(
            Table(name=column.name, row_count=column.row_count, mean_length=column.mean_length)
            for column in data.samples.columns
        )
        self.dense_count = data.samples.dense.shape[1]
        self.fingerprint = data.fingerprint
        self.preprocessing: Preprocessing | None = data.preprocessing
        self._samples = data.samples
        self._rank, self._world_size = rank, world_size
        self._table_order: Sequence[int] = range(len(self.tables))

    def begin(self, number: int, table_order: Sequence[int]) -> None:
        self._table_order = table_order

    def take(self, number: int) -> CombinedBatch:
        return self._samples.batch(self.order.part(number, self._rank, self._world_size), self._table_order)

    def release(self, number: int) -> None:
        pass

    def counters(self) -> dict[str, int | float]:
        return {}

    def sketch(self) -> Sketch | None:
        return None


def prepared(data: RawSamples | Samples, config: TrainingConfig) -> PreparedData:
    """The data as a run with this configuration trains on it."""
    name, count = data.name, len(data)
    return PreparedData.of(data, order_of(config, name, count))


def order_of(config: TrainingConfig, name: str, sample_count: int) -> Order:
    """The order that a run with this configuration has."""
    return Order(
        name=name,
        sample_count=sample_count,
        seed=config.seed,
        split=config.split,
        eval_fraction=config.eval_fraction,
        batch_size=config.batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )
