# SPDX-License-Identifier: Apache-2.0
"""A whole data set in memory, encoded once: dense features, labels and one id column per table.

A batch is then a few tensor gathers, with no Python per sample.
"""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sennit.offload.arrow_columns import SamplesInMemory
from sennit.runtime.data.batch import Batch
from sennit.runtime.data.errors import DataError

IntArray = npt.NDArray[np.integer]

NOBODY: Final = -(2**63)
"""The group of samples whose group is null. An id that has this very number is nobody's, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """The ids of one table for all samples."""

    name: str
    """The name of the feature and of its table."""

    row_count: int
    """Rows of the table. Every id is in [0, row_count), or any 64-bit integer if the table is dynamic."""

    values: Tensor
    """Ids of sample 0, then of sample 1, …; int32 if row_count allows it and the table is not dynamic."""

    offsets: Tensor | None = None
    """Int64 [N + 1]: the index of each sample's first id. None: exactly one id per sample."""

    @classmethod
    def single(cls, name: str, row_count: int, ids: IntArray) -> Column:
        """A column with one id per sample."""
        return cls(name=name, row_count=row_count, values=_ids(name, row_count, ids))

    @classmethod
    def bags(cls, name: str, row_count: int, ids: IntArray, lengths: IntArray) -> Column:
        """A column with `lengths[i]` ids for sample i."""
        offsets = offsets_of(torch.from_numpy(lengths.astype(np.int64)))
        if int(offsets[-1]) != len(ids):
            raise DataError(f"table {name}: lengths add up to {int(offsets[-1])}, but there are {len(ids)} ids")
        return cls(name=name, row_count=row_count, values=_ids(name, row_count, ids), offsets=offsets)

    @property
    def sample_count(self) -> int:
        # `len` of a tensor goes through Python.
        return self.values.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    @property
    def lengths(self) -> Tensor:
        """Int64 [N]: the number of ids of each sample."""
        return torch.ones(len(self.values), dtype=torch.int64) if self.offsets is None else self.offsets.diff()

    @property
    def mean_length(self) -> float:
        """The mean number of ids per sample (the pooling factor)."""
        return len(self.values) / max(1, self.sample_count)

    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(lengths int32 [B], ids int64) of the samples `rows`, in that order."""
        if self.offsets is None:
            return torch.ones(len(rows), dtype=torch.int32), self.values[rows].to(torch.int64)
        begin = self.offsets[rows]
        lengths = self.offsets[rows + 1] - begin
        # The position of each id is the begin of its bag plus its place in the bag.
        bag_start = torch.cumsum(lengths, 0) - lengths
        position = torch.arange(int(lengths.sum())) + torch.repeat_interleave(begin - bag_start, lengths)
        return lengths.to(torch.int32), self.values[position].to(torch.int64)


def offsets_of(lengths: Tensor) -> Tensor:
    """Int64 [N + 1] of int64 [N] lengths: where each sample's ids begin, and where the last ones end."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _ids(name: str, row_count: int, ids: IntArray) -> Tensor:
    if row_count < 1:
        raise DataError(f"table {name}: {row_count} rows; at least 1 is needed")
    if len(ids):
        wrong = np.flatnonzero((ids < 0) | (ids >= row_count))
        if len(wrong):
            raise DataError(
                f"table {name}: row id {int(ids[wrong[0]])} (value number {int(wrong[0])}) is outside [0, {row_count})"
            )
    narrow = np.int32 if row_count <= 2**31 - 1 else np.int64
    return torch.from_numpy(ids.astype(narrow))


