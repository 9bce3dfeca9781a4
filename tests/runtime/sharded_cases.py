# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,arg-type"
"""Sharded tables: run on each rank by test_sharded.py."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import resource
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.kernels import Bounds, Optimizer, OptimizerSpec, Pooling, Precision
from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.memory import keep_large_buffers
from sennit.runtime.sharded import (
    Features,
    Home,
    PeerInputError,
    Sent,
    ShardedEmbeddingBags,
    ShardedEmbeddings,
    Table,
    TableStore,
    place,
    placed,
)
from sennit.runtime.sharded.module import ShardedTables
from sennit.transport.errors import ArgumentError, ConfigError

CPU = torch.device("cpu")
ADAM = OptimizerSpec(kind=Optimizer.ADAM)
TABLES = (
    Table(name="user", rows=1000, dim=32, row_shards=8, column_shards=2),
    Table(name="item", rows=300, dim=20, row_shards=4, precision=Precision.FP16, optimizer=ADAM),
    Table(
        name="genre", rows=17, dim=8, row_shards=3, column_shards=4, features=("liked", "seen"), pooling=Pooling.MEAN
    ),
    Table(name="city", rows=5, dim=16, row_shards=8, column_shards=8, precision=Precision.BF16),
)


def features(step: int, samples: int, *, seed: int = 0, weighted: bool = False) -> Features:
    """The ids of a global batch: some rows are used very often, and some bags are empty."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    lengths = torch.randint(0, 40, (5, samples), generator=generator, dtype=torch.int32)
    values = []
    for row, table in enumerate((TABLES[0], TABLES[1], TABLES[2], TABLES[2], TABLES[3])):
        count = int(lengths[row].sum())
        values.append((torch.rand(count, generator=generator) ** 4 * table.rows).to(torch.int64))
    ids = torch.cat(values)
    weights = torch.randn(len(ids), generator=generator) if weighted else None
    return Features(lengths=lengths, values=ids, weights=weights)


def own_part(whole: Features, first: int, end: int) -> Features:
    """Some samples of a batch."""
    counts = whole.lengths.sum(1).tolist()
    values, weights = [], []
    for row, (ids, of_ids) in enumerate(
        zip(
            torch.split(whole.values, counts),
            torch.split(whole.values if whole.weights is None else whole.weights, counts),
            strict=True,
        )
    ):
        start, stop = int(whole.lengths[row, :first].sum()), int(whole.lengths[row, :end].sum())
        values.append(ids[start:stop])
        weights.append(of_ids[start:stop])
    return Features(
        lengths=whole.lengths[:, first:end].contiguous(),
        values=torch.cat(values),
        weights=None if whole.weights is None else torch.cat(weights),
    )


def at_home(tables: tuple[Table, ...], homes: dict[str, str]) -> tuple[Table, ...]:
    """The tables, of which some are at these homes."""
    return tuple(
        dataclasses.replace(table, home=Home(homes[table.name])) if table.name in homes else table for table in tables
    )


