# SPDX-License-Identifier: Apache-2.0
# torch exports these without saying so:
# mypy: disable-error-code="attr-defined"
"""Overlapped steps have the bits of serial ones, and nothing hangs when one fails."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.pipeline import Pipeline, Record, Task
from sennit.transport.errors import ArgumentError, ConfigError
from tests.extent import briefly
from tests.runtime.pipeline_model import SAMPLES, STEPS, Batch, Model, batches, pipeline
from tests.runtime.world import WorldFactory


def trained_serially(rank: int, world: int, placement: str) -> list[Any]:
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


class Twice(Model):
    """Looks up its bags twice in a step. The second lookup is not sent ahead."""

    def forward(self, batch: Batch) -> torch.Tensor:
        first = self.bags(batch.ids, global_batch=SAMPLES)
        items = batch.ids["item"]
        again = self.bags({"user": items, "item": items}, global_batch=SAMPLES)
        rows = self.sequences(batch.watched, global_batch=SAMPLES)["watched"].view(len(items), 2, -1)
        vectors = {name: first[name] * again[name] for name in ("user", "item")}
        return self.replicas.loss(
            self.replicas(batch.dense, vectors, rows, batch.labels, global_batch=SAMPLES), SAMPLES
        )


class Both:
    """The optimizers of a model and of its tables."""

    def __init__(self, model: Model) -> None:
        dense = torch.optim.Adam(model.replicas.parameters(), lr=0.01, foreach=False)
        self._all = [dense, model.bags.optimizer, model.sequences.optimizer]

    def zero_grad(self) -> None:
        for one in self._all:
            one.zero_grad()

    def step(self) -> None:
        for one in self._all:
            one.step()


def trained_twice(rank: int, world: int, depth: int, seed: int, in_step: bool) -> list[Any]:
    """Two lookups a step; with `in_step` rows are updated by the optimizer's step. The digest, and steps of tables."""
    model = Twice("row_wise")
    run = Pipeline(
        model,
        Both(model),
        batches(model),
        features=lambda batch: (batch.ids, batch.watched),
        global_batch=lambda batch: SAMPLES,
        batches_ahead=depth,
        before=delayed(seed * world + rank),
    )
    with contextlib.ExitStack() as stack:
        if in_step:
            stack.enter_context(model.bags.no_sync())
            stack.enter_context(model.sequences.no_sync())
        with run:
            for _ in run:
                pass
    return [model.digest(), model.bags.state_dict()["steps"].tolist()]


def written_between(rank: int, world: int, depth: int | None, folder: str) -> dict[str, str]:
    """Rows that the program writes between two steps. A digest for each way; `depth` None: without a pipeline."""
    found = {}
    for way in ("load_state_dict", "set_rows", "dcp.load", "a step of its own"):
        model = Model("row_wise")
        optimizer = torch.optim.Adam(model.replicas.parameters(), lr=0.01, foreach=False)
        saved: dict[str, Any] = {}

        def between(step: int, model: Model = model, way: str = way, saved: dict[str, Any] = saved) -> None:
            tables = model.bags
            if step == 0:
                saved.update(copy.deepcopy(dict(tables.state_dict())))
                if way == "dcp.load":
                    dcp.save({"tables": tables.state_dict()}, checkpoint_id=folder)
            elif step == 2 and way == "load_state_dict":
                tables.load_state_dict(saved)
            elif step == 2 and way == "set_rows":
                own = torch.arange(40)[rank::world]
                tables["user"].set_rows(own, torch.ones(len(own), 4))
            elif step == 2 and way == "dcp.load":
                state = {"tables": tables.state_dict()}
                dcp.load(state, checkpoint_id=folder)
                tables.load_state_dict(state["tables"])
            elif step == 2:
                again = next(batches(model))
                sum(one.sum() for one in tables(again.ids, global_batch=SAMPLES).values()).backward()

        if depth is None:
            for step, batch in enumerate(batches(model)):
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
                between(step)
        else:
            with pipeline(model, batches(model), batches_ahead=depth) as run:
                for step, _ in enumerate(run):
                    between(step)
        found[way] = model.digest()
    return found


