# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,arg-type"
"""A whole model on sharded tables: run on each rank by test_sharded_model.py."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from sennit.runtime.kernels import Optimizer, OptimizerSpec, Pooling, Precision
from sennit.runtime.model import ModelInputs, build
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
        sequence = Table(name="watched", rows=60, dim=DIM, row_shards=3, pooling=Pooling.NONE)
        self.rank = rank
        self.bags = ShardedEmbeddingBags(bags, rate=0.05, gradients="sum", placement=placement)
        self.sequences = ShardedEmbeddings([sequence], rate=0.05, gradients="sum", placement=placement)
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


def saved(rank: int, world: int, placement: Any, folder: str) -> str:
    """Three steps, then a checkpoint."""
    run = Run(rank, placement)
    for number in range(3):
        run.step(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save(run.state(), checkpoint_id=Path(folder))
    return run.digest()


def resumed(rank: int, world: int, placement: Any, folder: str) -> str:
    """Goes on from the checkpoint to five steps."""
    run = Run(rank, placement)
    run.step(0)  # Makes the optimizer's state, and leaves weights that the checkpoint has to replace.
    state = run.state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(state, checkpoint_id=Path(folder))
    run.restore(state)
    for number in (3, 4):
        run.step(number)
    return run.digest()


def refuses_other_shards(rank: int, world: int) -> None:
    table = Table(name="user", rows=10, dim=4, row_shards=2)
    state = ShardedEmbeddingBags([table], rate=1).state_dict()
    other = ShardedEmbeddingBags([Table(name="user", rows=12, dim=4, row_shards=2)], rate=1)
    assert any("weight" in key for key in state) == (rank == 0)  # One shard table-wise: all on rank 0.
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"of \(6, 4\): were its tables cut into other shards"):
            other.load_state_dict(state)
    foreign = ShardedEmbeddingBags([Table(name="item", rows=10, dim=4)], rate=1)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"Missing key.*item/0.0.weight.*\n.*Unexpected key.*user/0.0"):
            foreign.load_state_dict(state)


def beside_ddp(rank: int, world: int) -> None:
    """DDP around the whole model leaves tables alone, and averages what it wraps: as plain torch on the whole batch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.tables = ShardedEmbeddingBags(
                [Table(name="user", rows=20, dim=4, optimizer=OptimizerSpec(kind=Optimizer.SGD))], rate=0.1
            )
            self.top = nn.Linear(4, 1)

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.top(self.tables({"user": ids})["user"])
            return found

    ids = torch.arange(16) % 20
    own = ids[8 * rank : 8 * rank + 8] if world == 2 else ids
    model = DistributedDataParallel(Model())
    assert len(list(model.parameters())) == 2
    model(own).square().mean().backward()
    alone = Model().top
    weight = torch.empty(20, 4)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {held.name: held.weight for held in model.module.tables.held()})
    fresh = Model().tables
    fresh_of: list[Any] = [None] * world
    dist.all_gather_object(fresh_of, {held.name: held.weight for held in fresh.held()})
    weight = nn.Parameter(next(part["user/0.0"] for part in fresh_of if part))
    alone(functional.embedding_bag(ids.view(-1, 1), weight)).square().mean().backward()
    for ours, theirs in zip(model.module.top.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert weight.grad is not None
    updated = next(part["user/0.0"] for part in everyone if part)
    torch.testing.assert_close(updated, weight.detach() - 0.1 * weight.grad)


class Simple(nn.Module):
    """A layer on bags and on a sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        sgd = OptimizerSpec(kind=Optimizer.SGD)
        self.bags = ShardedEmbeddingBags([Table(name="user", rows=20, dim=4, optimizer=sgd)], rate=0.1)
        self.rows = ShardedEmbeddings([Table(name="item", rows=9, dim=4, pooling=Pooling.NONE)], rate=0.1)
        self.top = nn.Linear(8, 2)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        vectors = torch.cat([self.bags({"user": users})["user"], self.rows({"item": items})["item"]], 1)
        found: Tensor = self.top(vectors).relu()
        return found


def compiled_or_sharded(rank: int, world: int, how: str) -> str:
    """Three steps of a model that is compiled, or whose dense part FSDP2 shards, end as those of DDP."""
    digests = []
    for changed in (False, True):
        model: Any = Simple()
        tables = (model.bags, model.rows)
        if changed and how == "fsdp2":
            fully_shard(model)
        else:
            model = DistributedDataParallel(model)
        called = torch.compile(model, backend="aot_eager") if changed and how == "compile" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            ids = torch.arange(8) + 8 * rank + number
            with warnings.catch_warnings():
                # Dynamo looks at the gradients of what goes into a graph, which are no leaves.
                warnings.filterwarnings("ignore", message="The .grad attribute", category=UserWarning)
                loss = called(ids % 20, ids % 9).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for part in tables:
            part.check()
        digests.append(" ".join(part.digest() for part in tables))
    assert digests[0] == digests[1]
    return digests[0]


def trained_by_name(rank: int, world: int, name: str, placement: str) -> str:
    """Three steps of a model of `sennit train`, on uneven slices."""
    torch.set_num_threads(1)
    tables = [
        Table(name="user", rows=300, dim=8, row_shards=4),
        Table(name="item", rows=40, dim=8, row_shards=4, pooling=Pooling.MEAN),
    ]
    inputs = ModelInputs(dense_count=3, tables=tuple(tables), bottom=(6,), top=(10, 5))
    embeddings = ShardedEmbeddingBags(tables, rate=0.05, gradients="sum", placement=placement)
    replicas = SlicedReplicas(build(name, inputs))
    optimizer = torch.optim.Adam(replicas.parameters(), lr=0.01, foreach=False)
    first = replicas.digest()
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        dense = torch.randn(SAMPLES, 3, generator=generator)
        labels = torch.randint(0, 2, (SAMPLES,), generator=generator).to(torch.float32)
        ids = {
            table.name: (torch.rand(SAMPLES, 3, generator=generator) * table.rows).to(torch.int64) for table in tables
        }
        own = embeddings.slices.own_samples(SAMPLES)
        vectors = embeddings({feature: all_ids[own] for feature, all_ids in ids.items()}, global_batch=SAMPLES)
        logits = replicas(dense[own], vectors, global_batch=SAMPLES)
        losses = replicas.each_slice(
            functional.binary_cross_entropy_with_logits, logits, labels[own], reduction="sum", global_batch=SAMPLES
        )
        optimizer.zero_grad()
        replicas.loss(losses, SAMPLES).backward()
        optimizer.step()
    embeddings.check()
    assert replicas.digest() != first
    return f"{embeddings.digest()} {replicas.digest()}"
