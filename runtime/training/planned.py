# SPDX-License-Identifier: Apache-2.0
"""The placement of a run: as its sharding says, or planned when it starts (`--sharding auto`, the default)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from sennit.command_line import stdout_console
from sennit.runtime.backend.first_rank import on_first
from sennit.runtime.data.batch_source import BatchSource
from sennit.runtime.memory.large_buffers import keep_large_buffers
from sennit.runtime.model.factory import reads_histories
from sennit.runtime.model.inputs import HistoryInputs, ModelInputs
from sennit.runtime.model.sharding_settings import Sharding
from sennit.runtime.planner import dense
from sennit.runtime.planner.cluster import Cluster
from sennit.runtime.planner.constants import Constants, cores_here, read_constants
from sennit.runtime.planner.problem import Problem
from sennit.runtime.planner.search import round_robin, search
from sennit.runtime.planner.step_time import Rating
from sennit.runtime.planner.usage import ZIPF, Use, sampled, saved, uses
from sennit.runtime.sharded.memory_limits import limits_by_home, shared_limits
from sennit.runtime.sharded.placement import Placement, placed
from sennit.runtime.sharded.slices import Slices
from sennit.runtime.sharded.tables import Home, Homes, Table
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.overlap import Overlap, overlap_on
from sennit.runtime.training.streamed import opened, preprocessing_of, stream_source
from sennit.transport._core import available_bytes
from sennit.transport.config import TransportKind, from_environment
from sennit.transport.errors import ConfigError

LOSSLESS: Final = "lossless"
"""The codec whose size depends on the data, which nobody measures."""
# Ids of each table that are counted.
SAMPLE_IDS: Final = 1 << 19
# Samples whose lengths the model is measured with.
LENGTHS: Final = 1 << 12
TABLE_WISE: Final = Sharding()
# A search at the start of a run looks at this many placements: a fraction of a second.
RUN_EXACT_NODES: Final = 1_000


def model_inputs(config: TrainingConfig, source: BatchSource, tables: Sequence[Table]) -> ModelInputs:
    """What the model is made of."""
    return ModelInputs(
        history=_history(source) if reads_histories(config.model) else None,
        layers=config.layers,
        heads=config.heads,
        attention=config.attention,
        dense_count=source.dense_count,
        tables=tuple(tables),
        bottom=config.bottom,
        top=config.top,
        seed=config.seed,
        label_count=len(source.label_names),
    )


def _history(source: BatchSource) -> HistoryInputs | None:
    found = source.history
    if found is None:
        return None
    tables = [table.name for table in source.tables]
    times = [name for name in found.columns if name in source.integer_names]
    return HistoryInputs(
        own=tuple(name for name in found.columns if name in tables),
        past=tuple(name for name in found.past if name in tables),
        times=times[0] if times else None,
        last=found.last,
    )


def homes_of(config: TrainingConfig) -> Homes:
    """What the run has to keep tables in."""
    return Homes(device_type=config.device, has_store=config.table_store is not None)


def memory_of(config: TrainingConfig, tables: Sequence[Table], device: torch.device) -> dict[Home, list[int]]:
    """Bytes of each rank for tables in memory. Collective."""
    return limits_by_home(tables, homes_of(config), config.rank_memory_bytes, device=device, store=config.table_store)


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


def source_of(config: TrainingConfig, ranks: int) -> BatchSource:
    """The data of a run of so many ranks, as its rank 0 has it."""
    config.check_world(ranks)
    found = opened(config)
    return stream_source(config, found, preprocessing_of(config, found), rank=0, world_size=ranks)


def uses_of(config: TrainingConfig, source: BatchSource, tables: Sequence[Table]) -> list[Use]:
    """How often a sample uses each of these tables and its rows: by a saved sketch, or by a sample of the data.

    Without both, Zipf's law is assumed. Raises `ConfigError` if the sketch is of other tables.
    """
    if config.use is not None:
        return saved(tables, config.use)
    known = source.sample()
    if known is None:
        length_of = {facts.name: facts.mean_length for facts in source.tables}
        return uses(tables, [length_of[table.name] for table in tables], None, ZIPF)
    column_of = {column.name: column for column in known.columns}
    columns = [column_of[table.name] for table in tables]
    samples = [sampled(column.values.numpy(), SAMPLE_IDS) for column in columns]
    return uses(tables, [column.mean_length for column in columns], samples, ZIPF)


def _lengths(source: BatchSource) -> dict[str, Sequence[int]]:
    """The ids of some samples by table. Of columns that are no history, those of the first samples will do."""
    known, histories = source.sample(), source.history_lengths(LENGTHS)
    if known is None:
        return {facts.name: (round(facts.mean_length),) for facts in source.tables}
    some = torch.linspace(0, len(known) - 1, min(len(known), LENGTHS)).to(torch.int64)
    found: dict[str, Sequence[int]] = {column.name: column.lengths[some].tolist() for column in known.columns}
    if histories is not None and source.history is not None:
        found |= dict.fromkeys(source.history.columns, histories)
    return found


def problem_of(
    config: TrainingConfig,
    source: BatchSource,
    cluster: Cluster,
    constants: Constants,
    *,
    overlap: Overlap | None = None,
    budget_s: float = dense.BUDGET_S,
) -> Problem:
    """What is to be planned. Measures the model and the source, four times for up to `budget_s`.

    `overlap`: that of the run; None: what is expected on this cluster.
    """
    # A run does the same.
    keep_large_buffers()
    tables = config.tables_of(source.tables)
    fixed = dense.measure(
        config.model,
        model_inputs(config, source, tables),
        slices=Slices(count=config.slices, rank=0, world_size=cluster.ranks),
        batch=config.batch_size,
        dense_optimizer_name=config.dense_optimizer,
        lengths=_lengths(source),
        budget_s=budget_s,
    )
    ahead = config.batches_ahead > 0 or config.table_store is not None
    if source.sample() is not None:
        # What feeders send is not measured. A batch taken ahead is copied (`Supply.take`).
        input_sample_s = dense.input_seconds(source, budget_s, copies=ahead)
        fixed = dataclasses.replace(fixed, input_sample_s=input_sample_s)
    return Problem(
        tables=tables,
        uses=tuple(uses_of(config, source, tables)),
        cluster=cluster,
        constants=constants,
        batch=config.batch_size,
        slices=config.slices,
        fixed=fixed,
        ahead=ahead,
        tables_beside=(overlap or overlap_on(config, cluster)).has_tables,
        codec=None if config.exchange == LOSSLESS else config.exchange_codec,
        gradient_codec=config.gradient_codec,
    )


def placement_here(config: TrainingConfig, source: BatchSource, ranks: int) -> Placement:
    """The placement that a run of so many ranks on this machine would have."""
    tables = config.tables_of(source.tables)
    if not config.sharding.is_planned:
        return config.sharding.placement(tables, ranks)
    if ranks == 1 or config.device != "cpu":
        return TABLE_WISE.placement(tables, ranks)
    constants, _ = read_constants(from_environment().calibration)
    cluster = cluster_of(config, ranks, ranks, limits_here(config, ranks))
    rating = Rating(problem_of(config, source, cluster, constants, budget_s=dense.SHORT_BUDGET_S))
    return search(rating).best.placement(rating)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The placement of a run."""

    placement: Placement
    step_s: float | None = None
    """Predicted seconds of a step; None if the placement was given."""

    problem: Problem | None = None
    """What was planned, on rank 0."""