def trained(
    rank: int,
    world: int,
    placement: Any,
    samples: int = 27,
    kind: str = "bags",
    implementation: str = "native",
    passes: int = 1,
    ahead: int = 0,
    trains: bool = False,
    folder: str | None = None,
    memory_bytes: int = 0,
    device_bytes: int | None = None,
    device: torch.device = CPU,
    ids_there: bool = False,
    steps: int = 4,
    then: Any = None,
    homes: dict[str, str] | None = None,
) -> tuple[str, list[str]]:
    """Backward passes whose gradients are elementwise functions of the outputs, so many `passes` in a step.

    `kind`: bags, weighted or sequences. `ahead`: how many later batches are sent before one is looked up. `trains`: two
    tables are tensor trains. `folder`: where tables are in files, with caches of `memory_bytes`, and of `device_bytes`
    on the `device` of the tables. `ids_there`: ids are given on it. `then`: the placement after half of the steps.
    `homes`: of tables by name.

    Returns the digest of the tables, and one of each sample's last outputs.
    """
    tables: tuple[Table, ...] = TABLES
    if kind == "sequences":
        tables = tuple(dataclasses.replace(table, pooling=Pooling.NONE) for table in TABLES)
    if trains:
        train = {"row_shards": 1, "column_shards": 1, "train_rank": 3}
        tables = tuple(
            dataclasses.replace(table, **train) if table.name in ("user", "genre") else table for table in tables
        )
    tables = at_home(tables, homes or {})
    made = ShardedEmbeddings if kind == "sequences" else ShardedEmbeddingBags
    store = None
    if folder is not None:
        store = TableStore(folder=Path(folder), memory_bytes=memory_bytes, device_bytes=device_bytes)
    module = made(
        tables,
        rate=0.1,
        placement=placement,
        gradients="sum",
        implementation_name=implementation,
        store=store,
        device=device,
    )
    outputs: list[Tensor] = []
    sent: deque[Sent] = deque()
    for step in range(steps):
        if then is not None and 2 * step == steps:
            module.track_changes()
            came = module.move(module.placement if then == "as it is" else place(tables, world, then))
            # Changes are those of shards that are here now.
            assert {held.name for held in module.held()} >= set(module.changed_rows())
            total = torch.tensor([came])
            dist.all_reduce(total)
            # What every rank has need not travel.
            assert (int(total) > 0) == (placement != "data_parallel" and then != "as it is")
        while step + len(sent) <= min(step + ahead, steps - 1):
            whole = features(step + len(sent), samples, weighted=kind == "weighted")
            part = own_part(whole, *module.slices.samples(rank, samples))
            if ids_there:
                there = None if part.weights is None else part.weights.to(device)
                part = Features(lengths=part.lengths.to(device), values=part.values.to(device), weights=there)
            sent.append(module.send(part, global_batch=samples))
        with contextlib.nullcontext() if step % passes == passes - 1 else module.no_sync():
            outputs = list(module(sent.popleft()).values())
            assert all(vectors.device.type == device.type for vectors in outputs)
            torch.autograd.backward(outputs, [vector.detach() * 0.5 + 0.25 for vector in outputs])
    module.check()
    of_sample = [hashlib.sha256() for _ in range(part.lengths.shape[1])]
    for feature, vectors in enumerate(outputs):
        counts = part.lengths[feature].tolist() if kind == "sequences" else [1] * len(of_sample)
        for found, rows in zip(of_sample, torch.split(vectors.detach(), counts), strict=True):
            found.update(rows.contiguous().cpu().numpy().data)
    digest = module.digest()
    if store is not None:
        is_all_stored = isinstance(placement, str) and placement != "data_parallel" and not trains and not homes
        assert world > 1 or not is_all_stored or module.cache_counters()["evictions"] > 0
        assert not list(store.folder.iterdir())
    module.close()
    return digest, [found.hexdigest()[:16] for found in of_sample]


def like_torch(rank: int, world: int, placement: str, kind: str) -> None:
    """One step against torch's own embedding bags with the same initial rows, on the whole batch."""
    pooling = {"sum": Pooling.SUM, "mean": Pooling.MEAN, "none": Pooling.NONE}[kind]
    table = Table(
        name="user", rows=200, dim=12, row_shards=3, column_shards=2, pooling=pooling,
        optimizer=OptimizerSpec(kind=Optimizer.SGD), initial=lambda rows, generator: rows.normal_(generator=generator),
    )  # fmt: skip
    module = (ShardedEmbeddings if kind == "none" else ShardedEmbeddingBags)([table], rate=0.5, placement=placement)
    samples = 16
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(0, 6, (1, samples), generator=generator)
    values = torch.randint(0, 200, (int(lengths.sum()),), generator=generator)
    whole = Features(lengths=lengths, values=values)
    rows = rows_of(module, world)
    mine = module.slices.own_samples(samples)
    weight = torch.nn.Parameter(rows.clone())
    offsets = torch.cumsum(lengths[0], 0) - lengths[0]
    if kind == "none":
        expected = torch.nn.functional.embedding(values, weight)
        first = int(lengths[0, : mine.start].sum())
        own = expected[first : first + int(lengths[0, mine].sum())]
    else:
        expected = torch.nn.functional.embedding_bag(values, weight, offsets, mode=kind)
        own = expected[mine]
    found = module(own_part(whole, mine.start, mine.stop))["user"]
    torch.testing.assert_close(found, own)
    (expected * expected).sum().backward()
    (found * found).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(rows_of(module, world), rows - 0.5 * weight.grad / world)


