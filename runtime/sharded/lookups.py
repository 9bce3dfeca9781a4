# SPDX-License-Identifier: Apache-2.0
"""A rank's own ids as a batch of the kernels: slice after slice in each table, as gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.sharded.blocks import joined
from sennit.runtime.sharded.features import Ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookups:
    """Lookups of sequences, in some slices."""

    batch: Batch
    pieces: tuple[tuple[int, slice], ...]
    """Of each block: its feature, and its range among the lookups of this feature."""

    def gathered(self, of_feature: dict[int, Tensor], device: torch.device) -> Tensor:
        """Values of each lookup, [lookups, n] by feature on `device`, in the order of the batch; flat."""
        parts = [of_feature[feature][piece].reshape(-1) for feature, piece in self.pieces]
        return joined(parts, torch.float32, device)


def lookups_of(
    ids: Ids, tables: Sequence[tuple[int, Sequence[int]]], slices: Sequence[tuple[int, int, int]]
) -> Lookups:
    """The ids in these `slices` (number, first sample, end), for tables of an engine and the features of each."""
    starts = torch.zeros(ids.lengths.shape[0], ids.sample_count + 1, dtype=torch.int64)
    torch.cumsum(ids.lengths, 1, out=starts[:, 1:])
    of_feature = torch.split(ids.values, ids.counts)
    blocks = [
        (table, feature, number, first, end)
        for table, features in tables
        for number, first, end in slices
        for feature in features
    ]
    borders = sorted({place for _, first, end in slices for place in (first, end)})
    starts_at = dict(zip(borders, starts[:, borders].t().tolist(), strict=True))
    pieces = [
        (feature, slice(starts_at[first][feature], starts_at[end][feature])) for _, feature, _, first, end in blocks
    ]
    lengths = [ids.lengths[feature, first:end] for _, feature, _, first, end in blocks]
    values = [of_feature[feature][piece] for feature, piece in pieces]
    return Lookups(
        batch=Batch(
            table_of_block=tuple(table for table, *_ in blocks),
            bags_of_block=tuple(end - first for *_, first, end in blocks),
            slice_of_block=tuple(number for _, _, number, _, _ in blocks),
            lengths=joined(lengths, ids.lengths.dtype),
            values=joined(values, ids.values.dtype),
            pooling=Pooling.NONE,
        ),
        pieces=tuple(pieces),
    )
