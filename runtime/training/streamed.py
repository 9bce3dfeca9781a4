# SPDX-License-Identifier: Apache-2.0
"""Batches of a run whose data are a stream: opens it, fits its preprocessing, makes the source of each group."""

from __future__ import annotations

from pathlib import PurePosixPath

import torch.distributed as dist

from sennit.runtime.data import sources
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.stream.settings import OpenedStream, open_stream, opened_by_first, short_stream
from sennit.runtime.stream.source import StreamSource
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.rebalance import shape_of
from sennit.runtime.training.supply import MakeSource, known_preprocessing, resumed


def opened(config: TrainingConfig) -> OpenedStream:
    """The run's stream. Raises DataError if there is none. Collective, if there is a process group."""
    if sources.is_named(config.source.data):
        # Each rank has its own in memory.
        return _opened(config)
    return opened_by_first(lambda: _opened(config))


def _opened(config: TrainingConfig) -> OpenedStream:
    assert config.stream is not None
    source = config.source
    if sources.is_named(source.data):
        return short_stream(sources.load(source, seed=config.seed), config.stream, config.order_settings)
    name = PurePosixPath(source.data).name or source.data
    return open_stream(name, source, sources.schema_of(source), config.stream, config.order_settings)


def preprocessing_of(config: TrainingConfig, found: OpenedStream) -> Preprocessing:
    """That of the checkpoint that the run goes on from, or else of one pass over the training rows. Collective, if
    there is a process group.
    """
    own = resumed(config)
    if own is not None and (known := Preprocessing.read(own)) is not None:
        return known
    return found.fit(min_frequency=config.source.min_frequency, known=known_preprocessing(config))


def stream_source(
    config: TrainingConfig, found: OpenedStream, preprocessing: Preprocessing, *, rank: int, world_size: int
) -> StreamSource:
    counted = None if config.rebalance is None else shape_of(config.rebalance, config.batch_size)
    return StreamSource(found.stream, found.order, preprocessing, rank=rank, world_size=world_size, counted=counted)


def stream_sources(config: TrainingConfig, found: OpenedStream, preprocessing: Preprocessing) -> MakeSource:
    return lambda: stream_source(config, found, preprocessing, rank=dist.get_rank(), world_size=dist.get_world_size())
