# SPDX-License-Identifier: Apache-2.0
"""What `sennit bench drift` trains: a DeepFM on days of `synthetic-stream`, as a program of a user's would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sennit.offload.hashing import hash_combine, twang_mix64
from sennit.runtime.data.samples import Column, Samples
from sennit.runtime.model.deepfm import DeepFM
from sennit.runtime.model.inputs import ModelInputs
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import DynamicIds, ShardedEmbeddingBags, Table
from sennit.runtime.stream.synthetic import LABEL, SyntheticDay

DIM: Final = 8
TOP: Final = (32,)
BATCH: Final = 512
SLICES: Final = 2
SPARSE_RATE: Final = 0.05
DENSE_RATE: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Day:
    """All samples of one day, in the order of time."""

    dense: Tensor
    """Float32 [N, D]."""

    labels: Tensor
    """Float32 [N]."""

    ids: tuple[npt.NDArray[np.int64], ...]
    """The ids of each table, [N]."""

    @classmethod
    def read(cls, file: SyntheticDay) -> Day:
        names = (LABEL, *file.settings.dense_names, *file.settings.table_names)
        pieces = [piece for block in range(len(file.block_rows)) for piece in file.read(block, names)]
        columns = [np.concatenate([piece[name].to_numpy() for piece in pieces]) for name in names]
        dense, ids = columns[1 : 1 + file.settings.dense], columns[1 + file.settings.dense :]
        return cls(
            dense=torch.from_numpy(np.stack(dense, 1)),
            labels=torch.from_numpy(columns[0].astype(np.float32)),
            ids=tuple(ids),
        )

    @classmethod
    def joined(cls, days: Sequence[Day]) -> Day:
        """The samples of all these days."""
        return cls(
            dense=torch.cat([day.dense for day in days]),
            labels=torch.cat([day.labels for day in days]),
            ids=tuple(np.concatenate(parts) for parts in zip(*(day.ids for day in days), strict=True)),
        )


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """How ids become rows: by a hash, as `encode = "hash"` of a schema does."""

    rows: tuple[int, ...]
    """Rows of each table, without the one behind them for ids that are not known."""

    known: tuple[npt.NDArray[np.int64], ...] | None = None
    """The ids of each table that have rows of their own; None: all have."""

    @classmethod
    def of(cls, days: Sequence[Day], rows: tuple[int, ...]) -> Vocabulary:
        """Knows the ids of these days."""
        by_table = zip(*(day.ids for day in days), strict=True)
        return cls(rows=rows, known=tuple(np.unique(np.concatenate(ids)) for ids in by_table))

    def samples(self, day: Day) -> Samples:
        columns = []
        for number, (ids, rows) in enumerate(zip(day.ids, self.rows, strict=True)):
            hashed = hash_combine(np.zeros(len(ids), np.uint64), twang_mix64(ids.view(np.uint64))) % np.uint64(rows)
            found = hashed.astype(np.int64)
            if self.known is not None:
                found[~np.isin(ids, self.known[number])] = rows
            columns.append(Column.single(f"table_{number:02d}", rows + 1, found))
        return Samples(name="drift", dense=day.dense, labels=day.labels, columns=tuple(columns))


def with_own_ids(day: Day, rows: Sequence[int]) -> Samples:
    """The samples of a day for dynamic tables of at most so many rows each: ids stay as they are."""
    columns = [
        Column(name=f"table_{number:02d}", row_count=count, values=torch.from_numpy(ids))
        for number, (ids, count) in enumerate(zip(day.ids, rows, strict=True))
    ]
    return Samples(name="drift", dense=day.dense, labels=day.labels, columns=tuple(columns))


class Learner:
    """A model that trains in the order that it is given. It needs a default group; all its ranks call it together."""

    def __init__(self, rows: Sequence[int], dense: int, *, seed: int, ids: DynamicIds | None = None) -> None:
        """`rows`: of each table, without the one for ids that are not known. `ids`: tables are dynamic."""
        more = 1 if ids is None else 0
        tables = tuple(
            Table(name=f"table_{number:02d}", rows=count + more, dim=DIM, ids=ids) for number, count in enumerate(rows)
        )
        self.embeddings = ShardedEmbeddingBags(tables, lr=SPARSE_RATE, slices=SLICES, seed=seed)
        inputs = ModelInputs(dense_count=dense, tables=tables, top=TOP, seed=seed)
        self.replicas = SlicedReplicas(DeepFM(inputs), slices=SLICES)
        self.optimizer = torch.optim.Adagrad(self.replicas.parameters(), lr=DENSE_RATE)

    def train(self, samples: Samples, order: Tensor | None = None) -> None:
        """Takes a step with each batch of all samples, once; `order`: of their numbers. The last one may be smaller."""
        numbers = torch.arange(len(samples)) if order is None else order
        for rows in torch.split(numbers, BATCH):
            logits, labels = self._logits(samples, rows), samples.labels[self._own(rows)]
            losses = self.replicas.each_slice(
                nn.functional.binary_cross_entropy_with_logits, logits, labels, global_batch=len(rows)
            )
            self.optimizer.zero_grad()
            torch.autograd.backward(self.replicas.loss(losses))
            self.optimizer.step()

    @torch.no_grad()
    def logits(self, samples: Samples) -> Tensor:
        """Float32 [N]."""
        parts = []
        for rows in torch.split(torch.arange(len(samples)), 16 * BATCH):
            parts.append(self.replicas.gathered(self._logits(samples, rows), len(rows)))
        return torch.cat(parts)

    def _logits(self, samples: Samples, rows: Tensor) -> Tensor:
        """Of this rank's part of the batch."""
        batch = samples.batch(self._own(rows))
        vectors = self.embeddings(batch, global_batch=len(rows))
        logits: Tensor = self.replicas(batch.dense, vectors, global_batch=len(rows))
        return logits

    def _own(self, rows: Tensor) -> Tensor:
        return rows[self.replicas.slices.own_samples(len(rows))]
