# SPDX-License-Identifier: Apache-2.0
"""What one rank does in the tests of training: small runs over samples made from a seed."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sennit.runtime.data.batch_source import MemorySource
from sennit.runtime.data.samples import Column, Samples
from sennit.runtime.data.seeds import numpy_stream
from sennit.runtime.model.tensor_train import TensorTrainRule
from sennit.runtime.training import checkpoint
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.fingerprint import fingerprint
from sennit.runtime.training.trainer import Trainer, TrainingError

SMALL: dict[str, Any] = {"batch_size": 24, "embedding_dim": 4, "bottom": (8,), "top": (8,), "epochs": 3}


def samples(seed: int, count: int = 331) -> Samples:
    """Three tables, one with bags of 0 to 3 ids; an odd number of rows, so that evaluation is cut unevenly."""
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


def trainer(seed: int, tensor_train: str | None = None, **changed: Any) -> Trainer:
    rule = None if tensor_train is None else TensorTrainRule.parse(tensor_train)
    config = TrainingConfig(seed=seed, tensor_train=rule, **{**SMALL, **changed})
    source = MemorySource(samples(seed), config, rank=dist.get_rank(), world_size=dist.get_world_size())
    made = Trainer(config, source)
    source.begin(0, made.placement.wire_order)
    return made


def train(rank: int, world: int, *, seed: int, steps: int, **changed: Any) -> dict[str, Any]:
    """Weights, their fingerprint, and quality after some steps."""
    run = trainer(seed, **changed)
    losses = [run.train_step() for _ in range(steps)]
    quality = run.evaluate()
    return {
        "weights": {name: tensor.tolist() for name, tensor in run.weights().items()},
        "sha256": fingerprint(run.weights()),
        "auc": quality.auc,
        "evaluated": quality.sample_count,
        "losses": losses,
    }


def save_then_train_on(
    rank: int, world: int, *, seed: int, folder: str, before: int, after: int, **changed: Any
) -> Any:
    """The uninterrupted run: fingerprints at the checkpoint and at the end."""
    run = trainer(seed, **changed)
    for _ in range(before):
        run.train_step()
    checkpoint.save(Path(folder), run.step, run.state())
    at_checkpoint = fingerprint(run.weights())
    for _ in range(after):
        run.train_step()
    return [at_checkpoint, fingerprint(run.weights())]


def resume_and_train_on(rank: int, world: int, *, seed: int, folder: str, after: int, **changed: Any) -> Any:
    """The resumed run: fingerprints after loading and at the end."""
    run = trainer(seed, **changed)
    found = checkpoint.latest(Path(folder))
    assert found is not None
    state = run.state()
    checkpoint.load(found, state)
    run.restore(state)
    at_checkpoint = fingerprint(run.weights())
    for _ in range(after):
        run.train_step()
    return [at_checkpoint, fingerprint(run.weights())]


def restore_error(rank: int, world: int, *, seed: int, folder: str, **changed: Any) -> str:
    run = trainer(seed, **changed)
    found = checkpoint.latest(Path(folder))
    assert found is not None
    state = run.state()
    checkpoint.load(found, state)
    try:
        run.restore(state)
    except ValueError as error:
        return str(error)
    return "no error"


def save_on_a_full_disk(rank: int, world: int, *, seed: int, folder: str) -> str:
    """One good checkpoint, then one whose files the last rank may not write beyond 1 KiB."""
    run = trainer(seed)
    checkpoint.save(Path(folder), 1, run.state())
    if rank == world - 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
    try:
        checkpoint.save(Path(folder), 2, run.state())
    except checkpoint.CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        dist.barrier()
    return "no error"


def loss_that_is_not_a_number(rank: int, world: int, *, seed: int) -> str:
    run = trainer(seed)
    run.train_step()
    with torch.no_grad():
        next(run.dense.parameters()).fill_(torch.nan)
    try:
        run.train_step()
    except TrainingError as error:
        return str(error)
    return "no error"
