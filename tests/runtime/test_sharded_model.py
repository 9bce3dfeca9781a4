# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,arg-type"
"""A whole model on sharded tables: one digest of all weights, whatever the run looked like."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from sennit.runtime.kernels import Optimizer, OptimizerSpec, Pooling
from sennit.runtime.model import ModelInputs, build
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import ShardedEmbeddingBags, ShardedEmbeddings, Table
from tests.runtime.sharded_model import SAMPLES, Run, trained
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)


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
    state = ShardedEmbeddingBags([table], lr=1).state_dict()
    other = ShardedEmbeddingBags([Table(name="user", rows=12, dim=4, row_shards=2)], lr=1)
    assert any("weight" in key for key in state) == (rank == 0)  # One shard table-wise: all on rank 0.
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"of \(6, 4\): were its tables cut into other shards"):
            other.load_state_dict(state)
    foreign = ShardedEmbeddingBags([Table(name="item", rows=10, dim=4)], lr=1)
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
                [Table(name="user", rows=20, dim=4, optimizer=OptimizerSpec(kind=Optimizer.SGD))], lr=0.1
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
        self.bags = ShardedEmbeddingBags([Table(name="user", rows=20, dim=4, optimizer=sgd)], lr=0.1)
        self.rows = ShardedEmbeddings([Table(name="item", rows=9, dim=4, pooling=Pooling.NONE)], lr=0.1)
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
    embeddings = ShardedEmbeddingBags(tables, lr=0.05, gradients="sum", placement=placement)
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


SHARDINGS = ("table_wise", "row_wise", "column_wise", "grid", "data_parallel")


@pytest.fixture(scope="module")
def alone(kept_world: WorldFactory) -> str:
    """The digest of one rank's run."""
    found: str = kept_world(1).run(trained, placement="table_wise")[0]
    return found


@pytest.mark.parametrize("placement", SHARDINGS)
@pytest.mark.parametrize(
    ("world", "transport"), [(1, "shm"), (2, "shm"), (2, "udp"), (3, "shm"), (3, "udp"), (4, "shm")]
)
def test_a_model_has_the_same_bits_in_every_world(
    kept_world: WorldFactory, alone: str, world: int, transport: str, placement: str
) -> None:
    assert set(kept_world(world, transport).run(trained, placement=placement)) == {alone}


def test_eight_ranks_have_the_same_bits(kept_world: WorldFactory, alone: str) -> None:
    assert set(kept_world(8).run(trained, placement="row_wise")) == {alone}


@pytest.mark.parametrize(("world", "placement"), [(1, "table_wise"), (2, "column_wise"), (3, "row_wise")])
def test_a_checkpoint_goes_on_in_any_world_and_placement(
    kept_world: WorldFactory, alone: str, tmp_path: Path, world: int, placement: str
) -> None:
    kept_world(2).run(saved, placement="row_wise", folder=str(tmp_path))
    found = kept_world(world).run(resumed, placement=placement, folder=str(tmp_path))
    assert set(found) == {alone}


def test_a_checkpoint_of_other_shards_is_refused(kept_world: WorldFactory) -> None:
    kept_world(2).run(refuses_other_shards)


def test_ddp_leaves_tables_alone(kept_world: WorldFactory) -> None:
    kept_world(2).run(beside_ddp)


@pytest.mark.parametrize("how", ["compile", "fsdp2"])
def test_a_model_with_tables_can_be_compiled_and_sharded_by_fsdp2(kept_world: WorldFactory, how: str) -> None:
    found = kept_world(2).run(compiled_or_sharded, how=how)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["dlrm", "dcnv2", "deepfm"])
def test_models_of_the_trainer_have_the_same_bits_in_every_world(kept_world: WorldFactory, name: str) -> None:
    found = {
        digest
        for world, placement in ((1, "table_wise"), (2, "row_wise"), (3, "row_wise"), (3, "table_wise"))
        for digest in kept_world(world).run(trained_by_name, name=name, placement=placement)
    }
    assert len(found) == 1
