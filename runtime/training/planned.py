# SPDX-License-Identifier: Apache-2.0
"""The placement of a run: as its sharding says, or planned when it starts (`--sharding auto`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from sennit.command_line import stdout_console
from sennit.runtime.data import sources
from sennit.runtime.data.batch_source import BatchSource, MemorySource, prepared
from sennit.runtime.model.inputs import ModelInputs
from sennit.runtime.planner import dense
from sennit.runtime.planner.cluster import Cluster
from sennit.runtime.planner.constants import Constants, cores_here, read_constants
from sennit.runtime.planner.cost import Problem, Rating
from sennit.runtime.planner.search import round_robin, search
from sennit.runtime.planner.usage import ZIPF, Use, uses
from sennit.runtime.sharded.buffers import keep_large_buffers
from sennit.runtime.sharded.homes import Homes
from sennit.runtime.sharded.memory_limits import available_bytes, memory_limits, shared_limits
from sennit.runtime.sharded.placement import Placement, placed
from sennit.runtime.sharded.slices import Slices
from sennit.runtime.sharded.tables import Home, Table, shard_bytes, shards_of
from sennit.runtime.training.config import TrainingConfig
from sennit.transport.config import TransportKind, from_environment
from sennit.transport.errors import ConfigError

# Ids of each table that are counted.
SAMPLE_IDS: Final = 1 << 19


def model_inputs(config: TrainingConfig, source: BatchSource, tables: Sequence[Table]) -> ModelInputs:
    """What the model is made of."""
    return ModelInputs(
        dense_count=source.dense_count,
        tables=tuple(tables),
        bottom=config.bottom,
        top=config.top,
        seed=config.seed,
    )


def homes_of(config: TrainingConfig) -> Homes:
    """What the run has to keep tables in."""
    return Homes(device_type=config.device, has_store=config.table_store is not None)


def memory_of(config: TrainingConfig, tables: Sequence[Table], device: torch.device) -> dict[Home, list[int]]:
    """Bytes of each rank for tables in memory. Collective."""
    homes = homes_of(config)
    found = {homes.memory: memory_limits(config.rank_memory_bytes, device=device)}
    if homes.memory is not Home.DRAM:
        found[Home.DRAM] = _beside_caches(config, tables, Home.DRAM, memory_limits())
    if config.rank_memory_bytes is None:
        found[homes.memory] = _beside_caches(config, tables, homes.memory, found[homes.memory])
    return found


def _beside_caches(config: TrainingConfig, tables: Sequence[Table], home: Home, limits: Sequence[int]) -> list[int]:
    """What the caches of a table store leave. They have no use for more than twice the rows (`files.divided`)."""
    store = config.table_store
    if store is None:
        return list(limits)
    given = store.memory_bytes if home is Home.DRAM else store.device_bytes or 0
    taken = min(given, 2 * sum(shard_bytes(tables, shard) for shard in shards_of(tables)))
    return [max(0, limit - taken) for limit in limits]


def cluster_of(config: TrainingConfig, ranks: int, local_ranks: int, limits: Sequence[int] | None) -> Cluster:
    """Hosts like this one. `limits`: bytes of each rank for tables in memory."""
    store = config.table_store
    return Cluster(
        ranks=ranks,
        local_ranks=local_ranks,
        cores=cores_here(),
        limits=limits if store is None else None,
        cache_bytes=None if store is None else store.memory_bytes,
        beside=None if store is None else limits,
        has_no_shared_memory=from_environment().transport in (TransportKind.UDP, TransportKind.VERBS),
    )


def check_ranks(ranks: int | None, described: int, path: Path) -> None:
    """A described cluster says how many ranks there are; `--ranks` may only repeat it."""
    if ranks is not None and ranks != described:
        raise ConfigError(f"--ranks {ranks}, but {path} has {described}; allowed: leave --ranks out")


def limits_here(config: TrainingConfig, ranks: int) -> list[int]:
    """Bytes of each rank for tables in memory, with all ranks on this machine. Caches of files may take a part."""
    return shared_limits([("here", config.rank_memory_bytes, available_bytes())] * ranks)


def source_of(config: TrainingConfig, ranks: int) -> MemorySource:
    """The data of a run of so many ranks, as its rank 0 has it."""
    config.check_world(ranks)
    data = prepared(sources.load(config.source, seed=config.seed), config.order_settings)
    return MemorySource(data, rank=0, world_size=ranks)


def uses_of(source: BatchSource, tables: Sequence[Table]) -> list[Use]:
    """How often a sample uses each table and its rows. Without data in memory, Zipf's law is assumed."""
    samples = None
    if isinstance(source, MemorySource):
        samples = [column.values[:SAMPLE_IDS].numpy() for column in source.samples.columns]
    return uses(tables, [facts.mean_length for facts in source.tables], samples, ZIPF)


