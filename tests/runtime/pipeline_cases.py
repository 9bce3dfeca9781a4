# SPDX-License-Identifier: Apache-2.0
"""Pipelines of a small model: run on each rank by test_pipeline.py."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from sennit.runtime.kernels import Optimizer, OptimizerSpec, Pooling
from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.pipeline import Pipeline, Record, Task, room
from sennit.runtime.replicas import SlicedReplicas, reduction
from sennit.runtime.sharded import ShardedEmbeddingBags, ShardedEmbeddings, Table
from sennit.runtime.timeline import Timeline
from sennit.transport.errors import ArgumentError, ConfigError

SAMPLES, DIM, SLICES, STEPS = 12, 4, 4, 4
# A small model has several buckets then.
reduction.BUCKET_BYTES = 64


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
        adam = OptimizerSpec(kind=Optimizer.ADAM)
        bags = [
            Table(name="user", rows=40, dim=DIM, row_shards=2),
            Table(name="item", rows=9, dim=DIM, column_shards=2, pooling=Pooling.MEAN, optimizer=adam),
        ]
        sequences = [Table(name="watched", rows=20, dim=DIM, row_shards=2, pooling=Pooling.NONE)]
        options: dict[str, Any] = {"rate": rate, "gradients": "sum", "placement": placement, "slices": SLICES}
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


def serial(rank: int, world: int, placement: str) -> list[Any]:
    """The digest after a plain loop, and its losses."""
    model = Model(placement)
    optimizer = torch.optim.Adam(model.replicas.parameters(), lr=0.01, foreach=False)
    losses = []
    for batch in batches(model):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [model.digest(), losses]


def delayed(seed: int) -> Callable[[Task], None]:
    """Holds each task up for a time that (seed, task) say: most not at all, some longer than a step."""

    def before(task: Task) -> None:
        chance = random.Random(f"{seed} {task.name} {task.step} {task.thread}")
        if chance.random() < 0.5:
            threading.Event().wait(chance.random() ** 4 * 0.01)

    return before


def schedules(rank: int, world: int, placement: str, first: int, count: int) -> list[Any]:
    """What is different among digests and losses of so many schedules: one entry if they are all the same."""
    found: list[Any] = []
    for seed in range(first, first + count):
        model = Model(placement)
        # Ranks are held up in different places.
        with pipeline(model, batches(model), batches_ahead=seed % 4, before=delayed(seed * world + rank)) as steps:
            losses = [float(loss) for loss in steps]
        outcome = [model.digest(), losses]
        if outcome not in found:
            found.append(outcome)
    return found


def recorded(rank: int, world: int) -> list[list[Any]]:
    """Name, step, thread, inputs and whether times rise, of each task."""
    records: list[Record] = []
    model = Model("row_wise")
    with pipeline(model, batches(model, 2), on_task=records.append) as steps:
        for _ in steps:
            pass
    return [
        [
            record.name,
            record.step,
            record.thread,
            [list(one) for one in record.inputs],
            record.submitted_ns <= record.start_ns <= record.end_ns,
            record.error,
        ]
        for record in records
    ]


def timed(rank: int, world: int, path: str) -> list[Any]:
    """The digest without and with a timeline."""
    plain, watched = Model("row_wise"), Model("row_wise")
    with pipeline(plain, batches(plain)) as steps:
        list(steps)
    with Timeline(path) as timeline, pipeline(watched, batches(watched), timeline=timeline) as steps:
        list(steps)
    return [plain.digest(), watched.digest(), timeline.is_written]


def few_kept(rank: int, world: int, path: str) -> bool:
    """With room for so few slices that only the last steps are there."""
    model = Model("row_wise")
    with Timeline(path, room=40) as timeline, pipeline(model, batches(model, 12), timeline=timeline) as steps:
        list(steps)
    return timeline.is_written


def failing(loader: Iterator[Batch], after: int, error: Exception) -> Iterator[Batch]:
    for _ in range(after):
        yield next(loader)
    raise error


def loader_raises(rank: int, world: int, depth: int) -> list[Any]:
    """The last rank's loader raises for the third batch. Steps taken, and the error."""
    model = Model("table_wise")
    loader = batches(model)
    if rank == world - 1:
        loader = failing(loader, 2, OSError("the disk is gone"))
    steps = 0
    with pipeline(model, loader, batches_ahead=depth) as run:
        try:
            for _ in run:
                steps += 1
        except Exception as error:
            return [steps, f"{type(error).__name__}: {error}", model.digest()]
    return [steps, "no error", model.digest()]


