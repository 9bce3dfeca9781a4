# SPDX-License-Identifier: Apache-2.0
"""This rank's embedding tables: one matrix, sum pooling over bags of ids, sparse update.

The tables of one rank lie under one another in one matrix, so that a lookup over all of them is one call.
The gradient never becomes a dense tensor: rows are sorted, equal rows summed, each row updated once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sennit.runtime.data.errors import DataError
from sennit.runtime.dlrm.optimizer import RowWiseAdagrad
from sennit.runtime.dlrm.sharding import Table
from sennit.runtime.seeds import torch_stream


class EmbeddingShard:
    """The tables that one rank owns.

    Driven by the trainer: `lookup` of the global batch, then `update` with the gradient of what it returned.
    """

    def __init__(self, tables: Sequence[Table], *, dim: int, seed: int) -> None:
        self.tables = tuple(tables)
        self.dim = dim
        self._row_counts = torch.tensor([table.row_count for table in self.tables], dtype=torch.int64)
        self._bases = torch.cumsum(self._row_counts, 0) - self._row_counts
        self.weight = torch.empty(int(self._row_counts.sum()), dim)
        self._rows = torch.empty(0, dtype=torch.int64)
        self._bags = torch.empty(0, dtype=torch.int64)
        for table, view in zip(self.tables, self.parts(self.weight), strict=True):
            # Naumov et al. 2019, the reference code: uniform within 1 / sqrt(rows).
            bound = table.row_count**-0.5
            view.uniform_(-bound, bound, generator=torch_stream(seed, "table", table.name))

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Views of a [all rows, …] tensor, one for each table."""
        return list(torch.split(whole, self._row_counts.tolist())) if self.tables else []

    def lookup(self, lengths: Tensor, values: Tensor, table_of_bag: Tensor) -> Tensor:
        """Sums the rows of each bag: [bags, dim].

        `lengths` int32 [bags], `values` int64 [lengths.sum()] ids within their table, `table_of_bag` int64 [bags],
        local numbers. Bags may come in any order; the update then sums a row's gradients in that order.
        """
        if not len(lengths):
            self._rows = self._bags = torch.empty(0, dtype=torch.int64)
            return self.weight.new_zeros(0, self.dim)
        counts = lengths.to(torch.int64)
        self._bags = torch.repeat_interleave(torch.arange(len(counts)), counts)
        table_of_value = table_of_bag[self._bags]
        self._check(values, table_of_value)
        self._rows = values + self._bases[table_of_value]
        return F.embedding_bag(self._rows, self.weight, _edges(counts), mode="sum", include_last_offset=True)

    def update(self, optimizer: RowWiseAdagrad, gradient: Tensor, *, rate: float) -> None:
        """Applies the gradient [bags, dim] of the last lookup's result to the rows that it read.

        A stable sort by row keeps the order of bags within a row, and `embedding_bag` adds in that order: the sum, and
        so the bits of the weights, do not depend on threads, placement or which other tables live here.
        """
        if not len(self._rows):
            return
        rows, order = torch.sort(self._rows, stable=True)
        distinct, counts = torch.unique_consecutive(rows, return_counts=True)
        sums = F.embedding_bag(self._bags[order], gradient, _edges(counts), mode="sum", include_last_offset=True)
        optimizer.step(self.weight, distinct, sums, rate=rate)

    def _check(self, values: Tensor, table_of_value: Tensor) -> None:
        outside = (values < 0) | (values >= self._row_counts[table_of_value])
        if bool(outside.any()):
            first = int(outside.nonzero()[0])
            table = self.tables[int(table_of_value[first])]
            raise DataError(f"table {table.name}: row id {int(values[first])}; allowed: [0, {table.row_count})")


def _edges(counts: Tensor) -> Tensor:
    """Offsets with the end included: [0, c0, c0 + c1, …]."""
    return F.pad(torch.cumsum(counts, 0), (1, 0))
