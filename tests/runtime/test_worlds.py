# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,arg-type"
"""Any number of ranks: samplers that deal samples to slices, and ranks that have equally many samples."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from sennit.runtime.kernels import Optimizer, OptimizerSpec, Pooling
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import ShardedEmbeddingBags, ShardedEmbeddings, SliceSampler, Table
from sennit.transport.errors import ArgumentError, ConfigError
from tests.runtime.sharded_training import rows_of
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(120)

ROWS, DIM, EACH, RATE = 40, 4, 3, 0.5
SGD = OptimizerSpec(kind=Optimizer.SGD)


def data(count: int) -> TensorDataset:
    """Samples of (ids [EACH], another id, label)."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(ROWS, (count, EACH + 1), generator=generator)
    return TensorDataset(ids[:, :EACH], ids[:, EACH], (ids.sum(1) % 2).to(torch.float32))


def table(name: str, pooling: Pooling = Pooling.SUM, spec: OptimizerSpec = SGD) -> Table:
    return Table(
        name=name, rows=ROWS, dim=DIM, row_shards=5, pooling=pooling, optimizer=spec,
        initial=lambda rows, generator: rows.normal_(generator=generator),
    )  # fmt: skip


def top() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(2 * DIM, 6), nn.ReLU(), nn.Linear(6, 1), nn.Flatten(0))


def dealt(rank: int, world: int, gradients: str | None) -> list[str]:
    """Two epochs from a SliceSampler, whose last batch is uneven. Returns digests and losses."""
    bags = ShardedEmbeddingBags(
        [table("user", spec=OptimizerSpec())], lr=0.1, placement="row_wise", gradients=gradients
    )
    rows = ShardedEmbeddings([table("item", Pooling.NONE)], lr=0.1, placement="row_wise", gradients=gradients)
    replicas = SlicedReplicas(top())
    optimizer = torch.optim.Adam(replicas.parameters(), lr=0.01, foreach=False)
    dataset = data(151)
    sampler = SliceSampler(dataset, 64)
    loader = DataLoader(dataset, batch_sampler=sampler)
    found = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (ids, item, labels) in enumerate(loader):
            size = sampler.size(number)
            vectors = torch.cat(
                [bags({"user": ids}, global_batch=size)["user"], rows({"item": item}, global_batch=size)["item"]], 1
            )
            logits = replicas(vectors, global_batch=size)
            losses = replicas.each_slice(binary_cross_entropy_with_logits, logits, labels, global_batch=size)
            optimizer.zero_grad()
            replicas.loss(losses).backward()
            optimizer.step()
            found.append(float(replicas.global_loss(losses)).hex())
    assert len(found) == 2 * 3
    return [bags.digest(), rows.digest(), replicas.digest(), *found]


def test_a_slice_sampler_gives_all_worlds_the_same_weights(kept_world: WorldFactory) -> None:
    """`gradients` is "sum" by itself: at 1 rank nothing shows it, at 2 the digests do."""
    found = [kept_world(world).run(dealt, gradients=None) for world in (1, 3, 8)]
    found.append(kept_world(2).run(dealt, gradients="sum"))
    first = found[0][0]
    assert all(one == first for of_world in found for one in of_world)