def loader_ends(rank: int, world: int, depth: int) -> list[Any]:
    """The last rank has two batches, the others four. Then another pipeline takes two of the same model."""
    model = Model("row_wise")
    steps = []
    for _ in range(2):
        with pipeline(model, batches(model, 2 if rank == world - 1 else STEPS), batches_ahead=depth) as run:
            steps.append(sum(1 for _ in run))
    return [steps, model.digest()]


def left_early(rank: int, world: int, depth: int) -> str:
    """All ranks leave the loop after two steps. Nothing that was sent ahead may hold anyone up."""
    model = Model("row_wise")
    with pipeline(model, batches(model, 100), batches_ahead=depth) as run:
        next(run)
        next(run)
    return model.digest()


def dies(rank: int, world: int, victim: int, where: str) -> str:
    """The victim dies at the beginning of a task of the third step. What the others get."""

    def before(task: Task) -> None:
        if rank == victim and task.step == 2 and task.name == where:
            os.kill(os.getpid(), signal.SIGKILL)

    model = Model("row_wise")
    try:
        with pipeline(model, batches(model, 100), before=before) as run:
            for _ in run:
                pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused(rank: int, world: int) -> list[str]:
    """What a pipeline says of mistakes."""
    model = Model("table_wise")
    found = []
    for options in ({"batches_ahead": 4}, {"batches_ahead": -1}):
        try:
            pipeline(model, batches(model), **options)
        except ConfigError as error:
            found.append(str(error))
    try:
        Pipeline(model.replicas, None, [])
    except ArgumentError as error:
        found.append(str(error))
    copying = Pipeline(
        model,
        torch.optim.SGD(model.replicas.parameters(), lr=0.1),
        batches(model),
        features=lambda batch: (dict(batch.ids), batch.watched),
        global_batch=lambda batch: SAMPLES,
    )
    try:
        with copying as run:
            next(run)
    except ArgumentError as error:
        found.append(str(error))
    return found


def crowded(rank: int, world: int, depth: int, left: int) -> list[Any]:
    """When the first batch is there the host has so many bytes left.

    The error, steps, batches that were taken, and whether weights changed.
    """
    model, taken = Model("row_wise"), []
    before = model.digest()

    def watched() -> Iterator[Batch]:
        for batch in batches(model):
            taken.append(batch)
            yield batch

    steps, told = 0, "no error"
    with mock.patch.object(room, "available_bytes", return_value=left):
        try:
            with pipeline(model, watched(), batches_ahead=depth) as run:
                for _ in run:
                    steps += 1
        except ConfigError as error:
            told = str(error)
    return [told, steps, len(taken), model.digest() != before]


def bad_gradient(rank: int, world: int, depth: int) -> list[Any]:
    """The dense part of the last rank has a NaN in the second step. Steps taken until all ranks know."""
    model = Model("table_wise")
    steps = 0

    def poison() -> None:
        if steps == 0:
            with torch.no_grad():
                for parameter in model.replicas.parameters():
                    parameter.fill_(torch.nan)

    try:
        with pipeline(model, batches(model, 8), batches_ahead=depth) as run:
            for _ in run:
                poison()
                steps += 1
    except GradientError:
        return [steps, "GradientError"]
    return [steps, "no error"]
