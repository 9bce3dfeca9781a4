# SPDX-License-Identifier: Apache-2.0
"""Training with plain torch, the peers of benchmarks: a whole model in one process, and the exchanges alone.

The model is that of `sennit train`, with `nn.functional.embedding_bag`, autograd and the same optimizers on the same
batches with the same initial values. It has no slices, no shards, no exchange, and none of our kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sennit.runtime.data.batch import Batch
from sennit.runtime.data.batch_source import BatchSource
from sennit.runtime.model.factory import build, dense_optimizer
from sennit.runtime.model.inputs import ModelInputs
from sennit.runtime.sharded.initial import fill
from sennit.runtime.sharded.tables import Shard
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.metrics import Quality
from sennit.runtime.training.planned import model_inputs, source_of
from sennit.runtime.training.predictions import quality


class BareStep:
    """What a training step moves, without what it computes: steps of one rank, on the batches from number 0.

    Four exchanges, with the calls of torch.distributed that any backend has: ids to the owners of the tables, a vector
    of each table and sample back, its gradient to the owner, and the sum of the dense gradients. There is no lookup and
    no model, and the numbers mean nothing. Table t is on rank t mod ranks, and all ranks have equally many samples.
    """

    def __init__(self, source: BatchSource, *, dim: int, dense_numbers: int) -> None:
        """`dense_numbers`: how many dense gradients the model has. They are summed."""
        self._source = source
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        tables = range(len(source.tables))
        self._of_rank = [[table for table in tables if table % self._world == rank] for rank in range(self._world)]
        self._dim = dim
        self._dense = torch.zeros(dense_numbers)
        self._next = 0

    def step(self) -> int:
        """Returns the samples of all ranks."""
        world, number = self._world, self._next
        self._next += 1
        batch = self._source.take(number)
        per_table = torch.split(batch.values, batch.lengths.sum(1).tolist())
        given = [[per_table[table] for table in mine] for mine in self._of_rank]
        counts = torch.tensor([sum(len(part) for part in parts) for parts in given])
        values = torch.cat([part for parts in given for part in parts])
        lengths = torch.cat([batch.lengths[mine].flatten() for mine in self._of_rank])
        samples, own = batch.sample_count, len(self._of_rank[self._rank])
        self._source.release(number)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts)
        ids = torch.empty(int(coming.sum()), dtype=values.dtype)
        dist.all_to_all_single(ids, values, coming.tolist(), counts.tolist())
        bags = [len(mine) * samples for mine in self._of_rank]
        theirs = torch.empty(world * own * samples, dtype=lengths.dtype)
        dist.all_to_all_single(theirs, lengths, [own * samples] * world, bags)
        pooled = torch.empty(world * samples, own * self._dim)
        vectors = torch.empty(sum(bags) * self._dim)
        rows, elements = [samples * own * self._dim] * world, [count * self._dim for count in bags]
        dist.all_to_all_single(vectors, pooled.view(-1), elements, rows)
        dist.all_to_all_single(pooled.view(-1), vectors, rows, elements)
        dist.all_reduce(self._dense)
        return self._source.order.size(number)


EPSILON: Final = 1e-8


class PlainTorch:
    """A model with its tables, data and optimizers: that of the run, and row-wise AdaGrad for tables."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config, self.source = config, source_of(config, 1)
        self.order = self.source.order
        tables = config.tables_of(self.source.tables)
        self.model = self._model(model_inputs(config, self.source, tables))
        self.weights: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        for number, table in enumerate(tables):
            weight = torch.empty(table.rows, table.dim)
            fill(weight, tables, Shard(number, 0, 0), seed=config.seed)
            self.weights[table.name], self._sums[table.name] = weight, torch.zeros(table.rows)
        self._optimizer = dense_optimizer(config.dense_optimizer, self.model.parameters(), rate=config.dense_rate)
        self._schedule = config.schedule(self.order.step_count)

    def _model(self, inputs: ModelInputs) -> nn.Module:
        return build(self.config.model, inputs)

    def batch(self, step: int) -> Batch:
        """All samples of a step."""
        return self.source.take(self.order.training_batch(step))

    def loss(self, batch: Batch, weights: Mapping[str, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(self._logits(batch, weights), batch.labels)

    def update(self, step: int, rows: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Applies the gradients of the dense parameters, and of `rows`: by table different ids and their gradients."""
        factor = self._schedule(step)
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.dense_rate * factor
        self._optimizer.step()
        with torch.no_grad():
            for name, (ids, gradients) in rows.items():
                self._sums[name][ids] += gradients.square().mean(1)
                scale = self.config.sparse_rate * factor / (self._sums[name][ids].sqrt() + EPSILON)
                self.weights[name].index_add_(0, ids, -scale[:, None] * gradients)

    @torch.no_grad()
    def evaluate(self) -> Quality:
        """The quality on the held-back samples."""
        batches = [self.source.take(number) for number in self.order.evaluation_batches(self.order.step_count)]
        logits = torch.cat([self._logits(batch, self.weights) for batch in batches])
        labels = torch.cat([batch.labels for batch in batches])
        return quality(logits.numpy(), labels.numpy())

    def ids(self, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """The lengths and ids of the samples' bags, by table."""
        by_table = batch.values.split(batch.lengths.sum(1).tolist())  # type: ignore[no-untyped-call]
        pairs = zip(batch.lengths, by_table, strict=True)
        return {facts.name: pair for facts, pair in zip(self.source.tables, pairs, strict=True)}

    def _logits(self, batch: Batch, weights: Mapping[str, Tensor]) -> Tensor:
        vectors = {}
        for name, (lengths, ids) in self.ids(batch).items():
            vectors[name] = pooled(weights[name], lengths, ids)
        logits: Tensor = self.model(batch.dense, vectors)
        return logits


def pooled(weight: Tensor, lengths: Tensor, ids: Tensor) -> Tensor:
    """Sums of bags, with gradients of the rows that they have."""
    offsets = (lengths.cumsum(0) - lengths).long()
    return F.embedding_bag(ids.long(), weight, offsets, mode="sum", sparse=True)


def train(plain: PlainTorch) -> Quality:
    """Trains for all epochs. Returns the quality on the held-back samples."""
    for step in range(plain.order.step_count):
        weights = {name: weight.requires_grad_() for name, weight in plain.weights.items()}
        loss = plain.loss(plain.batch(step), weights)
        plain.model.zero_grad()
        torch.autograd.backward(loss)
        rows = {}
        for name, weight in weights.items():
            assert weight.grad is not None
            gradient, weight.grad = weight.grad.coalesce(), None
            rows[name] = gradient.indices()[0], gradient.values()
        plain.update(step, rows)
    return plain.evaluate()
