# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="arg-type"
"""Trains sharded tables on every rank, plain and coded: tests compare what that gives in other surroundings."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.backend import communicator
from sennit.runtime.kernels import Optimizer, OptimizerSpec, Pooling, Precision
from sennit.runtime.sharded import (
    Features,
    Home,
    PhaseClock,
    Sent,
    ShardedEmbeddingBags,
    ShardedEmbeddings,
    Table,
    TableStore,
    place,
)
from sennit.runtime.sharded.module import ShardedTables
from sennit.transport.codecs import EXCHANGE_CODECS, Codec

CPU = torch.device("cpu")
ADAM = OptimizerSpec(kind=Optimizer.ADAM)
NESTEROV = OptimizerSpec(kind=Optimizer.SGD, momentum=0.9, nesterov=True)
FTRL = OptimizerSpec(kind=Optimizer.FTRL, l1=0.01, l2=0.1)
TABLES = (
    Table(name="user", rows=1000, dim=32, row_shards=8, column_shards=2),
    Table(name="item", rows=300, dim=20, row_shards=4, precision=Precision.FP16, optimizer=ADAM),
    Table(
        name="genre",
        rows=17,
        dim=8,
        row_shards=3,
        column_shards=4,
        features=("liked", "seen"),
        pooling=Pooling.MEAN,
        optimizer=NESTEROV,
    ),
    Table(name="city", rows=5, dim=16, row_shards=8, column_shards=8, precision=Precision.BF16, optimizer=FTRL),
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
        train: dict[str, Any] = {"row_shards": 1, "column_shards": 1, "train_rank": 3, "optimizer": OptimizerSpec()}
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
        lr=0.1,
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


def rows_of(module: ShardedTables, world: int) -> Tensor:
    """The rows of the first table, from all ranks."""
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {held.name: held.weight for held in module.held()})
    table = module.tables[0]
    rows = torch.empty(table.rows, table.dim)
    for one in everyone:
        for name, weight in one.items():
            of_table, _, shard = name.rpartition("/")
            if of_table != table.name:
                continue
            row, column = map(int, shard.split("."))
            rows[slice(*table.row_range(row)), slice(*table.column_range(column))] = weight
    return rows


CODED_TABLES = (
    Table(name="user", rows=400, dim=32, column_shards=2),
    Table(name="item", rows=300, dim=48, features=("bought", "seen"), optimizer=ADAM),
    Table(name="genre", rows=17, dim=16, pooling=Pooling.MEAN),
)


def coded(
    rank: int,
    world: int,
    codec: str | None,
    placement: Any = "table_wise",
    kind: str = "bags",
    device: torch.device = CPU,
) -> tuple[str, dict[str, int]]:
    """Three steps with a codec: the digest, and the bytes sent by kind, and "all" of the transport."""
    before = communicator().counters().get("shm_bytes_sent", 0)
    tables: tuple[Table, ...] = CODED_TABLES
    if kind == "sequences":
        tables = tuple(dataclasses.replace(table, pooling=Pooling.NONE) for table in tables)
    made = ShardedEmbeddings if kind == "sequences" else ShardedEmbeddingBags
    chosen = None if codec is None else Codec(kind=EXCHANGE_CODECS[codec])
    clock = PhaseClock()
    options: dict[str, Any] = {"lr": 0.1, "gradients": "sum", "codec": chosen, "clock": clock}
    module = made(tables, placement=placement, device=device, **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        part = module.slices.own_samples(24)
        ids = {
            name: (torch.rand(24, 9, generator=generator) * rows).to(torch.int32)[part]
            for name, rows in (("user", 400), ("bought", 300), ("seen", 300), ("genre", 17))
        }
        outputs = list(module(ids).values())
        assert all(vectors.device.type == device.type for vectors in outputs)
        torch.autograd.backward(outputs, [vector.detach() * 0.5 + 0.25 for vector in outputs])
    module.check()
    # Autograd has a thread of its own for each GPU, so the backward pass is beside this one there.
    seconds = clock.beside | clock.seconds
    assert {"input exchange", "lookup", "sparse update"} <= seconds.keys()
    if world > 1 and placement == "table_wise":
        assert {"AlltoAll forward", "AlltoAll backward"} <= seconds.keys()
    assert all(spent >= 0 for spent in seconds.values())
    sent = communicator().counters().get("shm_bytes_sent", 0) - before
    return module.digest(), module.sent_bytes | {"all": sent}
