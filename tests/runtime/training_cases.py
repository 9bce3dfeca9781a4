# SPDX-License-Identifier: Apache-2.0
"""The ranks' part in the tests of training: small runs over samples made from a seed."""

from __future__ import annotations

import dataclasses
import resource
import signal
import tempfile
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sennit.runtime.checkpoint.fingerprint import fingerprint
from sennit.runtime.checkpoint.manifest import CheckpointError
from sennit.runtime.data.batch_source import MemorySource, prepared
from sennit.runtime.data.combined import CombinedBatch
from sennit.runtime.data.samples import Column, Samples
from sennit.runtime.data.seeds import numpy_stream
from sennit.runtime.model.settings import SettingsFile
from sennit.runtime.model.sharding_settings import sharding_of
from sennit.runtime.model.tensor_train import TensorTrainRule
from sennit.runtime.pipeline import room
from sennit.runtime.planner.constants import PRECISIONS, Constants, Kernel
from sennit.runtime.sharded.files import TableStore
from sennit.runtime.training import overlap, planned, resumption
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.metrics import quality, quality_of_ranks
from sennit.runtime.training.rebalance import Moved, shape_of
from sennit.runtime.training.trainer import Trainer, TrainingError
from sennit.transport.errors import ConfigError, SennitError

KERNEL = tuple(field.name for field in dataclasses.fields(Kernel))
SMALL: dict[str, Any] = {"batch_size": 24, "embedding_dim": 4, "bottom": (8,), "top": (8,), "epochs": 3}


def samples(seed: int, count: int = 331) -> Samples:
    """Returns samples for three tables, one with bags of 0 to 3 ids. The odd number makes evaluation parts uneven."""
    stream = numpy_stream(seed, "training_cases")
    lengths = stream.integers(0, 4, count)
    user, genre = stream.integers(0, 20, count), stream.integers(0, 6, int(lengths.sum()))
    dense = stream.standard_normal((count, 3))
    score = dense[:, 0] + np.sin(user)
    return Samples(
        name="small",
        dense=torch.from_numpy(dense.astype(np.float32)),
        labels=torch.from_numpy((score + stream.standard_normal(count) > 0).astype(np.float32)),
        columns=(
            Column.single("user", 20, user),
            Column.bags("genre", 6, genre, lengths),
            Column.single("hour", 24, stream.integers(0, 24, count)),
        ),
    )


def parsed(what: str, text: str) -> Any:
    if what == "tensor_train":
        return TensorTrainRule.parse(text)
    if what == "sharding":
        return sharding_of(text)
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        return SettingsFile.read(Path(file.name))


def config_of(seed: int, **changed: Any) -> TrainingConfig:
    """The settings of a small run. Tables and shardings may be given as on the command line."""
    for what in ("tensor_train", "sharding", "tables"):
        if what in changed:
            changed[what] = parsed(what, changed[what])
    return TrainingConfig(seed=seed, **{**SMALL, **changed})


def trainer(seed: int, data_seed: int | None = None, **changed: Any) -> Trainer:
    config = config_of(seed, **changed)
    data = prepared(samples(seed if data_seed is None else data_seed), config.order_settings)
    source = MemorySource(data, rank=dist.get_rank(), world_size=dist.get_world_size())
    made = Trainer(config, source)
    source.begin(0)
    return made


def train(rank: int, world: int, *, seed: int, steps: int, **changed: Any) -> dict[str, Any]:
    """Trains some steps. Returns weights, their fingerprint, and quality."""
    run = trainer(seed, **changed)
    losses = [run.train_step().loss for _ in range(steps)]
    quality = run.evaluate()
    return {
        "weights": {name: tensor.tolist() for name, tensor in run.weights().items()},
        "sha256": fingerprint(run.weights()),
        "auc": quality.auc,
        "evaluated": quality.sample_count,
        "losses": losses,
    }


def crowded(rank: int, world: int, *, seed: int, left: int, **changed: Any) -> list[Any]:
    """The host has so many bytes left after the first batch. Steps that were taken of one, and the error."""
    told = "no error"
    with mock.patch.object(room, "available_bytes", return_value=left), trainer(seed, **changed) as run:
        try:
            run.train_step()
        except ConfigError as error:
            told = str(error)
        return [run.step, told]


class Shifting(MemorySource):
    """From batch `at` on, a third of the ids is of the last eight rows."""

    at = 1 << 40

    def take(self, number: int) -> CombinedBatch:
        if number < self.at:
            return super().take(number)
        batch = self.samples.batch(self.order.part(number, dist.get_rank(), dist.get_world_size()))
        hot = self.tables[0].rows - 8 + batch.values % 8
        batch = dataclasses.replace(batch, values=torch.where(batch.values % 3 == 0, hot, batch.values))
        if self._sketch is not None:
            self._count(self._sketch, number, batch)
        return batch