def check_tensors(name: str, **parts: object) -> None:
    """Raises DataError for a part of samples that is no tensor."""
    for what, part in parts.items():
        if part is not None and not isinstance(part, Tensor):
            kind = type(part).__name__
            raise DataError(f"{name}: {what} is a {kind}; allowed: a tensor (torch.from_numpy makes one of an array)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """N labelled samples, in order of time if the source knows it."""

    name: str
    """The name in the report."""

    dense: Tensor
    """Float32 [N, D], D >= 1."""

    labels: Tensor
    """Float32 [N], or [N, labels] if there are several, each 0 or 1."""

    columns: tuple[Column, ...]
    """One column per table."""

    dense_names: tuple[str, ...] = field(default=())
    """D names, for messages."""

    label_names: tuple[str, ...] = ("label",)
    """The names of the labels."""

    sample_weights: Tensor | None = None
    """Float32 [N], 0 or more: by what a sample's loss is multiplied. None: 1. Metrics count each sample once."""

    groups: Tensor | None = None
    """Int64 [N]: whose each sample is, for AUC by group; `NOBODY` for nobody's. None: nobody asks."""

    rows: Tensor | None = None
    """Int64 [N]: which row of the stream each sample is. None: nobody knows."""

    are_checked: InitVar[bool] = False
    """Whether who made them has checked them already."""

    _memory: list[SamplesInMemory] = field(init=False, repr=False, compare=False, default_factory=list)
    """What batches are gathered from, from the first one on. Parts that are joined need none."""

    def __post_init__(self, are_checked: bool) -> None:
        if not are_checked:
            self._check()

    def _check(self) -> None:
        check_tensors(self.name, dense=self.dense, labels=self.labels, sample_weights=self.sample_weights)
        count = self.labels.shape[0]
        if not self.columns:
            raise DataError(f"{self.name}: no sparse column; a DLRM needs at least one table")
        if self.dense.ndim != 2 or self.dense.shape[0] != count or self.dense.shape[1] < 1:
            raise DataError(f"{self.name}: dense is {tuple(self.dense.shape)}, expected ({count}, at least 1)")
        for column in self.columns:
            if column.sample_count != count:
                raise DataError(f"table {column.name}: {column.sample_count} samples, but there are {count} labels")
        # A sum of finite numbers may overflow, but no other sum is finite.
        if not math.isfinite(float(self.dense.sum())) and not bool((finite := torch.isfinite(self.dense).all(0)).all()):
            wrong = int((~finite).nonzero()[0])
            name = self.dense_names[wrong] if self.dense_names else str(wrong)
            raise DataError(f"{self.name}: dense column {name} has values that are not finite")
        strange = (self.labels != 0) & (self.labels != 1)
        if bool(strange.any()):
            row = int(strange.nonzero()[0])
            found = float(self.labels[strange][0])
            raise DataError(f"{self.name}: label {found} of sample {row}; allowed: 0 and 1")
        names = len(self.label_names)
        if self.labels.shape != ((count,) if names == 1 else (count, names)):
            raise DataError(f"{self.name}: labels are {tuple(self.labels.shape)}, but {names} have a name")
        if self.sample_weights is not None:
            if self.sample_weights.shape != (count,):
                raise DataError(f"{self.name}: weights are {tuple(self.sample_weights.shape)}, expected ({count},)")
            strange = ~(torch.isfinite(self.sample_weights) & (self.sample_weights >= 0))
            if bool(strange.any()):
                row = int(strange.nonzero()[0])
                raise DataError(
                    f"{self.name}: weight {float(self.sample_weights[row])} of sample {row}; allowed: 0 or more"
                )

    def __len__(self) -> int:
        return self.labels.shape[0]

    def batch(self, rows: Tensor) -> Batch:
        """The samples `rows`."""
        if not self._memory:
            columns = [
                (column.values.numpy(), None if column.offsets is None else column.offsets.numpy())
                for column in self.columns
            ]
            self._memory.append(SamplesInMemory(self.dense.contiguous().numpy(), columns))
        dense, lengths, values = self._memory[0].gather(rows.numpy())
        return Batch(
            dense=torch.from_numpy(dense),
            labels=self.labels.index_select(0, rows),
            sample_weights=None if self.sample_weights is None else self.sample_weights.index_select(0, rows),
            lengths=torch.from_numpy(lengths),
            values=torch.from_numpy(values),
            groups=None if self.groups is None else self.groups.index_select(0, rows),
            rows=None if self.rows is None else self.rows.index_select(0, rows),
        )