class StepsInside(Model):
    """Takes a step of its tables before it looks its batch up."""

    def forward(self, batch: Batch) -> torch.Tensor:
        ahead = next(batches(self))
        sum(one.sum() for one in self.bags(ahead.ids, global_batch=SAMPLES).values()).backward()
        return super().forward(batch)


def steps_inside(rank: int, world: int, depth: int) -> str:
    model = StepsInside("row_wise")
    with pipeline(model, batches(model), batches_ahead=depth) as run:
        for _ in run:
            pass
    return model.digest()


def writes_to_a_state(rank: int, world: int) -> str:
    """What follows if the tensors of a state are written to, and nobody loads it."""
    model = Model("row_wise")
    with pipeline(model, batches(model)) as run:
        next(run)
        for name, tensor in model.bags.state_dict().items():
            if name.endswith("weight"):
                tensor.mul_(0.5)
        try:
            next(run)
        except ArgumentError as error:
            return str(error)
    return "no error"


def delayed(seed: int) -> Callable[[Task], None]:
    """Holds each task up for a time that (seed, task) say: most not at all, some longer than a step."""

    def before(task: Task) -> None:
        chance = random.Random(f"{seed} {task.name} {task.step} {task.thread}")
        if chance.random() < 0.5:
            threading.Event().wait(chance.random() ** 4 * 0.01)

    return before


def trained_in_any_order(rank: int, world: int, placement: str, first: int, count: int) -> list[Any]:
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


def refilled(rank: int, world: int, depth: int, way: str) -> list[str]:
    """A loader with one batch, or a ring of them, that it fills again and again. What follows."""
    model = Model("table_wise")
    fresh = batches(model)
    slots: list[Batch] = []
    count = depth + 1 if way == "ring" else 1

    def loader() -> Iterator[Any]:
        ring = torch.zeros(count, len(next(batches(model)).labels))
        for step, batch in enumerate(fresh):
            if way != "constant":
                batch = batch._replace(labels=ring[step % count].copy_(batch.labels))
            elif slots:
                batch = slots[0]  # Nobody has written to it.
            slots.append(batch)
            yield batch

    def copied(batch: Batch) -> Batch:
        return batch._replace(labels=batch.labels.clone())

    options = {"prepare": copied} if way == "copied" else {}
    try:
        with pipeline(model, loader(), batches_ahead=depth, **options) as run:
            for _ in run:
                pass
    except ArgumentError as error:
        return [f"{type(error).__name__}: {error}"]
    return [model.digest()]


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


# Of each world. 500 of two worlds make the thousand that the project promises.
SCHEDULES = briefly([8, 500], [8])


@pytest.fixture(scope="module")
def serial(kept_world: WorldFactory) -> Any:
    return kept_world(1).run(trained_serially, placement="table_wise")[0]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedules", SCHEDULES)
@pytest.mark.parametrize("world", briefly([1, 2, 3], [1, 3]))
def test_no_schedule_changes_a_bit(
    kept_world: WorldFactory, serial: Any, world: int, schedules: int, seed: int
) -> None:
    for first in range(0, schedules, 50):
        count = min(50, schedules - first)
        for found in kept_world(world).run(
            trained_in_any_order, placement="row_wise", first=seed * 10_000 + first, count=count
        ):
            assert len(found) == 1
            assert found[0][0] == serial[0]


def test_two_lookups_are_one_step_however_they_overlap(kept_world: WorldFactory, seed: int) -> None:
    found = [
        answer
        for world, depth, in_step in ((1, 0, False), (2, 0, True), (2, 1, False), (2, 2, False), (3, 1, True))
        for answer in kept_world(world).run(trained_twice, depth=depth, seed=seed, in_step=in_step)
    ]
    assert all(one == found[0] for one in found)
    assert found[0][1] == [STEPS, STEPS]


def test_rows_that_a_program_writes_are_in_the_next_step(kept_world: WorldFactory, tmp_path: Path) -> None:
    serial = kept_world(1).run(written_between, depth=None, folder=str(tmp_path / "serial"))[0]
    assert len(set(serial.values())) == 3  # Both loads give the same rows.
    for world, depth in ((1, 1), (2, 1), (2, 3)):
        folder = str(tmp_path / f"{world} {depth}")
        for found in kept_world(world).run(written_between, depth=depth, folder=folder):
            assert found == serial


