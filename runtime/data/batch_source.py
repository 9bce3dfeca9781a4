# SPDX-License-Identifier: Apache-2.0
"""The interface that a trainer takes its batches from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sennit.offload.ingest.facts import TableFacts
from sennit.offload.sketch import Sketch, SketchShape, ids_of_rows, sampled_rows
from sennit.runtime.data.batch import Batch
from sennit.runtime.data.numbering import Numbering
from sennit.runtime.data.preprocessing import Preprocessing, Scale
from sennit.runtime.data.samples import Samples
from sennit.runtime.data.schema import History


class BatchSource(Protocol):
    """The batches of one rank, by their number in the order.

    They are taken in order, from the first one onwards. Each is released before the next is taken.
    """

    tables: tuple[TableFacts, ...]
    dense_count: int
    label_names: tuple[str, ...]
    fingerprint: str
    """The fingerprint of the data set."""

    history: History | None
    """The histories that samples have; None: they have none."""

    integer_names: tuple[str, ...]
    """The columns that a model reads as they are (`Batch.integers`)."""

    preprocessing: Preprocessing | None
    """The preprocessing fitted to the training rows; None if only the feeders know it."""

    @property
    def order(self) -> Numbering:
        """Which batches there are."""

    def begin(self, number: int) -> None:
        """Sets the first batch that will be taken."""

    def take(self, number: int) -> Batch:
        """This rank's part of the batch, with the tables in the order of `tables`."""

    def scales(self, steps: int) -> tuple[Scale, ...] | None:
        """Those of dense features after so many training steps, whose batches were taken; None if they never change."""

    def restore_scales(self, steps: int, told: Sequence[Sequence[float]] | None) -> None:
        """Goes on after so many steps, while no batch is on its way. `told`: mean and deviation of each of `scales`."""

    def release(self, number: int) -> None:
        """Says that the batch is used up. Its tensors may be overwritten from now on."""

    def close(self, failure: str | None = None, *, goes_on: bool = False) -> None:
        """Says that no batch is taken any more: the run is over, has failed, or goes on in another group of ranks."""

    def sample(self) -> Samples | None:
        """Some samples, the same on every rank, to plan by; None: nobody has any before training."""

    def history_lengths(self, count: int) -> Sequence[int] | None:
        """Events of `count` samples that are spread over the data, with their own; None: they have no histories."""

    def counters(self) -> dict[str, int | float]:
        """Counters of the work done for the batches, by name; empty if there was none."""

    def program_ns(self) -> int | None:
        """Processor time of the kernel's program that makes the batches; None: there is none, or nobody counts."""

    def sketch(self) -> Sketch | None:
        """How often this rank's batches used each row, by table name; None if nobody counts."""


class IdCounter:
    """Counts the ids of a rank's batches, in the way of feeders."""

    def __init__(self, tables: Sequence[TableFacts], shape: SketchShape) -> None:
        self.sketch = Sketch(
            tables=[table.name for table in tables],
            table_rows=[None if table.is_dynamic else table.rows for table in tables],
            shape=shape,
        )

    def count(self, number: int, batch: Batch) -> None:
        lengths, values = batch.lengths.numpy(), batch.values.numpy()
        rows = sampled_rows(number, batch.sample_count, self.sketch.shape.one_row_in)
        ends = lengths.sum(1).cumsum()[:-1]
        self.sketch.add_sampled([ids_of_rows(*one, rows) for one in zip(lengths, np.split(values, ends), strict=True)])
        self.sketch.rows += batch.sample_count