def rebalanced(
    rank: int, world: int, *, seed: int, at: int, every: int | None, rows: str | None = None, **changed: Any
) -> dict[str, Any]:
    """A whole run of 24 steps. Ids are uniform, and from batch `at` on the last of eight row shards has 42 % of them.

    Kernels are so slow that nothing else counts, and each rank has a core.
    """
    stream = numpy_stream(seed, "rebalanced")
    data = Samples(
        name="skewed",
        dense=torch.from_numpy(stream.standard_normal((600, 2)).astype(np.float32)),
        labels=torch.from_numpy((stream.random(600) < 0.5).astype(np.float32)),
        columns=(Column.bags("user", 64, stream.integers(0, 64, 6000), np.full(600, 10)),),
    )
    if rows is not None:
        changed["table_store"] = TableStore(folder=Path(rows), memory_bytes=40_000)
    config = config_of(seed, row_shards=8, batch_size=50, max_steps=24, rebalance=every, **changed)
    whole = prepared(data, config.order_settings)
    counted = None if every is None else shape_of(every, config.batch_size)
    source = Shifting(whole, rank=rank, world_size=world, counted=counted)
    source.at = at
    slow = {name: Kernel(**dict.fromkeys(KERNEL, 0.0) | {"id_s": 1e-3}) for name in PRECISIONS}
    constants = Constants(lookup=slow, update=slow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned, "read_constants", lambda path: (constants, []))
        patch.setattr(planned, "cores_here", lambda: world)
        run = Trainer(config, source)
    source.begin(0)
    run.run(lambda step: None, lambda epoch, quality: False, lambda step: None)
    moved = Moved() if run.rebalancer is None else run.rebalancer.moved
    return {
        "sha256": fingerprint(run.weights()),
        "looks": moved.looks,
        "moves": [dataclasses.asdict(move) | {"text": str(move)} for move in moved.moves],
        "shards": sorted(run.own_shards),
    }


def placed(rank: int, world: int, *, seed: int, error: str | None, **changed: Any) -> dict[str, Any]:
    """Where the shards of a run that plans are, and the lines that it prints. `error`: of the planner, on rank 0."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned, "_tell", lines.append)
        if error is not None and rank == 0:
            patch.setattr(planned, "search", mock.Mock(side_effect=RuntimeError(error)))
        run = trainer(seed, sharding="auto", **changed)
    return {
        "owners": {str(shard): owner for shard, owner in run.tables.placement.owner_of.items()},
        "expected": run.predicted_s,
        "lines": lines,
        "sha256": fingerprint(run.weights()),
    }


def save_then_train_on(
    rank: int, world: int, *, seed: int, folder: str, before: int, after: int, **changed: Any
) -> Any:
    """Runs without interruption. Returns fingerprints at the checkpoint and at the end."""
    run = trainer(seed, checkpoint=Path(folder), **changed)
    resumption.begin(run)
    for _ in range(before):
        run.train_step()
    resumption.save(run)
    at_checkpoint = fingerprint(run.weights())
    for _ in range(after):
        run.train_step()
    return [at_checkpoint, fingerprint(run.weights())]


def resume_and_train_on(rank: int, world: int, *, seed: int, folder: str, after: int, **changed: Any) -> Any:
    """Resumes the run. Returns fingerprints after loading and at the end."""
    run = trainer(seed, checkpoint=Path(folder), resume=True, **changed)
    resumption.begin(run)
    at_checkpoint = fingerprint(run.weights())
    for _ in range(after):
        run.train_step()
    return [at_checkpoint, fingerprint(run.weights())]


def begin_error(
    rank: int, world: int, *, seed: int, folder: str, data_seed: int | None = None, resume: bool = True, **changed: Any
) -> str:
    """Begins a run in this folder. Returns its messages, or its error."""
    run = trainer(seed, checkpoint=Path(folder), resume=resume, data_seed=data_seed, **changed)
    try:
        told = resumption.begin(run)
    except SennitError as error:
        assert run.step == 0
        return f"{type(error).__name__}: {error}"
    return "\n".join(["no error", *told])


def save_on_a_full_disk(rank: int, world: int, *, seed: int, folder: str) -> str:
    """Saves one good checkpoint, then one where the last rank may write at most 1 KiB to each file."""
    run = trainer(seed, checkpoint=Path(folder))
    run.step = 1
    resumption.save(run)
    run.step = 2
    if rank == world - 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
    try:
        resumption.save(run)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        dist.barrier()
    return "no error"


def loss_that_is_not_a_number(rank: int, world: int, *, seed: int) -> str:
    run = trainer(seed)
    run.train_step()
    with torch.no_grad():
        next(run.model.parameters()).fill_(torch.nan)
    try:
        run.train_step()
    except TrainingError as error:
        return str(error)
    return "no error"


def go_back_beside_another_run(rank: int, world: int, *, seed: int, folder: str) -> dict[str, Any]:
    """Two runs with the same settings share a folder. The other run is ahead."""
    mine, other = (trainer(seed, checkpoint=Path(folder)) for _ in range(2))
    resumption.begin(mine)
    resumption.begin(other)
    for run, steps in ((mine, 3), (other, 5)):
        for _ in range(steps):
            run.train_step()
        resumption.save(run)
    own = fingerprint(mine.weights())
    mine.train_step()
    resumption.go_back(mine)
    other.run_id, other.step = "f" * 16, 0
    resumption.go_back(other)
    return {"went_back_to": mine.step, "is_own": fingerprint(mine.weights()) == own, "other_alone": other.step}


def collectives_of_a_step(rank: int, world: int, *, seed: int) -> dict[str, int]:
    """Returns how often one step calls each operation of a process group, as torch's profiler counts it."""
    run = trainer(seed, batches_ahead=0)  # The profiler sees this thread.
    run.train_step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run.train_step()
    names = [event.name for event in profile.events() if event.name.startswith("c10d::")]
    return {name: names.count(name) for name in sorted(set(names))}


