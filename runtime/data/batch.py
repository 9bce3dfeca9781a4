# SPDX-License-Identifier: Apache-2.0
"""One batch in the combined format: what the data side hands to the trainer.

Neo (Mudigere et al., ISCA 2022, section 4.4) keeps *lengths*, not offsets, and the ids of all tables in one
tensor: batches can then be cut by table and by rank, and glued together again, without touching the ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """B samples with D dense features and T tables."""

    dense: Tensor
    """Float32 [B, D]."""

    labels: Tensor
    """Float32 [B], each 0 or 1."""

    lengths: Tensor
    """Int32 [T, B]: how many ids sample b has in table t."""

    values: Tensor
    """Int64 [lengths.sum()]: row ids, table after table, and sample after sample within a table."""

    @property
    def sample_count(self) -> int:
        return self.labels.shape[0]

    def copy(self) -> Batch:
        """The batch in memory of its own."""
        return Batch(
            dense=self.dense.clone(),
            labels=self.labels.clone(),
            lengths=self.lengths.clone(),
            values=self.values.clone(),
        )

    @property
    def size_bytes(self) -> int:
        return sum(part.nbytes for part in (self.dense, self.labels, self.lengths, self.values))
