# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call,import-not-found"
"""The trainer on a device: run on each rank by test_training_device.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import device_double
import stream_double
import torch
import torch.distributed as dist
import training_cases
from sharded_device_cases import Kernels
from torch import nn

from sennit.runtime.checkpoint.fingerprint import fingerprint
from sennit.runtime.kernels import engine as engines
from sennit.runtime.sharded.files import TableStore
from sennit.runtime.sharded.memory_limits import memory_limits
from sennit.runtime.training import resumption
from sennit.runtime.training import trainer as trainers
from sennit.runtime.training.handover import Claim, Holding, find_source, take_over
from sennit.runtime.training.trainer import StepReport, Trainer
from sennit.transport.errors import SennitError


@contextlib.contextmanager
def on_the_double() -> Iterator[device_double.Device]:
    """Inside, trainers have their models and tables on `device_double`."""
    with (
        device_double.Device() as device,
        mock.patch.object(engines, "implementation", side_effect=lambda *_, **__: Kernels()),
        mock.patch.object(trainers, "_device", return_value=device_double.DEVICE),
        mock.patch.object(nn.Module, "to", device_double.moved),
        stream_double.streams(),
    ):
        yield device


def train(rank: int, world: int, *, seed: int, there: bool, folder: str, resumed: bool, **changed: Any) -> Any:
    """Takes six steps, with a checkpoint after the second and the fourth, or takes the last two. Returns hashes.

    `there`: on the double. The last number: how often steps waited for it.
    """
    if (rows := changed.pop("rows", None)) is not None:
        changed["table_store"] = TableStore(
            folder=Path(rows), memory_bytes=40_000, device_bytes=1_000 if there else None
        )
    with on_the_double() if there else contextlib.nullcontext() as device:
        run = training_cases.trainer(seed, checkpoint=Path(folder), resume=resumed, **changed)
        resumption.begin(run)
        assert run.step == 4 * resumed
        before = device.waits.total() if device else 0
        with resumption.saver_of(run.config) as saver:
            while run.step < 6:
                report = run.train_step()
                if not resumed and run.step in (2, 4):
                    now = device.waits.total() if device else 0
                    resumption.save(run, saver)
                    before += (device.waits.total() if device else 0) - now
        waits = device.waits.total() - before if device else 0
        quality = run.evaluate()
        assert next(run.model.parameters()).device == run.device
        found = [fingerprint(run.weights()), report.loss, quality.auc, quality.log_loss]
        run.close()
        return found, waits


def uploaded(rank: int, world: int, *, seed: int, ahead: int, steps: int) -> dict[str, list[str]]:
    """What happened in each stream, in turn, until all batches that were begun are there."""
    with on_the_double(), stream_double.streams() as log, training_cases.trainer(seed, batches_ahead=ahead) as run:
        for _ in range(steps):
            run.train_step()
        run._ahead.drop()
    found: dict[str, list[str]] = {}
    for stream, _, what in (entry.partition(": ") for entry in log):
        found.setdefault(stream, []).append(what)
    return found


def not_awaited(rank: int, world: int, *, seed: int) -> str:
    """The error of a step whose stream waits for no copies."""
    unawaited = mock.patch.object(stream_double.Stream, "wait_event")
    with on_the_double(), unawaited, training_cases.trainer(seed) as run:
        return str(run.train_step().loss)


def handed_over(rank: int, world: int, *, seed: int, there: bool, **changed: Any) -> list[str]:
    """Three steps, the last two of them by a new trainer that places tables differently."""
    with on_the_double() if there else contextlib.nullcontext():
        run = training_cases.trainer(seed, dense_optimizer="adam", **changed)
        run.train_step()
        holding = Holding.of(run)
        claims: list[Any] = [None] * world
        dist.all_gather_object(claims, Claim(step=1, shards=holding.shards))
        later = training_cases.trainer(seed, dense_optimizer="adam", sharding="data_parallel", **changed)
        source = find_source(claims, {shard for claim in claims for shard in claim.shards})
        assert source is not None
        take_over(later, source, holding)
        later.source.begin(1)
        for one in (run, later):
            while one.step < 3:
                one.train_step()
        return [fingerprint(one.weights()) for one in (run, later)]


def broken(rank: int, world: int, *, seed: int, folder: str) -> str:
    """Weights become NaN after the second of five steps, each with a checkpoint. Returns what was saved, and errors.

    Without checkpoints the error is that of the tables: two steps later, since a batch was on its way already.
    """
    told = []
    for options in ({"checkpoint": Path(folder), "checkpoint_every": 1}, {}):
        saved: list[int] = []
        with on_the_double():
            run = training_cases.trainer(seed, max_steps=5, **options)

            def spoil(report: StepReport, run: Trainer = run) -> None:
                if report.step == 2:
                    device_double.host_of(next(run.model.parameters()).data).fill_(torch.nan)

            try:
                run.run(spoil, lambda *_: None, saved.append)
            except SennitError as error:
                told.append(f"{saved} {run.step} {type(error).__name__}")
    return ", ".join(told)


def limits(rank: int, world: int) -> list[int]:
    """Ranks 0 and 1 share a GPU with 3,000 and 2,000 free bytes, as they see it; rank 2 has one with 500."""
    uuid, free = [("a", 3000), ("a", 2000), ("b", 500)][rank]
    with (
        mock.patch("torch.cuda.get_device_properties", return_value=mock.Mock(uuid=uuid)),
        mock.patch("torch.cuda.mem_get_info", return_value=(free, 1 << 20)),
    ):
        return memory_limits(device=torch.device("cuda:0"))
