# SPDX-License-Identifier: Apache-2.0
"""One rank's run from start to end: join the group, load, train, report, leave."""

from __future__ import annotations

import datetime
import gc
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sennit.command_line import stdout_console
from sennit.runtime.backend import elastic
from sennit.runtime.backend.process_group import register
from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.data import sources
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.ingest.fed import Door
from sennit.runtime.stream.settings import OpenedStream
from sennit.runtime.stream.synthetic_data import is_synthetic
from sennit.runtime.timeline.timeline import Timeline
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.elastic_run import ElasticRun, check_terms, publish_terms
from sennit.runtime.training.report import RunReport
from sennit.runtime.training.resumption import check_data, publish_data, published_preprocessing
from sennit.runtime.training.streamed import (
    follower_of,
    following_sources,
    opened,
    preprocessing_of,
    stream_sources,
)
from sennit.runtime.training.stretch import History, begin_run, shown_by, train
from sennit.runtime.training.supply import MakeSource, fed_sources, served
from sennit.transport.meeting.membership import Terms


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This process's place in the group. `store` None: the environment has it (torchrun)."""

    rank: int
    world_size: int
    store: Store | None = None


def run_rank(config: TrainingConfig, place: Place) -> RunReport:
    """The whole run of one rank. Makes and destroys the default process group."""
    _prepare()
    timeout = datetime.timedelta(seconds=config.timeout_s)
    if place.store is None:
        dist.init_process_group(config.backend, timeout=timeout)
    else:
        if config.elastic and place.rank == 0:
            publish_terms(place.store, config)
        dist.init_process_group(
            config.backend, store=place.store, rank=place.rank, world_size=place.world_size, timeout=timeout
        )
    if config.ingest is not None:
        # torchrun sets it. Without torchrun, all ranks are on this machine.
        local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        with Door(config.ingest, local_rank) as door:
            return _leave(_run(config, fed_sources(config, door)))
    with shown_by(place.rank == 0, f"reading {config.source.data}"):
        make_source, fingerprint, known = _loaded(config)
    if config.elastic and place.rank == 0 and place.store is not None:
        publish_data(place.store, fingerprint, known)
    return _leave(_run(config, make_source))


def _loaded(config: TrainingConfig, store: Store | None = None) -> tuple[MakeSource, str, Preprocessing]:
    """Opens the data set: how to make sources, its fingerprint, and the preprocessing that newcomers need.

    `store`: that of the run which this rank joins. Collective without it.
    """
    if config.stream.follow is not None:
        return _followed(config)
    found = opened(config)
    if store is None:
        _tell_rows(config, found)
    known = preprocessing_of(config, found) if store is None else published_preprocessing(store)
    return stream_sources(config, found, known), found.stream.fingerprint, known


def _tell_rows(config: TrainingConfig, found: OpenedStream) -> None:
    """Says how many files and rows the run has, so that a file that is missing is seen."""
    if dist.get_rank() != 0:
        return
    index, source = found.stream.index, config.source
    files = f"{len(index.files):,} file{'s' if len(index.files) > 1 else ''}, "
    skipped = f"; {index.skipped_rows:,} broken rows are left out" if index.skipped_rows else ""
    stdout_console().print(
        f"{source.data}: {'' if is_synthetic(source) or sources.is_named(source.data) else files}"
        f"{index.sample_count:,} rows{skipped}",
        soft_wrap=True,
    )


def _followed(config: TrainingConfig) -> tuple[MakeSource, str, Preprocessing]:
    """The same of a folder that grows."""
    follower = follower_of(config)
    look = follower.first(_tell_wait)
    assert look.opened is not None
    _tell_rows(config, look.opened)
    known = preprocessing_of(config, look.opened)
    return following_sources(config, look, known, follower), look.opened.stream.index.fingerprint, known


def _tell_wait(reason: str) -> None:
    if dist.get_rank() == 0:
        stdout_console().print(f"waits for files: {reason}", soft_wrap=True)


def _run(config: TrainingConfig, make_source: MakeSource) -> RunReport:
    if config.elastic:
        return ElasticRun(config, make_source, is_newcomer=False).run()
    with served(make_source()) as source:
        timeline = None if config.timeline is None else Timeline(config.timeline)
        report = train(config, source, History(), begin=begin_run, timeline=timeline)
    assert isinstance(report, RunReport)
    return report


def join_run(config: TrainingConfig, number: int, store: Store) -> RunReport:
    """The run of a rank that joins a running one, through that run's store. `number`: among those that join here."""
    _prepare()
    check_terms(store, config)
    # The members wait from the step at which they see this rank, so it does everything else before.
    if config.ingest is not None:
        with Door(config.ingest, number) as door:
            return _join(config, number, store, fed_sources(config, door))
    with shown_by(number == 0, f"reading {config.source.data}"):
        make_source, fingerprint, _ = _loaded(config, store)
    check_data(store, fingerprint)
    return _join(config, number, store, make_source)


def _join(config: TrainingConfig, number: int, store: Store, make_source: MakeSource) -> RunReport:
    timeout = datetime.timedelta(seconds=config.timeout_s)
    with shown_by(number == 0, "waiting for the members to take this rank in, at the end of a step"):
        elastic.join(store, terms=Terms(timeout_s=config.timeout_s), timeout=timeout)
    return _leave(ElasticRun(config, make_source, is_newcomer=True, shows=number == 0).run())


def _prepare() -> None:
    # One thread per rank: ranks share the cores, and sums would depend on the number of threads.
    torch.set_num_threads(1)
    # For programs in which neither torch's entry point nor `import sennit` has registered it.
    register()


def _leave(report: RunReport) -> RunReport:
    """After a failure the group is left until the process ends: destroying it may wait for peers that are gone."""
    # DDP's hooks hold the group, so they have to be released first.
    gc.collect()
    dist.destroy_process_group()
    return report