class Plain:
    """Plain torch on the samples of all ranks, SGD."""

    def __init__(self, user: Tensor, item: Tensor) -> None:
        self.user, self.item, self.top = nn.Parameter(user.clone()), nn.Parameter(item.clone()), top()
        self.parameters = [self.user, self.item, *self.top.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=RATE, foreach=False)

    def step(self, ids: Tensor, item: Tensor, labels: Tensor) -> float:
        vectors = torch.cat([embedding_bag(ids, self.user, mode="sum"), self.item[item]], 1)
        loss = binary_cross_entropy_with_logits(self.top(vectors), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def equal_ranks(rank: int, world: int, beside: str, placement: str) -> None:
    """A program for DDP with a DistributedSampler: every sample counts as in plain torch, in uneven batches, too."""
    bags = ShardedEmbeddingBags([table("user")], lr=RATE, placement=placement)
    rows = ShardedEmbeddings([table("item", Pooling.NONE)], lr=RATE, placement=placement)
    plain = Plain(rows_of(bags, world), rows_of(rows, world))
    model: Any = SlicedReplicas(top()) if beside == "replicas" else DistributedDataParallel(top())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False)
    dataset = data(world * 67)  # 32, 32 and 3 samples a rank: a slice of some rank has none in the end.
    of_ranks: list[list[int]] = [list(DistributedSampler(dataset, world, one, seed=5)) for one in range(world)]
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset, world, rank, seed=5))
    for number, (ids, item, labels) in enumerate(loader):
        vectors = torch.cat([bags({"user": ids})["user"], rows({"item": item})["item"]], 1)
        logits = model(vectors)
        optimizer.zero_grad()
        chosen = list(itertools.chain(*(own[32 * number : 32 * number + 32] for own in of_ranks)))
        if beside == "replicas":
            losses = model.each_slice(binary_cross_entropy_with_logits, logits, labels)
            model.loss(losses).backward()
            assert torch.equal(model.gathered(labels), dataset.tensors[2][chosen])
        else:
            binary_cross_entropy_with_logits(logits, labels).backward()
        optimizer.step()
        expected = plain.step(*(part[chosen] for part in dataset.tensors))
        if beside == "replicas":
            assert float(model.global_loss(losses)) == pytest.approx(expected, rel=1e-5)
        ours = [rows_of(bags, world), rows_of(rows, world), *model.parameters()]
        for one, other in zip(ours, plain.parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert number == 2


@pytest.mark.parametrize(
    ("world", "beside", "placement"),
    [
        (2, "replicas", "row_wise"),
        (3, "replicas", "row_wise"),
        (3, "DDP", "data_parallel"),
        (5, "replicas", "table_wise"),
    ],
)
def test_a_distributed_sampler_works_with_any_number_of_ranks(
    kept_world: WorldFactory, world: int, beside: str, placement: str
) -> None:
    kept_world(world).run(equal_ranks, beside=beside, placement=placement)


def held_back(rank: int, world: int) -> None:
    """Slices have no samples in some passes of a step and some in others: gradients are those of all."""
    replicas = SlicedReplicas(top())
    alone = copy.deepcopy(replicas.module)
    for held, count in ((False, 8), (False, 1), (True, 8), (False, 1), (True, 1), (False, 8)):
        samples = torch.randn(world * count, 2 * DIM, generator=torch.Generator().manual_seed(count))
        own = samples[count * rank : count * rank + count]
        with replicas.no_sync() if held else torch.enable_grad():
            replicas.loss(replicas.each_slice(torch.mean, replicas(own))).backward()
        alone(samples).mean().backward()
    for ours, theirs in zip(replicas.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("world", [2, 3])
def test_slices_without_samples_add_nothing(kept_world: WorldFactory, world: int) -> None:
    kept_world(world).run(held_back)


def losses_of_earlier_calls(rank: int, world: int) -> None:
    """A loss counts by the samples of its own call, whatever was called since."""
    replicas = SlicedReplicas(nn.Flatten(0))
    x = torch.arange(8 * world, dtype=torch.float32)
    own = x[8 * rank : 8 * rank + 8].view(8, 1)
    losses = replicas.each_slice(torch.mean, replicas(own))
    replicas.each_slice(torch.mean, own[:5])
    assert float(replicas.global_loss(losses)) == pytest.approx(float(x.mean()))


@pytest.mark.parametrize("world", [2, 3])
def test_a_loss_counts_by_the_samples_of_its_call(kept_world: WorldFactory, world: int) -> None:
    kept_world(world).run(losses_of_earlier_calls)


def refuses_sizes(rank: int, world: int) -> None:
    """Ranks learn of each other's samples before anything is looked up, and go on."""
    bags = ShardedEmbeddingBags([table("user")], lr=1)
    before = bags.digest()
    last = rank == world - 1
    with pytest.raises(
        ArgumentError, match=f"7 samples on rank 0, 5 on rank {world - 1}; allowed: equally many on all"
    ):
        bags({"user": torch.arange(5 if last else 7)})
    with pytest.raises(
        ArgumentError, match=r"slices of 2 and 3 samples without a global_batch; allowed: with global_b"
    ):
        bags({"user": torch.arange(len(range(*bags.slices.samples(rank, 19))))})
    with pytest.raises(
        ArgumentError, match=r"7 samples on rank .; of a global batch of 99 its slices .* or equally many"
    ):
        bags({"user": torch.arange(7)}, global_batch=99)
    with pytest.raises(
        ArgumentError, match=r"global_batch (none|21) on rank .*, (none|21) on rank .; all ranks must give"
    ):
        bags({"user": torch.arange(7)}, global_batch=21 if last else None)
    replicas = SlicedReplicas(nn.Linear(1, 1))
    with pytest.raises(ArgumentError, match=r"leaves rank . without a sample"):
        replicas(torch.ones(1 if last else 0, 1), global_batch=1)
    with pytest.raises(ArgumentError, match=r"7 samples on rank 0, 5 on rank 2"):
        replicas.loss(replicas.each_slice(torch.mean, replicas(torch.ones(5 if last else 7, 1))))
    assert bags.digest() == before
    assert bags({"user": torch.arange(7)})["user"].shape == (7, DIM)


def test_samples_that_fit_no_rule_are_refused_on_all_ranks(kept_world: WorldFactory) -> None:
    kept_world(3).run(refuses_sizes)


class Inside(nn.Module):
    def __init__(self, bags: ShardedEmbeddingBags) -> None:
        super().__init__()
        self.bags, self.top = bags, nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.top(self.bags({"user": ids})["user"])
        return found


def refuses_gradients(rank: int, world: int) -> None:
    """What contradicts `gradients` is refused on all ranks. Rows stay as they were, and the module goes on."""
    mean, added, told = (ShardedEmbeddingBags([table("user")], lr=1, gradients=kind) for kind in ("mean", "sum", None))
    replicas = SlicedReplicas(nn.Linear(DIM, 1))
    ids = torch.arange(8)
    before = [one.digest() for one in (mean, added, told)]

    def loss_of(bags: ShardedEmbeddingBags) -> Tensor:
        losses = replicas.each_slice(torch.mean, replicas(bags({"user": ids})["user"]))
        return replicas.loss(losses)

    with pytest.raises(ArgumentError, match='gradients "mean" of a loss through SlicedReplicas'):
        loss_of(mean).backward()
    with pytest.raises(ArgumentError, match='gradients="sum" inside of a DDP, which averages gradients'):
        DistributedDataParallel(Inside(added))(ids)
    # A branch beside the replicas, which autograd reaches before them.
    loss = replicas.loss(replicas.each_slice(torch.mean, replicas(torch.ones(8, DIM))))
    with pytest.raises(
        ArgumentError, match=r'came before the backward pass went through SlicedReplicas.*gradients="sum"'
    ):
        (loss + told({"user": ids})["user"].sum()).backward()
    if world > 1:
        with pytest.raises(ArgumentError, match="goes through SlicedReplicas on some ranks alone"):
            ((told({"user": ids})["user"].sum()) if rank else loss_of(told)).backward()
    assert [one.digest() for one in (mean, added, told)] == before
    mean({"user": ids})["user"].sum().backward()
    loss_of(added).backward()
    loss_of(told).backward()
    assert added.digest() == told.digest() != before[2]
    assert mean.digest() != before[0]


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_contradict_what_stands_beside_are_refused(kept_world: WorldFactory, world: int) -> None:
    kept_world(world).run(refuses_gradients)


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_the_batches_of_a_slice_sampler(shuffle: bool) -> None:
    dataset = data(203)
    alone = list(SliceSampler(dataset, 64, num_replicas=1, rank=0, shuffle=shuffle, seed=7))
    assert [len(batch) for batch in alone] == [64, 64, 64, 11]
    assert sorted(itertools.chain(*alone)) == list(range(203))
    for world in range(2, 9):
        ranks = [
            SliceSampler(dataset, 64, num_replicas=world, rank=rank, shuffle=shuffle, seed=7) for rank in range(world)
        ]
        assert [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)] == alone
    one = SliceSampler(dataset, 64, num_replicas=1, rank=0, shuffle=shuffle, seed=7)
    assert [one.size(number) for number in range(len(one))] == [64, 64, 64, 11]
    theirs: Any = DistributedSampler(dataset, 1, 0, shuffle=shuffle, seed=7)
    for sampler in (one, theirs):
        sampler.set_epoch(3)
    assert list(itertools.chain(*one)) == list(theirs)
    assert (list(one) == alone) is not shuffle


def test_a_slice_sampler_leaves_out_batches_that_not_all_slices_have_part_in() -> None:
    for count, drop_last, batches in ((128, False, 2), (135, False, 2), (136, False, 3), (136, True, 2)):
        sampler = SliceSampler(range(count), 64, num_replicas=2, rank=1, drop_last=drop_last)
        assert len(sampler) == len(list(sampler)) == batches
    with pytest.raises(IndexError, match="batch 2; allowed: 0 to 1"):
        sampler.size(2)
    for wrong, match in (
        ({"global_batch": 7}, "a global batch of 7; allowed: 8 or more"),
        ({"rank": 2}, "rank 2; allowed: 0 to 1"),
        ({"num_replicas": 9}, "8 slices of the global batch for 9 ranks"),
        ({"dataset": range(5)}, "5 samples make no batch; allowed: 8 or more"),
    ):
        with pytest.raises(ConfigError, match=match):
            SliceSampler(**{"dataset": range(99), "global_batch": 16, "num_replicas": 2, "rank": 0, **wrong})