def test_rows_that_a_model_updates_itself_are_in_its_lookup(kept_world: WorldFactory) -> None:
    serial = kept_world(1).run(steps_inside, depth=0)
    assert kept_world(2).run(steps_inside, depth=1) == serial * 2


def test_rows_written_through_a_state_are_refused_where_they_would_be_missed(kept_world: WorldFactory) -> None:
    for found in kept_world(2).run(writes_to_a_state):
        assert found.startswith("rows were written through the tensors of a state, after the next batch was looked up")


def test_records_say_when_and_where_tasks_ran(kept_world: WorldFactory) -> None:
    for records in kept_world(2).run(recorded):
        assert all(rises for *_, rises, _ in records)
        by_task = {(name, step): (thread, inputs, error) for name, step, thread, inputs, _, error in records}
        assert by_task["step", 0] == ("main", [], None)
        assert by_task["AllReduce", 1] == ("gradients", [], None)
        assert by_task["input", 1] == ("input", [], None)
        assert by_task["ids", 0] == ("ids", [["input", 0]], None)
        assert by_task["ids", 1] == ("ids", [["input", 1], ["ids", 0]], None)
        assert by_task["ids", 2][2] == "InputEnded"


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_error_of_a_loader_is_told_to_all(kept_world: WorldFactory, depth: int) -> None:
    *others, last = kept_world(2).run(loader_raises, depth=depth)
    assert last[:2] == [2, "OSError: the disk is gone"]
    for other in others:
        assert other[0] == 2
        assert other[1].startswith("PeerInputError: the input of rank 1 is wrong")
        assert other[2] == last[2]


def test_a_loader_that_fills_a_batch_again_too_early_is_refused(kept_world: WorldFactory, serial: Any) -> None:
    for found in kept_world(1).run(refilled, depth=1, way="one"), kept_world(1).run(refilled, depth=3, way="one"):
        assert found[0][0].startswith("ArgumentError: the loader has written to a tensor of shape (12,) of a batch")
    for depth, way in ((0, "one"), (1, "ring"), (3, "ring"), (1, "copied")):
        assert kept_world(1).run(refilled, depth=depth, way=way) == [[serial[0]]]
    assert kept_world(1).run(refilled, depth=1, way="constant") == kept_world(1).run(refilled, depth=0, way="constant")


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_training_ends_with_the_shortest_loader(kept_world: WorldFactory, depth: int) -> None:
    found = kept_world(2).run(loader_ends, depth=depth)
    assert all(steps == [2, 2] for steps, _ in found)
    assert found[0][1] == found[1][1] == kept_world(1).run(loader_ends, depth=0)[0][1]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_loop_may_be_left(kept_world: WorldFactory, depth: int) -> None:
    found = kept_world(2).run(left_early, depth=depth)
    assert found == kept_world(1).run(left_early, depth=0) * 2


@pytest.mark.parametrize("where", ["input", "ids", "step", "AllReduce"])
def test_a_rank_that_dies_is_named(new_world: WorldFactory, where: str) -> None:
    survivor, victim = new_world(2).run(dies, victim=1, where=where)
    assert victim is None
    assert "rank 1" in survivor
    assert "no error" not in survivor


def test_mistakes_are_refused(kept_world: WorldFactory) -> None:
    for deep, negative, without, copied in kept_world(2).run(refused):
        assert deep == "4 batches ahead; allowed: 0 to 3"
        assert negative == "-1 batches ahead; allowed: 0 to 3"
        assert without.startswith("a model without sharded tables")
        assert copied.startswith("the model did not call ShardedEmbeddingBags with the object that was sent")


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_bad_gradient_is_told_with_the_next_ids(kept_world: WorldFactory, depth: int) -> None:
    """Always after the same step: when the first batch arrives that was begun after the bad pass."""
    for steps, error in kept_world(2).run(bad_gradient, depth=depth):
        assert (steps, error) == (2 + depth, "GradientError")