def phases_around_an_evaluation(rank: int, world: int, *, seed: int, folder: str, **options: Any) -> list[list[str]]:
    """Returns the phases whose time changed: in a step, in an evaluation, in a checkpoint."""
    run = trainer(seed, checkpoint=Path(folder), **options)

    def save() -> None:
        with run.clock.phase("checkpoint", is_whole=True):
            resumption.save(run)

    changed = []
    for action in (run.train_step, run.evaluate, save):
        before = dict(run.clock.seconds)
        action()
        changed.append(sorted(name for name, seconds in run.clock.seconds.items() if seconds != before.get(name)))
    return changed


def chosen_overlaps(rank: int, world: int) -> dict[str, bool]:
    """Whether tables have a thread of their own, on machines that are made up."""

    def chosen(cores: int, routes: tuple[str, ...] = ("self", "shm"), **options: Any) -> bool:
        group = SimpleNamespace(routes=routes, ranks_here=2)
        with (
            mock.patch.object(overlap, "cores_here", return_value=cores),
            mock.patch.object(overlap, "communicator_or_names", return_value=group),
        ):
            return overlap.overlap_of(TrainingConfig(**options)).has_tables

    with mock.patch.object(dist, "get_world_size", return_value=1):
        alone = chosen(100)
    return {
        "alone": alone,
        "crowded": chosen(3),
        "one is crowded": chosen(3 if rank else 4),
        "spare": chosen(4),
        "one is far": chosen(1, ("self", "udp") if rank else ("self", "shm")),
        "ids": chosen(100, overlap="ids"),
        "tables": chosen(1, overlap="tables"),
        "none ahead": chosen(100, batches_ahead=0),
    }


def predictions(rank: int, world: int, *, seed: int, kind: str, count: int = 3000) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the predictions of one rank. The last of several ranks has none."""
    stream = numpy_stream(seed, "predictions", rank, kind)
    count = 0 if kind == "no samples" or 0 < rank == world - 1 else count + 100 * rank
    scores = stream.standard_normal(count)
    match kind:
        case "ties":
            scores[:] = np.round(scores, 1)
        case "one score":
            scores[:] = 0
        case "one bin":
            scores[:] = 1.5 + stream.integers(0, 50, count) * 2.0**-23
        case "sorted":
            scores += 100 * rank
        case "both zeros":
            scores[:] = np.where(stream.random(count) < 0.5, -0.0, 0.0)
    chance = 0.0 if kind == "one class" else 1 / (1 + np.exp(-scores))
    labels = stream.random(count) < chance
    return torch.from_numpy(scores.astype(np.float32)), torch.from_numpy(labels.astype(np.float32))


def quality_over_ranks(rank: int, world: int, *, seed: int, kind: str) -> list[list[float]]:
    """Returns the metrics that the ranks compute together, and those of one process with all predictions."""
    parts = [predictions(other, world, seed=seed, kind=kind) for other in range(world)]
    logits, labels = (torch.cat([part[side] for part in parts]).numpy() for side in (0, 1))
    return [list(astuple(found)) for found in (quality_of_ranks(*parts[rank]), quality(logits, labels))]


def largest_message(rank: int, world: int, *, seed: int) -> float:
    """Returns the largest share of all predictions that a rank gets."""
    logits, labels = predictions(rank, world + 1, seed=seed, kind="random", count=20_000)
    exchange, received = dist.all_to_all_single, []

    def watched(output: torch.Tensor, *rest: Any, **options: Any) -> Any:
        received.append(len(output))
        return exchange(output, *rest, **options)

    dist.all_to_all_single = watched
    try:
        quality_of_ranks(logits, labels)
    finally:
        dist.all_to_all_single = exchange
    return max(received) / (world * 20_000)