def rows_of(module: ShardedTables, world: int) -> Tensor:
    """The rows of the first table, from all ranks."""
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {held.name: held.weight for held in module.held()})
    table = module.tables[0]
    rows = torch.empty(table.rows, table.dim)
    for one in everyone:
        for name, weight in one.items():
            row, column = (int(number) for number in name.rpartition("/")[2].split("."))
            rows[slice(*table.row_range(row)), slice(*table.column_range(column))] = weight
    return rows


def refuses(rank: int, world: int) -> None:
    """Everything that one rank gives wrong is refused on all of them, and nothing changes."""
    module = ShardedEmbeddingBags(TABLES, rate=0.1)
    good = features(0, 8)
    before = module.digest()
    bad = Features(lengths=good.lengths, values=good.values.clone())
    bad.values[3] = 1000
    with pytest.raises(ArgumentError) as caught:
        module(bad if rank == 1 else good)
    if rank == 1:
        assert "feature user: id 1000 at position 3; table user has rows 0 to 999" in str(caught.value)
    else:
        assert isinstance(caught.value, PeerInputError)
        assert "rank 1 has an id outside its table" in str(caught.value)
    with pytest.raises(ArgumentError, match=r"the global batch has (64|128) samples on rank"):
        module(features(0, 8 if rank else 16) if world == 1 else features(0, 64 // world * (1 + rank)))
    wrong = Features(lengths=good.lengths, values=good.values[1:])
    with pytest.raises(ArgumentError, match=r"ids in all|input of rank 0 is wrong"):
        module(wrong if rank == 0 else good)
    with pytest.raises(ArgumentError, match="no ids for feature item; given: user"):
        module({"user": torch.zeros(8, dtype=torch.int64)})
    assert module.digest() == before
    assert len(module(good)["user"]) == 8


def refuses_moves(rank: int, world: int) -> None:
    """All ranks refuse, and the module goes on as it was."""
    module = ShardedEmbeddingBags(TABLES, rate=0.1)
    spread, sent = place(TABLES, world, "row_wise"), module.send(features(0, 8))
    with pytest.raises(ConfigError, match=f"a placement for {world + 1} ranks, but there are {world}"):
        module.move(place(TABLES, world + 1, "row_wise"))
    with pytest.raises(ConfigError, match=r"owner of city/0\.0"):
        module.move(place(TABLES, world, "data_parallel") if rank else spread)
    with module.no_sync():
        next(iter(module(features(0, 8)).values())).sum().backward()
    with pytest.raises(ArgumentError, match="between the backward passes of a step"):
        module.move(spread)
    next(iter(module(features(1, 8)).values())).sum().backward()
    before = module.digest()
    module.move(spread)
    with pytest.raises(ArgumentError, match="before its shards moved"):
        module(sent)
    assert module.digest() == before


def faults_of_large_buffers(rank: int, world: int, *, keeps: bool) -> list[int]:
    """Pages that the kernel gives for a buffer of 40 MiB, each time."""
    if keeps:
        assert keep_large_buffers()
    found = []
    for _ in range(24):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(10 << 20)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return found


def misuses_sent_batches(rank: int, world: int, kind: str) -> None:
    """A sent batch is for one call of its module, or for `drop`."""
    made = ShardedEmbeddings if kind == "sequences" else ShardedEmbeddingBags
    table = Table(name="user", rows=10, dim=4, pooling=Pooling.NONE if kind == "sequences" else Pooling.SUM)
    module, other = made([table], rate=1), made([table], rate=1)
    before = module.digest()
    first, second, third = (module.send({"user": torch.arange(8) + step}) for step in range(3))
    for use in (other, other.drop):
        with pytest.raises(ArgumentError, match="another module sent"):
            use(first)
    with pytest.raises(ArgumentError, match="global_batch for a batch that was sent"):
        module(first, global_batch=8 * world)
    module.drop(second)
    with torch.no_grad():
        assert torch.equal(module(third)["user"], module({"user": torch.arange(8) + 2})["user"])
    module(first)["user"].sum()
    for sent, fate in ((first, "looked up"), (second, "dropped"), (third, "looked up")):
        with pytest.raises(ArgumentError, match=f"to be looked up, but it was {fate} before"):
            module(sent)
        with pytest.raises(ArgumentError, match=f"to be dropped, but it was {fate} before"):
            module.drop(sent)
    assert module.digest() == before


def disagrees(rank: int, world: int) -> None:
    for options, match in (
        ({"slices": 8 << rank}, "slices: rank 0 has 8, rank 1 has 16"),
        ({"seed": rank}, "seed: rank 0 has 0, rank 1 has 1"),
        ({"placement": ("row_wise", "table_wise")[rank]}, "owner of city/0.0: rank 0 has 0, rank 1 has 1"),
    ):
        with pytest.raises(ConfigError, match=match):
            ShardedEmbeddingBags(TABLES, rate=0.1, **options)
    table = Table(name="user", rows=10 + rank, dim=4)
    with pytest.raises(ConfigError, match="table user: rows: rank 0 has 10, rank 1 has 11"):
        ShardedEmbeddingBags([table], rate=0.1)
    with pytest.raises(ConfigError, match=r"the placement does not place user/0.0; is it of another model"):
        ShardedEmbeddingBags([table], rate=0.1, placement=placed([table], world, {}))


def reports_gradients(rank: int, world: int, kind: str, placement: str) -> None:
    """A gradient that is not finite leaves its row alone, and is reported on all ranks in the next step."""
    pooling = Pooling.NONE if kind == "sequences" else Pooling.SUM
    table = Table(name="user", rows=10, dim=4, pooling=pooling)
    module = (ShardedEmbeddings if kind == "sequences" else ShardedEmbeddingBags)([table], rate=1, placement=placement)
    before = rows_of(module, world)
    ids = {"user": torch.arange(8) % 3 + 5 * (rank == 0)}
    found = module(ids)["user"]
    gradient = torch.ones_like(found)
    if rank == world - 1:
        gradient[0, 2] = torch.nan
    found.backward(gradient)
    after = rows_of(module, world)
    changed = (before != after).any(1)
    assert changed.tolist() == [row in (1, 2, 5, 6, 7) for row in range(10)]
    with pytest.raises(GradientError):
        module(ids)
    module(ids)


class Keyed:
    """A stand-in with the shape of TorchRec's KeyedJaggedTensor."""

    def __init__(self, names: list[str], lengths: Tensor, values: Tensor) -> None:
        self._names, self._lengths, self._values = names, lengths, values

    def keys(self) -> list[str]:
        return self._names

    def lengths(self) -> Tensor:
        return self._lengths

    def values(self) -> Tensor:
        return self._values

    def weights_or_none(self) -> Tensor | None:
        return None


def takes_all_forms(rank: int, world: int) -> None:
    tables = [Table(name="user", rows=10, dim=4), Table(name="item", rows=10, dim=4, bounds=Bounds.WRAP)]
    module = ShardedEmbeddingBags(tables, rate=1)
    users, items = torch.arange(8), torch.arange(16).view(8, 2)
    plain = module({"item": items, "user": users, "other": users})
    keyed = module(
        Keyed(
            ["item", "other", "user"],
            torch.tensor([2] * 8 + [1] * 8 + [1] * 8),
            torch.cat([items.flatten() % 10, users, users]),
        )
    )
    combined = module(Features(lengths=torch.tensor([[1] * 8, [2] * 8]), values=torch.cat([users, items.flatten()])))
    for other in (keyed, combined):
        assert all(torch.equal(plain[name], other[name]) for name in ("user", "item"))


def counts_bytes(rank: int, world: int, kind: str, placement: str) -> tuple[int, int]:
    """Bytes of a step with ids as in real data, and those if each lookup sent id, row and gradient."""
    pooling = Pooling.NONE if kind == "sequences" else Pooling.SUM
    tables = [Table(name=f"t{n}", rows=100_000, dim=64, row_shards=world, pooling=pooling) for n in range(2)]
    module = (ShardedEmbeddings if kind == "sequences" else ShardedEmbeddingBags)(tables, rate=1, placement=placement)
    generator = torch.Generator().manual_seed(rank)
    places = torch.cumsum(torch.arange(1, 100_001, dtype=torch.float64) ** -1.2, 0)
    draws = torch.rand(2, 512, 20, generator=generator, dtype=torch.float64) * places[-1]
    ids = torch.searchsorted(places, draws) * 48_271 % 100_000
    found = module({"t0": ids[0], "t1": ids[1]})
    torch.autograd.backward(list(found.values()), [torch.ones_like(vectors) for vectors in found.values()])
    own = module.tables[0].row_range(rank)
    elsewhere = int(((ids < own.low) | (ids >= own.high)).sum())
    return sum(module.sent_bytes.values()), elsewhere * (8 + 2 * 4 * 64)


def accumulates(rank: int, world: int, kind: str, placement: str) -> None:
    """Two passes in one step are a step of SGD with the sum of both gradients."""
    pooling = Pooling.NONE if kind == "sequences" else Pooling.SUM
    table = Table(name="user", rows=10, dim=4, pooling=pooling, optimizer=OptimizerSpec(kind=Optimizer.SGD))
    made = ShardedEmbeddings if kind == "sequences" else ShardedEmbeddingBags
    module = made([table], rate=0.5, placement=placement, gradients="sum")
    before = rows_of(module, world)
    with module.no_sync():
        found = module({"user": torch.arange(8) % 5})["user"]
        found.backward(torch.full_like(found, 2))
    assert torch.equal(rows_of(module, world), before)
    found = module({"user": torch.full((8,), 9)})["user"]
    assert torch.equal(found.detach(), before[9].expand(8, 4))
    found.backward(torch.ones_like(found))
    counts = torch.bincount(torch.arange(8) % 5, minlength=10) * 2 + torch.bincount(torch.full((8,), 9), minlength=10)
    torch.testing.assert_close(rows_of(module, world), before - 0.5 * world * counts.unsqueeze(1))
    module.check()


def tracks_changes(rank: int, world: int, placement: str, optimizer: str) -> None:
    """The rows that updates used are those that were used, and no byte of any other row changes."""
    kind = OptimizerSpec(kind=Optimizer(optimizer), weight_decay=0.01)
    tables = [
        Table(name=name, rows=200, dim=6, row_shards=8, column_shards=2, optimizer=kind) for name in ("user", "item")
    ]
    module = ShardedEmbeddingBags(tables, rate=0.5, placement=placement, gradients="sum")
    with pytest.raises(ArgumentError, match="changed_rows without track_changes"):
        module.changed_rows()
    take_step(module, torch.arange(4), torch.arange(4))
    module.track_changes()
    assert not any(len(rows) for rows in module.changed_rows().values())
    for used in ((3, 50, 51, 199), (0, 50, 120 + rank, 0)):
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        users = torch.tensor(used)
        with module.no_sync():
            take_step(module, users, torch.full((4,), 7))
        take_step(module, torch.full((4,), 77), torch.full((4,), 7))
        assert module.changed_rows(clear=False).keys() == {held.name for held in module.held()}
        changed = module.changed_rows()
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, set(users.tolist()))
        expected = {"user": set().union(*everyone, {77}), "item": {7}}
        for name, rows in changed.items():
            table, shard = name.split("/")
            low, high = tables[0].row_range(int(shard.split(".")[0]))
            assert rows.tolist() == sorted(row - low for row in expected[table] if low <= row < high)
        for name, tensor in module.state_dict().items():
            if name != "steps":
                differs = (tensor != before[name]).reshape(len(tensor), -1).any(1)
                assert set(differs.nonzero().flatten().tolist()) <= set(changed[name.rpartition(".")[0]].tolist())
                if name.endswith("weight"):
                    assert int(differs.sum()) == len(changed[name.rpartition(".")[0]])
        assert not any(len(rows) for rows in module.changed_rows().values())
    module.load_state_dict(module.state_dict())
    assert all(len(rows) == 25 for rows in module.changed_rows().values())


def take_step(module: ShardedEmbeddingBags, users: Tensor, items: Tensor) -> None:
    found = module({"user": users, "item": items})
    torch.autograd.backward(list(found.values()), [torch.ones_like(vectors) for vectors in found.values()])
