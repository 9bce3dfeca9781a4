# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call"
"""A whole model on sharded tables, and one digest of all its weights after some steps."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sennit.runtime.kernels import Optimizer, OptimizerSpec, Pooling, Precision
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import ShardedEmbeddingBags, ShardedEmbeddings, Table

DIM = 16
SAMPLES = 44  # Slices of 5 and 6 samples.


class Crossed(nn.Module):
    """Cross layers (Wang et al. 2021) and a mean over a sequence. Returns the summed loss of its samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.cross = nn.ModuleList(nn.Linear(4 * DIM, 4 * DIM) for _ in range(2))
        self.top = nn.Sequential(nn.Linear(4 * DIM, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 1))

    def forward(self, dense: Tensor, user: Tensor, item: Tensor, watched: Tensor, labels: Tensor) -> Tensor:
        first = torch.cat((dense, user, item, watched.mean(1)), 1)
        found = first
        for layer in self.cross:
            found = first * layer(found) + found
        return functional.binary_cross_entropy_with_logits(self.top(found).squeeze(1), labels, reduction="sum")


class Run:
    """The model, its tables and its optimizers on one rank."""

    def __init__(self, rank: int, placement: Any) -> None:
        torch.set_num_threads(1)
        adam = OptimizerSpec(kind=Optimizer.ADAM)
        bags = [
            Table(name="user", rows=500, dim=DIM, row_shards=8, precision=Precision.FP16),
            Table(name="item", rows=90, dim=DIM, column_shards=4, pooling=Pooling.MEAN, optimizer=adam),
        ]
        sequence = Table(name="watched", rows=60, dim=DIM, row_shards=3, column_shards=2, pooling=Pooling.NONE)
        self.rank = rank
        self.bags = ShardedEmbeddingBags(bags, lr=0.05, gradients="sum", placement=placement)
        self.sequences = ShardedEmbeddings([sequence], lr=0.05, gradients="sum", placement=placement)
        self.replicas = SlicedReplicas(Crossed())
        self.optimizer = torch.optim.Adam(self.replicas.parameters(), lr=0.01, foreach=False)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        dense = torch.randn(SAMPLES, DIM, generator=generator)
        labels = torch.randint(0, 2, (SAMPLES,), generator=generator).to(torch.float32)
        users, items, watched = (
            (torch.rand(SAMPLES, count, generator=generator) ** 3 * rows).to(torch.int64)
            for rows, count in ((500, 7), (90, 40), (60, 3))
        )
        own = self.bags.slices.own_samples(SAMPLES)
        vectors = self.bags({"user": users[own], "item": items[own]}, global_batch=SAMPLES)
        rows = self.sequences({"watched": watched[own]}, global_batch=SAMPLES)["watched"].view(-1, 3, DIM)
        losses = self.replicas(dense[own], vectors["user"], vectors["item"], rows, labels[own], global_batch=SAMPLES)
        self.optimizer.zero_grad()
        self.replicas.loss(losses, SAMPLES).backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "bags": self.bags.state_dict(),
            "sequences": self.sequences.state_dict(),
            "dense": self.replicas.module.state_dict(),
            "optimizer": {
                f"{place}.{name}": value
                for place, parameter in enumerate(self.replicas.parameters())
                for name, value in self.optimizer.state[parameter].items()
            },
            "passes": torch.tensor(self.replicas.passes),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.bags.load_state_dict(state["bags"])
        self.sequences.load_state_dict(state["sequences"])
        self.replicas.module.load_state_dict(state["dense"])
        self.replicas.passes = int(state["passes"])

    def digest(self) -> str:
        self.bags.check()
        dense = hashlib.sha256()
        for parameter in self.replicas.parameters():
            dense.update(parameter.detach().numpy().data)
        return f"{self.bags.digest()[:16]} {self.sequences.digest()[:16]} {dense.hexdigest()[:16]}"


def trained(rank: int, world: int, placement: Any, steps: int = 5) -> str:
    run = Run(rank, placement)
    for number in range(steps):
        run.step(number)
    return run.digest()
