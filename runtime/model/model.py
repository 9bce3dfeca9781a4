# SPDX-License-Identifier: Apache-2.0
"""DLRM for the trainer, which has the vectors of all tables in one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sennit.runtime.model.dlrm import DLRM
from sennit.runtime.model.inputs import ModelInputs, TableInput


class DenseModel(DLRM):
    """dense [B, D] and pooled embeddings [T, B, dim] -> logits [B]."""

    def __init__(
        self, *, dense_count: int, table_count: int, dim: int, bottom: Sequence[int], top: Sequence[int], seed: int
    ) -> None:
        tables = tuple(TableInput(str(number), dim) for number in range(table_count))
        super().__init__(
            ModelInputs(dense_count=dense_count, tables=tables, bottom=tuple(bottom), top=tuple(top), seed=seed)
        )

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(dense, dict(zip(self._names, pooled, strict=True)))
