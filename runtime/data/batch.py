# SPDX-License-Identifier: Apache-2.0
"""One batch in the combined format: what the data side hands to the trainer.

Neo (Mudigere et al., ISCA 2022, section 4.4) keeps *lengths*, not offsets, and the ids of all tables in one
tensor: batches can then be cut by table and by rank, and glued together again, without touching the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Integers(NamedTuple):
    """V columns of integers for B samples."""

    lengths: Tensor
    """Int32 [V, B]: how many sample b has in column v."""

    values: Tensor
    """Int64 [lengths.sum()]: column after column, and sample after sample within a column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """B samples with D dense features and T tables."""

    dense: Tensor
    """Float32 [B, D]."""

    labels: Tensor
    """Float32 [B], or [B, labels] if there are several, each 0 or 1."""

    lengths: Tensor
    """Int32 [T, B]: how many ids sample b has in table t."""

    values: Tensor
    """Int64 [lengths.sum()]: row ids, table after table, and sample after sample within a table."""

    sample_weights: Tensor | None = None
    """Float32 [B]: by what a sample's loss is multiplied. None: 1."""

    integers: Integers | None = None
    """Columns that a model reads as they are; None: there are none."""

    groups: Tensor | None = None
    """Int64 [B]: whose each sample is, for AUC by group (`Samples.groups`). No model reads it."""

    rows: Tensor | None = None
    """Int64 [B]: which row of the stream each sample is, for messages; None: nobody knows."""

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
            sample_weights=None if self.sample_weights is None else self.sample_weights.clone(),
            integers=None if self.integers is None else Integers(*(part.clone() for part in self.integers)),
            groups=None if self.groups is None else self.groups.clone(),
            rows=None if self.rows is None else self.rows.clone(),
        )

    def split(self, tables: Sequence[int]) -> Batch:
        """The batch with these columns as its tables, and the others as integers."""
        sizes = self.lengths.sum(1).tolist()
        parts = torch.split(self.values, sizes)
        others = [number for number in range(len(parts)) if number not in tables]

        def of(numbers: Sequence[int]) -> Integers:
            return Integers(self.lengths[numbers], torch.cat([parts[number] for number in numbers]))

        lengths, values = of(tables)
        return replace(self, lengths=lengths, values=values, integers=of(others))

    @property
    def size_bytes(self) -> int:
        about = [part for part in (self.groups, self.rows) if part is not None]
        parts = (*self.of_samples, self.lengths, self.values, *(self.integers or ()), *about)
        return sum(part.nbytes for part in parts)

    @property
    def of_samples(self) -> tuple[Tensor, ...]:
        """What is there once for each sample: dense features, labels, and weights if there are any."""
        return (
            (self.dense, self.labels) if self.sample_weights is None else (self.dense, self.labels, self.sample_weights)
        )
