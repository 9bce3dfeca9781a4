# SPDX-License-Identifier: Apache-2.0
"""The data of a run: opens the stream, fits its preprocessing, makes the source of each group of ranks."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from sennit.runtime.backend.first_rank import on_first
from sennit.runtime.checkpoint.manifest import CheckpointError
from sennit.runtime.data import sources
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.schema import Schema
from sennit.runtime.model.factory import reads_histories
from sennit.runtime.stream.following import SEEN, Follower, FollowingSource, Look, Seen, read_seen
from sennit.runtime.stream.settings import OpenedStream, open_source
from sennit.runtime.stream.source import StreamSource
from sennit.runtime.stream.synthetic_data import is_synthetic, settings_of
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.metrics import METRICS
from sennit.runtime.training.rebalance import shape_of
from sennit.runtime.training.supply import MakeSource, known_preprocessing, resumed
from sennit.transport.errors import ConfigError


def opened(config: TrainingConfig) -> OpenedStream:
    """The run's stream. Raises DataError on every rank if there is none. Collective, if there is a process group."""
    if sources.is_named(config.source.data):
        # Each rank has its own in memory.
        return _opened(config)
    # Rank 0 makes the index: for text, that is a pass over all of it. A rank that opens a file compares it.
    return on_first(lambda: _opened(config))


def _opened(config: TrainingConfig) -> OpenedStream:
    found = open_source(
        config.source,
        config.stream,
        config.order_settings,
        seed=config.seed,
        adapted=functools.partial(_as_asked, config),
        histories=reads_histories(config.model),
    )
    if config.stop_early is not None and (label := found.only_label()) is not None:
        # Otherwise an epoch would be for nothing: its evaluation says the same (`Best.hear`).
        count = found.order.judged_part().count
        raise DataError(
            f"--stop-early needs {METRICS[config.best_by]}, which is not defined: all {count:,} held-back samples have "
            f"the label {label:.0f}; hold back samples of both classes, or leave --stop-early out"
        )
    return found


def _as_asked(config: TrainingConfig, schema: Schema) -> Schema:
    """The schema with ids as they are for the tables that `--tables` makes dynamic, histories as long as `--history`
    says, and the groups of `--gauc`.
    """
    schema = replace(schema, group=config.gauc)
    if config.history is not None and schema.history is not None:
        schema = replace(schema, history=replace(schema.history, last=config.history))
    asked = config.tables
    if asked is None:
        return schema
    names = [part.name for part in schema.sparse if asked.option(part.name, "ids") is not None]
    try:
        return schema.with_dynamic({name: asked.option(name, "rows") for name in names})
    except DataError as error:
        raise ConfigError(f"{asked.source}: {error}") from None


def check(config: TrainingConfig) -> None:
    """Checks names, packages and files before ranks start. Raises the errors that opening would raise for them."""
    if config.stream.follow is not None:
        follower_of(config)
    elif is_synthetic(config.source):
        settings_of(config.source)
    else:
        sources.check(config.source)


def follower_of(config: TrainingConfig, **options: Any) -> Follower:
    """What finds the files of a run with `--follow`. `options`: others of `Follower`.

    Raises ConfigError for settings with which that is impossible.
    """
    source = config.source
    if is_synthetic(source) or sources.is_named(source.data):
        raise ConfigError(f"--follow with --data {source.data}; allowed: a folder or a pattern of files")
    schema = _as_asked(config, sources.schema_of(source))
    return Follower(
        source,
        schema,
        config.stream,
        config.order_settings,
        seen=_seen(config),
        histories=reads_histories(config.model),
        **options,
    )


def _seen(config: TrainingConfig) -> list[Seen]:
    """The files that the run had at the checkpoint that it goes on from."""
    path = resumed(config)
    if path is None or not (path / SEEN).exists():
        return []
    try:
        return read_seen((path / SEEN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / SEEN} is not what a run wrote: {error}") from error


def following_sources(
    config: TrainingConfig, found: Look, preprocessing: Preprocessing, follower: Follower
) -> MakeSource:
    return lambda: FollowingSource(
        found, preprocessing, follower, rank=dist.get_rank(), world_size=dist.get_world_size()
    )


def preprocessing_of(config: TrainingConfig, found: OpenedStream) -> Preprocessing:
    """That of the checkpoint that the run goes on from, or else of one pass over the training rows. Collective, if
    there is a process group.

    With data of other features there is a pass, too: resuming then says what differs.
    """
    own = resumed(config)
    if own is not None and (known := Preprocessing.read(own)) is not None and known.is_of(found.stream.schema):
        return known
    return found.fit(min_frequency=config.source.min_frequency, known=known_preprocessing(config))


def stream_source(
    config: TrainingConfig, found: OpenedStream, preprocessing: Preprocessing, *, rank: int, world_size: int
) -> StreamSource:
    counted = None if config.rebalance is None else shape_of(config.rebalance, config.batch_size)
    return StreamSource(found.stream, found.order, preprocessing, rank=rank, world_size=world_size, counted=counted)


def sources_of(config: TrainingConfig) -> MakeSource:
    """Opens and fits the run's data. Raises DataError if they cannot be trained on. Collective."""
    found = opened(config)
    return stream_sources(config, found, preprocessing_of(config, found))


def stream_sources(config: TrainingConfig, found: OpenedStream, preprocessing: Preprocessing) -> MakeSource:
    def make() -> StreamSource:
        source = stream_source(config, found, preprocessing, rank=dist.get_rank(), world_size=dist.get_world_size())
        if not config.elastic and resumed(config) is None:
            # A new run begins there, and the model takes some time to be made.
            source.begin(0)
        return source

    return make