def placement_of(
    config: TrainingConfig,
    source: BatchSource,
    tables: Sequence[Table],
    limits: Mapping[Home, Sequence[int]],
    local_ranks: int | None,
    overlap: Overlap,
) -> Planned:
    """The owner of each shard. Collective. `limits`: `memory_of`.

    Rank 0 plans, so that all ranks have the same plan. Raises `ConfigError` on all ranks. Where nothing can be planned
    tables are table-wise, and a line says why; with one rank there is nothing to plan.
    """
    world_size = dist.get_world_size()
    if not config.sharding.is_planned:
        placement = config.sharding.placement(
            tables, world_size, local_ranks=local_ranks, limits=limits, homes=homes_of(config)
        )
        return Planned(placement=placement)
    problems: list[Problem] = []

    def plan() -> tuple[dict[str, int], float] | str:
        try:
            shards, seconds, problem = _planned(
                config, source, world_size, limits[Home.DRAM], local_ranks or world_size, overlap
            )
        except ConfigError:
            raise
        except Exception as error:
            return f"planning failed: {type(error).__name__}: {error}"
        problems.append(problem)
        return shards, seconds

    found: tuple[dict[str, int], float] | str = ""
    if config.device != "cpu":
        found = f"nobody measures kernels of {config.device}"
    elif world_size > 1:
        found = on_first(plan)
    if isinstance(found, str):
        if found and dist.get_rank() == 0:
            _tell(f"placement: {TABLE_WISE.default}; {found}")
        placement = TABLE_WISE.placement(
            tables, world_size, local_ranks=local_ranks, limits=limits, homes=homes_of(config)
        )
        return Planned(placement=placement)
    shards, step_s = found
    # The problem itself stays with rank 0, which plans anew where shards may move.
    return Planned(placement=placed(tables, world_size, shards), step_s=step_s, problem=next(iter(problems), None))


def _planned(
    config: TrainingConfig,
    source: BatchSource,
    ranks: int,
    limits: Sequence[int],
    local_ranks: int,
    overlap: Overlap,
) -> tuple[dict[str, int], float, Problem]:
    constants, _ = read_constants(from_environment().calibration)
    cluster = cluster_of(config, ranks, local_ranks, limits)
    budget_s = dense.SHORT_BUDGET_S
    rating = Rating(problem_of(config, source, cluster, constants, overlap=overlap, budget_s=budget_s))
    best, robin = search(rating, exact_nodes=RUN_EXACT_NODES).best, round_robin(rating)
    _tell(
        f"placement: {best.name}; {best.seconds * 1e3:.1f} ms a step expected, "
        f"{robin.seconds / best.seconds:.2f} times that with round robin"
        + ("" if constants.has_kernels else ". By constants of another machine: sennit calibrate measures this one")
    )
    return best.shards(rating), best.seconds, rating.problem


def _tell(line: str) -> None:
    stdout_console().print(line, soft_wrap=True)
