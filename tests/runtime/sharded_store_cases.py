# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call"
"""Sharded tables in files: run on each rank by test_sharded_store.py."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import warnings
from pathlib import Path

import pytest
import torch
from sharded_cases import TABLES, features, own_part  # type: ignore[import-not-found]
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from sennit.runtime.kernels import Optimizer, OptimizerSpec, Precision
from sennit.runtime.sharded import ShardedEmbeddingBags, Table, TableStore
from sennit.transport.errors import ArgumentError, ConfigError, SennitError

SAMPLES = 27


def made(folder: Path | None, placement: str = "row_wise", memory_bytes: int = 300_000) -> ShardedEmbeddingBags:
    """Tables of all precisions, one of them a tensor train; in files where there is a `folder`."""
    train = dataclasses.replace(TABLES[2], row_shards=1, column_shards=1, train_rank=2)
    store = None if folder is None else TableStore(folder=folder, memory_bytes=memory_bytes)
    tables = (*TABLES[:2], train, TABLES[3])
    return ShardedEmbeddingBags(tables, rate=0.1, gradients="sum", placement=placement, store=store)


def step(module: ShardedEmbeddingBags, number: int) -> None:
    part = own_part(features(number, SAMPLES), *module.slices.samples(module.slices.rank, SAMPLES))
    outputs = list(module(part, global_batch=SAMPLES).values())
    torch.autograd.backward(outputs, [vector.detach() * 0.5 + 0.25 for vector in outputs])


def saved(rank: int, world: int, folder: str, checkpoint: str, rows: str | None) -> str:
    """A checkpoint after a step. Returns the digest of another step."""
    module = made(None if rows is None else Path(folder) / rows)
    step(module, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save({"tables": module.state_dict()}, checkpoint_id=checkpoint)
    step(module, 1)
    digest = module.digest()
    module.close()
    return digest


def resumed(rank: int, world: int, folder: str, checkpoint: str, rows: str | None) -> str:
    """Goes on from the checkpoint with another placement. A step before must leave nothing behind."""
    module = made(None if rows is None else Path(folder) / rows, placement="column_wise")
    step(module, 5)
    state = {"tables": module.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(state, checkpoint_id=checkpoint)
    module.load_state_dict(state["tables"])
    step(module, 1)
    digest = module.digest()
    module.close()
    return digest


def initial(rank: int, world: int, folder: str) -> list[str]:
    """Digests of new tables in memory and in files."""
    tables = [
        Table(name="user", rows=70_001, dim=3, row_shards=2, column_shards=3, precision=Precision.BF16),
        Table(name="item", rows=70_002, dim=1),
    ]
    store = TableStore(folder=Path(folder), memory_bytes=1 << 21)
    modules = [ShardedEmbeddingBags(tables, rate=1, store=home) for home in (None, store)]
    return [module.digest() for module in modules]


def changes(rank: int, world: int, folder: str) -> None:
    found = []
    for home in (None, Path(folder)):
        module = made(home)
        step(module, 0)
        module.track_changes()
        step(module, 1)
        found.append(module.changed_rows())
    in_memory, in_files = found
    assert in_memory.keys() == in_files.keys()
    assert all(torch.equal(rows, in_files[name]) for name, rows in in_memory.items())
    assert 0 < len(in_files["user/1.1"]) < 125
    module.load_state_dict(module.state_dict())
    assert len(module.changed_rows()["user/1.1"]) == 125


def misused(rank: int, world: int, folder: str) -> None:
    sgd = OptimizerSpec(kind=Optimizer.SGD)
    table = Table(name="user", rows=5000, dim=4, row_shards=2, optimizer=sgd)
    store = TableStore(folder=Path(folder), memory_bytes=50_000)
    module = ShardedEmbeddingBags([table], rate=1, placement="row_wise", store=store)
    # Another module in the same folder, of which the second rank has nothing.
    other = ShardedEmbeddingBags([Table(name="one", rows=10, dim=2)], rate=1, store=store)
    assert module.batches_ahead == other.batches_ahead == 1
    ids = {"user": torch.arange(400).view(8, 50) + 5 * rank}
    before = module.digest()
    for _ in range(20):  # Together more rows than lines: those of forgotten batches may be evicted.
        ids["user"] = (ids["user"] + 200) % 5000
        module.send(ids)
        module(ids)
    assert module.digest() == before
    sent = module.send(ids)
    with pytest.raises(ArgumentError, match="1 batches were sent and are not done; allowed: none, drop them"):
        module.load_state_dict(module.state_dict())
    module.drop(sent)
    module.load_state_dict(module.state_dict())
    assert module.digest() == before
    found = module(ids)["user"]
    with pytest.raises(ArgumentError, match="half way through an update"):
        module.digest()
    found.sum().backward(retain_graph=True)
    with pytest.raises(ArgumentError, match="a second backward pass, but rows are in files"):
        found.sum().backward()
    del found
    assert module.digest() != before
    assert module.cache_counters()["evictions"] == 0  # Files are new since `load_state_dict`.
    with pytest.raises(ConfigError, match="lines of set"):
        module({"user": torch.arange(2500).view(1, -1).expand(8, -1) + 2500 * rank})
    unused = other.digest()
    other({"one": torch.arange(8)})["one"].sum().backward()
    assert other.digest() != unused
    assert bool(other.cache_counters()) == (rank == 0)
    for closed in (module, module, other):
        closed.close()
    assert not list(Path(folder).iterdir())


def killed(rank: int, world: int, folder: str, when: str) -> None:
    """Dies while it fills a file, or while it trains on it."""

    def initial(rows: Tensor, generator: torch.Generator) -> None:
        if when == "filling":
            os.kill(os.getpid(), signal.SIGKILL)

    table = Table(name="user", rows=5000, dim=2, initial=initial)
    store = TableStore(folder=Path(folder), memory_bytes=200_000)
    module = ShardedEmbeddingBags([table], rate=1, store=store)
    module({"user": torch.arange(8)})["user"].sum().backward()
    os.kill(os.getpid(), signal.SIGKILL)


def error(
    rank: int,
    world: int,
    folder: str,
    memory_bytes: int = 200_000,
    limited_rank: int = 0,
    file_limit_bytes: int | None = None,
    copy_limit_bytes: int | None = None,
) -> str:
    """Returns the error of a step over a store, and of a checkpoint of it. Limits stand for a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    table = Table(name="user", rows=5000, dim=2, row_shards=2, optimizer=OptimizerSpec(kind=Optimizer.SGD))
    store = TableStore(folder=Path(folder), memory_bytes=memory_bytes)
    try:
        limit(file_limit_bytes if rank == limited_rank else None)
        module = ShardedEmbeddingBags([table], rate=1, placement="row_wise", store=store)
        module({"user": torch.arange(800).view(8, 100)})["user"].sum().backward()
        limit(copy_limit_bytes)
        module.state_dict()
        module.close()
    except SennitError as told:
        return f"{type(told).__name__}: {told}"
    finally:
        limit(None)
    return "no error"


def limit(size_bytes: int | None) -> None:
    """The largest file that this process may write."""
    soft = resource.RLIM_INFINITY if size_bytes is None else size_bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
