# SPDX-License-Identifier: Apache-2.0
"""A rank's batches. A run makes a source of them for each group of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.checkpoint.folder import latest, named
from sennit.runtime.data.batch import Integers
from sennit.runtime.data.batch_source import BatchSource
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.ingest.fed import Door, FedSource, group_failure, told_feeders
from sennit.runtime.kernels.uploads import Upload, Uploads
from sennit.runtime.pipeline.ahead import Batch
from sennit.runtime.sharded.outputs import nested
from sennit.runtime.sharded.phases import PhaseClock
from sennit.runtime.training.config import TrainingConfig
from sennit.transport.errors import ConfigError

MakeSource = Callable[[], BatchSource]
"""The source of this rank's batches in the present default group. Collective."""


def resumed(config: TrainingConfig) -> Path | None:
    """The checkpoint of its own that the run goes on from, if it resumes and has one."""
    return latest(config.checkpoint) if config.resume and config.checkpoint is not None else None


def known_preprocessing(config: TrainingConfig) -> Preprocessing | None:
    """That of the model that the run goes on with; None: the run begins with a new one.

    A warm start goes on with the vocabularies of its checkpoint. Once the run has a checkpoint of its own, that one has
    them all.
    """
    if config.warm_start is None:
        return None
    checkpoint = resumed(config) or named(config.warm_start)
    known = Preprocessing.read(checkpoint)
    if known is None:
        raise ConfigError(
            f"--warm-start {checkpoint} has no preprocessing.json; allowed: a checkpoint that says how its data "
            "became rows"
        )
    return known


def fed_sources(config: TrainingConfig, door: Door) -> MakeSource:
    """Batches from feeders. In an elastic run a rank waits for records half as long as ranks wait for one another.

    So a rank that no feeder reaches ends with its own error, before the others give up the group.
    """
    return lambda: FedSource(
        door,
        config.order_settings,
        config.stream,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        timeout_s=config.timeout_s / 2 if config.elastic else config.timeout_s,
        is_elastic=config.elastic,
        known=None if (own := resumed(config)) is None else Preprocessing.read(own),
    )


@contextlib.contextmanager
def served(source: BatchSource, *, is_elastic: bool = False) -> Iterator[BatchSource]:
    """Closes the source in the end, and tells it how the run ended in this group."""
    try:
        yield source
    except BaseException as error:
        source.close(told_feeders(error), goes_on=is_elastic and bool(group_failure(error)))
        raise
    source.close()


class Given(NamedTuple):
    """What a model gets of B samples, beside the vectors of their ids."""

    dense: Tensor
    """Float32 [B, D]."""

    labels: Tensor
    """Float32 [B], or [B, labels]."""

    weights: Tensor | None
    """Float32 [B]; None: all samples count alike."""

    integers: dict[str, Tensor]
    """By column: nested int64 [B, *], of layout `torch.jagged`."""

    groups: Tensor | None
    """Int64 [B] on the CPU: whose each sample is, for AUC by group; None: nobody asks."""


def integers_by_name(names: Sequence[str], found: Integers) -> dict[str, Tensor]:
    """Nested int64 [B, *] by column."""
    parts = torch.split(found.values, found.lengths.sum(1).tolist())
    return nested(dict(zip(names, parts, strict=True)), found.lengths)


class Supply:
    """Takes a trainer's batches from its source, also ahead of its steps and in another thread."""

    def __init__(self, source: BatchSource, *, depth: int, device: torch.device, clock: PhaseClock) -> None:
        """`depth`: how many batches are on their way while one is computed. `device`: of the model."""
        self._source, self._depth, self._device, self._clock = source, depth, device, clock
        self._uploads = Uploads(device) if depth and device.type != "cpu" else None

    def take(self, number: int) -> Batch:
        """The batch of this number, for `BatchesAhead`. `samples` and `release` take it afterwards."""
        with self._clock.phase("input"):
            taken = self._source.take(number)
            if self._depth:
                # A source lends one batch at a time.
                taken = taken.copy()
                self._source.release(number)
            parts = taken.of_samples + (taken.integers or ())
            held = parts if self._uploads is None else self._uploads.begin(parts)
        return Batch(samples=(number, held), features=[taken], global_batch=self._source.order.size(number))

    def samples(self, batch: Batch) -> Given:
        """What the model gets of a batch, on its device."""
        _, held = batch.samples
        parts = held.take() if isinstance(held, Upload) else held
        dense, labels, *rest = (part.to(self._device) for part in parts)
        names = self._source.integer_names
        integers = integers_by_name(names, Integers(*rest[-2:])) if names else {}
        weights = rest[0] if len(rest) > (2 if names else 0) else None
        (taken,) = batch.features
        return Given(dense, labels, weights, integers, taken.groups)

    def release(self, batch: Batch) -> None:
        """Says that a batch is used up."""
        if not self._depth:
            number, _ = batch.samples
            self._source.release(number)
