# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,arg-type"
"""Incremental saves of sharded tables: run on each rank by test_saver.py."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sennit.runtime.checkpoint import folder as checkpoint
from sennit.runtime.checkpoint import reading
from sennit.runtime.checkpoint.manifest import CheckpointError, Manifest
from sennit.runtime.checkpoint.reading import OpenedCheckpoint
from sennit.runtime.checkpoint.writing import Saver
from sennit.runtime.kernels import Optimizer, OptimizerSpec, Precision
from sennit.runtime.sharded import ShardedEmbeddingBags, Table, TableStore

SAMPLES = 16
PREFIX = "tables."


def tables_of(placement: Any, store: str | None = None) -> ShardedEmbeddingBags:
    adam = OptimizerSpec(kind=Optimizer.ADAM)
    tables = [
        Table(name="user", rows=2000, dim=12, row_shards=8, precision=Precision.BF16),
        Table(name="item", rows=900, dim=8, column_shards=4, optimizer=adam),
        Table(name="day.of", rows=7, dim=4),
        Table(name="train", rows=3000, dim=8, train_rank=2),
    ]
    home = None if store is None else TableStore(folder=Path(store), memory_bytes=1 << 19)
    return ShardedEmbeddingBags(tables, rate=0.05, gradients="sum", placement=placement, store=home)


def train(tables: ShardedEmbeddingBags, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    own = tables.slices.own_samples(SAMPLES)
    ids = {
        table.name: (torch.rand(SAMPLES, 3, generator=generator) ** 3 * table.rows).to(torch.int64)[own]
        for table in tables.tables
    }
    found = tables(ids)
    torch.autograd.backward(list(found.values()), [vectors.detach() + 0.5 for vectors in found.values()])


def state_of(tables: ShardedEmbeddingBags) -> dict[str, Any]:
    return {f"{PREFIX}{name}": tensor for name, tensor in tables.state_dict().items()}


def about(step: int) -> Manifest:
    return Manifest(run_id="0123456789abcdef", step=step, fixed={}, free={}, code={})


def whole(tables: ShardedEmbeddingBags) -> dict[str, Any]:
    tables.track_changes()
    return state_of(tables)


def saved(
    rank: int, world: int, placement: Any, folder: str, in_background: bool, steps: int, store: str | None = None
) -> list[str]:
    """A save after each step. Returns the digests of the tables at these moments."""
    tables = tables_of(placement, store)
    tables.track_changes()
    saver = Saver(Path(folder), increments=3, in_background=in_background, digests=True)
    digests = []
    for number in range(1, steps + 1):
        train(tables, number)
        digests.append(tables.digest())
        saver.save(
            about(number),
            functools.partial(whole, tables),
            changes=lambda: {f"{PREFIX}{name}": tensor for name, tensor in tables.changes().items()},
            copied={f"{PREFIX}{name}" for name in tables.in_files},
        )
    saver.finish()
    tables.close()
    return digests


def loaded(rank: int, world: int, placement: Any, path: str) -> str:
    tables = tables_of(placement)
    train(tables, 99)
    state = state_of(tables)
    reading.load(Path(path), state)
    tables.load_state_dict({name.removeprefix(PREFIX): value for name, value in state.items()})
    return tables.digest()


def refuses_damage(rank: int, world: int, path: str) -> str:
    """The message, which all ranks get, whichever has read the damaged file."""
    with pytest.raises(CheckpointError) as told:
        reading.load(Path(path), {"x": torch.zeros(1)})
    return str(told.value)


def fails_on_one_rank(rank: int, world: int, folder: str, in_background: bool) -> None:
    """What one rank cannot write is an error on all of them, and the next save is a whole one."""
    state = {f"shard{rank}.weight": torch.ones(100, 4), "dense": torch.ones(5)}
    saver = Saver(Path(folder), increments=9, in_background=in_background)

    def save(step: int) -> None:
        rows = torch.tensor([step])
        increment = {f"shard{rank}.weight": state[f"shard{rank}.weight"][rows], f"shard{rank}.changed_rows": rows}
        saver.save(about(step), lambda: state, changes=lambda: increment)

    def save_now(step: int) -> None:
        save(step)
        saver.finish()

    save(1)
    save_now(2)
    if rank == 1:
        # A folder where its file would be.
        (Path(folder) / "step-000000003.partial" / "__1_0.distcp").mkdir(parents=True)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr("shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(CheckpointError, match=r"step-000000003 was not written: rank 1: .*Is a directory"):
            save_now(3)
    save_now(4)
    newest = checkpoint.latest(Path(folder))
    assert newest is not None
    assert newest.name == "step-000000004"
    assert Manifest.read(newest).after == ()
    dist.barrier()


def loses_a_rank(rank: int, world: int, folder: str) -> float:
    """A rank dies while both save. The other gets the transport's error, and does not wait for the dead one's part."""
    saver = Saver(Path(folder), in_background=True, timeout_s=1000)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("sennit.runtime.checkpoint.writing._leave", lambda *_: os._exit(9))
        saver.save(about(1), lambda: {"x": torch.ones(9)})
        with pytest.raises(Exception, match=r"rank 1|closed|lost|died"):
            saver.save(about(2), lambda: {"x": torch.ones(9)})
    saver.abandon()
    assert checkpoint.latest(Path(folder)) is None
    return 0.0


def reads_alone(rank: int, world: int, path: str) -> dict[str, list[int]]:
    """Sizes of tensors, as a program without ranks sees them."""
    return {name: list(about.size) for name, about in OpenedCheckpoint(Path(path), alone=True).tensors.items()}