def problem_of(config: TrainingConfig, source: BatchSource, cluster: Cluster, constants: Constants) -> Problem:
    """What is to be planned. Measures the model and the source for some seconds."""
    # As in a run.
    keep_large_buffers()
    tables = config.tables_of(source.tables)
    fixed = dense.measure(
        config.model,
        model_inputs(config, source, tables),
        slices=Slices(count=config.slices, rank=0, world_size=cluster.ranks),
        batch=config.batch_size,
        dense_optimizer_name=config.dense_optimizer,
    )
    if isinstance(source, MemorySource):
        fixed = dataclasses.replace(fixed, input_sample_s=dense.input_seconds(source))
    return Problem(
        tables=tables,
        uses=tuple(uses_of(source, tables)),
        cluster=cluster,
        constants=constants,
        batch=config.batch_size,
        slices=config.slices,
        fixed=fixed,
        ahead=config.batches_ahead > 0 or config.table_store is not None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The placement of a run."""

    placement: Placement
    step_s: float | None = None
    """Of a step, as predicted; None if the placement was given."""

    problem: Problem | None = None
    """What was planned, on rank 0."""


def placement_of(
    config: TrainingConfig,
    source: BatchSource,
    tables: Sequence[Table],
    limits: Mapping[Home, Sequence[int]],
    local_ranks: int | None,
) -> Planned:
    """The owner of each shard. Collective. `limits`: `memory_of`.

    Rank 0 plans, so that all ranks have the same plan. Raises `ConfigError` on all ranks.
    """
    world_size = dist.get_world_size()
    if not config.sharding.is_planned:
        placement = config.sharding.placement(
            tables, world_size, local_ranks=local_ranks, limits=limits, homes=homes_of(config)
        )
        return Planned(placement=placement)
    if config.device != "cpu":
        raise ConfigError(
            f"--sharding auto with --device {config.device}, whose kernels nobody has measured; allowed: --device cpu, "
            "or another --sharding"
        )
    told: list[Any] = [None]
    problem = None
    if dist.get_rank() == 0:
        try:
            *plan, problem = _planned(config, source, world_size, limits[Home.DRAM], local_ranks or world_size)
            told = [tuple(plan)]
        except Exception as error:  # Of any type: the other ranks wait for this one.
            told = [error if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(told, src=0)
    if not isinstance(told[0], tuple):
        raise told[0] if isinstance(told[0], ConfigError) else ConfigError(f"--sharding auto: rank 0: {told[0]}")
    shards, step_s = told[0]
    return Planned(placement=placed(tables, world_size, shards), step_s=step_s, problem=problem)


def _planned(
    config: TrainingConfig, source: BatchSource, ranks: int, limits: Sequence[int], local_ranks: int
) -> tuple[dict[str, int], float, Problem]:
    constants, warnings = read_constants(from_environment().calibration)
    cluster = cluster_of(config, ranks, local_ranks, limits)
    rating = Rating(problem_of(config, source, cluster, constants))
    searched = search(rating)
    console = stdout_console()
    for warning in warnings:
        console.print(f"note: {warning}", markup=False, soft_wrap=True)
    best, robin = searched.best, round_robin(rating)
    console.print(
        f"placement: {best.name}, {best.seconds * 1e3:.1f} ms a step predicted, "
        f"round robin {robin.seconds / best.seconds:.2f} times that; sennit shard says why",
        markup=False,
        soft_wrap=True,
    )
    return best.shards(rating), best.seconds, rating.problem
