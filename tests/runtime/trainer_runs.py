# SPDX-License-Identifier: Apache-2.0
"""Small runs of the trainer over samples made from a seed, whole and resumed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sennit.runtime.checkpoint.digest import digest
from sennit.runtime.data.samples import Column, Samples
from sennit.runtime.data.seeds import numpy_stream
from sennit.runtime.data.source import Source
from sennit.runtime.model.settings import SettingsFile
from sennit.runtime.model.sharding_settings import sharding_of
from sennit.runtime.model.tensor_train import TensorTrainRule
from sennit.runtime.stream.settings import StreamSettings
from sennit.runtime.training import resumption
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.streamed import sources_of
from sennit.runtime.training.trainer import Trainer
from sennit.transport.errors import SennitError
from tests.runtime.short_sources import short_source

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
    source = short_source(samples(seed if data_seed is None else data_seed), config)
    made = Trainer(config, source)
    source.begin(0)
    return made


def train_on_histories(placement: str) -> str:
    """Some steps of `hstu` in the default group. Returns the digest of the weights."""
    return digest(weights_by_histories(placement))


def weights_by_histories(placement: str, steps: int = 8) -> dict[str, Tensor]:
    """This rank's weights after some steps of `hstu`, in host memory."""
    config = config_of(
        1, model="hstu", sharding=placement, row_shards=4, epochs=1, max_steps=steps, eval_fraction=0.1,
        source=Source(data="synthetic-yambda?rows=1000&users=20&items=100&last=12"),
        stream=StreamSettings(order="time"),
    )  # fmt: skip
    with Trainer(config, sources_of(config)()) as made:
        for _ in range(steps):
            made.train_step()
        return {name: weight.detach().cpu().clone() for name, weight in made.weights().items()}


def train(rank: int, world: int, /, *, seed: int, steps: int, **changed: Any) -> dict[str, Any]:
    """Trains some steps. Returns weights, their digest, and quality."""
    run = trainer(seed, **changed)
    losses = [run.train_step().loss for _ in range(steps)]
    quality = run.evaluate()
    return {
        "weights": {name: tensor.tolist() for name, tensor in run.weights().items()},
        "sha256": digest(run.weights()),
        "auc": quality.auc,
        "evaluated": quality.sample_count,
        "losses": losses,
    }


def save_then_train_on(
    rank: int, world: int, /, *, seed: int, folder: str, before: int, after: int, **changed: Any
) -> Any:
    """Runs without interruption. Returns digests at the checkpoint and at the end."""
    run = trainer(seed, checkpoint=Path(folder), **changed)
    resumption.begin(run)
    for _ in range(before):
        run.train_step()
    resumption.save(run)
    at_checkpoint = digest(run.weights())
    for _ in range(after):
        run.train_step()
    return [at_checkpoint, digest(run.weights())]


def resume_and_train_on(rank: int, world: int, /, *, seed: int, folder: str, after: int, **changed: Any) -> Any:
    """Resumes the run. Returns digests after loading and at the end."""
    run = trainer(seed, checkpoint=Path(folder), resume=True, **changed)
    resumption.begin(run)
    at_checkpoint = digest(run.weights())
    for _ in range(after):
        run.train_step()
    return [at_checkpoint, digest(run.weights())]


def begin_error(
    rank: int,
    world: int,
    /,
    *,
    seed: int,
    folder: str,
    data_seed: int | None = None,
    resume: bool = True,
    **changed: Any,
) -> str:
    """Begins a run in this folder. Returns its messages, or its error."""
    run = trainer(seed, checkpoint=Path(folder), resume=resume, data_seed=data_seed, **changed)
    try:
        told = resumption.begin(run)
    except SennitError as error:
        assert run.step == 0
        return f"{type(error).__name__}: {error}"
    return "\n".join(["no error", *told])
