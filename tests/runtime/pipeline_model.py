# SPDX-License-Identifier: Apache-2.0
"""A small model on sharded tables, its batches, and the pipeline that trains it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sennit.runtime.kernels import Optimizer, OptimizerSpec, Pooling
from sennit.runtime.pipeline import Pipeline
from sennit.runtime.replicas import SlicedReplicas, reduction
from sennit.runtime.sharded import ShardedEmbeddingBags, ShardedEmbeddings, Table

SAMPLES, DIM, SLICES, STEPS = 12, 4, 4, 4


class Batch(NamedTuple):
    ids: dict[str, Tensor]
    watched: dict[str, Tensor]
    dense: Tensor
    labels: Tensor


class Top(nn.Module):
    """The summed loss of its samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.bottom = nn.Sequential(nn.Linear(3, DIM), nn.ReLU(), nn.Dropout(0.1))
        self.top = nn.Sequential(nn.Linear(4 * DIM, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def early(self, dense: Tensor, *_: object) -> Tensor:
        found: Tensor = self.bottom(dense)
        return found

    def forward(
        self, dense: Tensor, vectors: dict[str, Tensor], watched: Tensor, labels: Tensor, early: Tensor | None = None
    ) -> Tensor:
        first = self.early(dense) if early is None else early
        seen = torch.cat([first, vectors["user"], vectors["item"], watched.mean(1)], 1)
        return functional.binary_cross_entropy_with_logits(self.top(seen).squeeze(1), labels, reduction="sum")


class Model(nn.Module):
    """Tables of two optimizers, one table in sequences, and a dense part."""

    def __init__(self, placement: str, rate: float = 0.1) -> None:
        super().__init__()
        reduction.BUCKET_BYTES = 64  # So small a model has several buckets then.
        adam = OptimizerSpec(kind=Optimizer.ADAM)
        bags = [
            Table(name="user", rows=40, dim=DIM, row_shards=2),
            Table(name="item", rows=9, dim=DIM, column_shards=2, pooling=Pooling.MEAN, optimizer=adam),
        ]
        sequences = [Table(name="watched", rows=20, dim=DIM, row_shards=2, pooling=Pooling.NONE)]
        options: dict[str, Any] = {"lr": rate, "gradients": "sum", "placement": placement, "slices": SLICES}
        self.bags = ShardedEmbeddingBags(bags, **options)
        self.sequences = ShardedEmbeddings(sequences, **options)
        self.replicas = SlicedReplicas(Top(), slices=SLICES)

    def forward(self, batch: Batch) -> Tensor:
        vectors = self.bags(batch.ids, global_batch=SAMPLES)
        rows = self.sequences(batch.watched, global_batch=SAMPLES)["watched"].view(-1, 2, DIM)
        losses = self.replicas(batch.dense, vectors, rows, batch.labels, global_batch=SAMPLES)
        return self.replicas.loss(losses, SAMPLES)

    def digest(self) -> str:
        self.bags.check()
        self.sequences.check()
        return hashlib.sha256(
            f"{self.bags.digest()} {self.sequences.digest()} {self.replicas.digest()}".encode()
        ).hexdigest()


def batches(model: Model, steps: int = STEPS) -> Iterator[Batch]:
    """This rank's part of each batch."""
    own = model.bags.slices.own_samples(SAMPLES)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        users, items, watched = (
            (torch.rand(SAMPLES, count, generator=generator) ** 2 * rows).to(torch.int64)[own]
            for rows, count in ((40, 3), (9, 2), (20, 2))
        )
        dense = torch.randn(SAMPLES, 3, generator=generator)[own]
        labels = torch.randint(0, 2, (SAMPLES,), generator=generator).to(torch.float32)[own]
        yield Batch({"user": users, "item": items}, {"watched": watched}, dense, labels)


def pipeline(model: Model, loader: Iterator[Batch], **options: Any) -> Pipeline:
    optimizer = torch.optim.Adam(model.replicas.parameters(), lr=0.01, foreach=False)
    return Pipeline(
        model,
        optimizer,
        loader,
        features=lambda batch: (batch.ids, batch.watched),
        global_batch=lambda batch: SAMPLES,
        **options,
    )
