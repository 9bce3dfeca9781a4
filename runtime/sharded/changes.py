# SPDX-License-Identifier: Apache-2.0
"""Which rows of an engine's tables have been updated since somebody last asked. Incremental checkpoints ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.runtime.sharded.shards import Shards

CHANGED_ROWS: Final = "changed_rows"
"""`SHARD.changed_rows` of a state are int64 [n]: of all its tensors `SHARD.NAME` the state has these rows alone."""


class ChangedRows:
    """A byte for each row. No optimizer changes a row that a step did not use, so the rows of updates are enough.

    Rows of a tensor train are no memory of their own, so it is left out: all of its cores count as changed.
    """

    def __init__(self, shards: Shards) -> None:
        """Follows the updates of `shards` from now on."""
        self._shards = shards
        self._names = [spec.name for spec in shards.specs]
        self._is_changed = {
            number: torch.zeros(spec.row_count, dtype=torch.bool)
            for number, spec in enumerate(shards.specs)
            if not isinstance(spec, TensorTrainSpec)
        }
        shards.engine.on_update = self._mark

    def _mark(self, batch: Batch) -> None:
        for block in batch.blocks():
            if block.table in self._is_changed:
                self._is_changed[block.table].index_fill_(0, self._shards.ids(batch, block), True)

    def mark_all(self) -> None:
        """All rows have changed, by other means than an update."""
        for is_changed in self._is_changed.values():
            is_changed.fill_(True)

    def rows(self, *, clear: bool) -> Iterator[tuple[str, Tensor]]:
        """Int64 [n] by table, rising. With `clear` none counts as changed afterwards."""
        for number, is_changed in self._is_changed.items():
            yield self._names[number], is_changed.nonzero().flatten()
            if clear:
                is_changed.zero_()
