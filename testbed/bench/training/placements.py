# SPDX-License-Identifier: Apache-2.0
"""The best placement found, beside round robin and the choice of TorchRec's planner, all run by the trainer in turns.

MLPerf's tables, scaled. Every rank has a trainer for each placement, and they take turns step by step. Ranks that share
cores lend each other time, so a rank with too much to do costs little there. `confined` gives each rank its own part of
a core.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table as Lines

from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.calibrate import machine
from sennit.runtime.checkpoint.digest import digest
from sennit.runtime.data.source import Source
from sennit.runtime.model.settings import SettingsFile
from sennit.runtime.model.sharding_settings import Sharding
from sennit.runtime.planner.constants import cores_here, read_constants
from sennit.runtime.planner.search import Found, of_placement, round_robin, search
from sennit.runtime.planner.step_time import Rating
from sennit.runtime.sharded.placement import EVERYWHERE, placed
from sennit.runtime.sharded.tables import Table, shard_name, shards_of
from sennit.runtime.training import launch
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.planned import cluster_of, problem_of, source_of
from sennit.runtime.training.streamed import sources_of
from sennit.runtime.training.trainer import Trainer
from sennit.testbed.bench.training.confinement import confined, hosts_of
from sennit.testbed.bench.training.sharded_torchrec import HINT
from sennit.testbed.bench.training.turns import Hosts, joined, slowest
from sennit.transport.config import from_environment
from sennit.transport.errors import Unsupported

TIMEOUT_S: Final = 120.0
WARM_STEPS: Final = 4
BEST, ROBIN, TORCHREC = "planned", "round robin", "TorchRec's planner"
# MLPerf's bags, rows scaled, and a small model, so that tables are much of a step. One table has 100 of a sample's 214
# ids: it can be spread.
SHAPE: Final[Mapping[str, Any]] = {
    "embedding_dim": 32,
    "batch_size": 8192,
    "tables": SettingsFile(source="the benchmark", defaults={}, tables={"table_20": {"row_shards": 8}}),
    "bottom": (16,),
    "top": (16,),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    ranks: int = 4
    steps: int = 25
    """Steps with each placement."""
    samples: int = 40_000
    is_confined: bool = False
    """Each rank has cores / ranks of a core."""
    hosts: int = 1
    """Network namespaces that ranks are spread over; 1: shared memory."""
    rate_mbit: int | None = None
    """Rate of each host's link, in each direction; None: no limit."""
    options: Mapping[str, Any] = field(default_factory=lambda: SHAPE)

    def __post_init__(self) -> None:
        if self.ranks % self.hosts:
            raise ValueError(f"{self.ranks} ranks on {self.hosts} hosts; allowed: equally many on each")
        if self.hosts == 1 and self.rate_mbit is not None:
            raise ValueError("a link's rate, but 1 host; allowed: 2 or more")

    def config(self) -> TrainingConfig:
        return TrainingConfig(
            source=Source(data="synthetic", samples=self.samples),
            epochs=1_000,
            max_steps=10_000,
            slices=max(4, self.ranks),
            batches_ahead=0,
            timeout_s=TIMEOUT_S,
            **self.options,
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    settings: Settings
    machine: dict[str, object]
    seconds: dict[str, list[float]]
    """Steps of the slowest rank, in turns, by placement."""
    predicted_s: dict[str, float]
    imbalance: dict[str, float]
    """The predicted work of the busiest rank over that of the mean."""
    absent: str | None
    """Why TorchRec's planner did not choose."""

    def gain(self, name: str) -> tuple[float, float, float]:
        """The time of a step with this placement to that with the planned one: median and quartiles of turns."""
        pairs = zip(self.seconds[name], self.seconds[BEST], strict=True)
        low, median, high = statistics.quantiles([other / best for other, best in pairs], n=4)
        return median, low, high

    def as_json(self) -> dict[str, Any]:
        plain = asdict(replace(self, settings=replace(self.settings, options={})))
        return plain | {"gain": {name: self.gain(name) for name in self.seconds}}


def run(settings: Settings) -> Report:
    """Raises `launch.RankFailure` if a rank fails, `Unsupported` if ranks cannot be confined."""
    config = settings.config()
    constants, _ = read_constants(from_environment().calibration)
    local_ranks = settings.ranks // settings.hosts
    cluster = cluster_of(config, settings.ranks, local_ranks, None)
    cluster = replace(cluster, gbit=None if settings.rate_mbit is None else settings.rate_mbit / 1e3)
    if settings.is_confined:
        with confined(1.0, name="try"):
            cluster = replace(cluster, cores=local_ranks)
    with contextlib.closing(source_of(config, settings.ranks)) as source:
        rating = Rating(problem_of(config, source, cluster, constants))
    found: dict[str, Found] = {BEST: search(rating).best, ROBIN: round_robin(rating)}
    absent = None
    try:
        tables, uses = rating.problem.tables, rating.problem.uses
        lengths = [use.mean_length for use in uses]
        chosen = torchrec_shards(tables, lengths, settings.ranks, config.batch_size)
        found[TORCHREC] = of_placement(rating, TORCHREC, placed(tables, settings.ranks, chosen))
    except Unsupported as missing:
        absent = str(missing)
    plans = {name: Sharding(shards=one.shards(rating)) for name, one in found.items()}
    with hosts_of(settings.hosts, rate_mbit=settings.rate_mbit) as names:
        by_rank = launch.run_ranks(_take_turns, (settings, plans, names), settings.ranks, timeout_s=TIMEOUT_S)
    load = {name: rating.rank_seconds(one.work) for name, one in found.items()}
    return Report(
        settings=settings,
        machine=machine.describe(),
        seconds=slowest(by_rank),
        predicted_s={name: one.seconds for name, one in found.items()},
        imbalance={name: float(one.max() / one.mean()) for name, one in load.items()},
        absent=absent,
    )


def _take_turns(
    given: tuple[Settings, dict[str, Sharding], Hosts], rank: int, world: int, store: Store
) -> dict[str, list[float]]:
    settings, plans, hosts = given
    with joined(rank, world, store, timeout_s=TIMEOUT_S, hosts=hosts):
        config = settings.config()
        make_source = sources_of(config)
        seconds: dict[str, list[float]] = {name: [] for name in plans}
        with contextlib.ExitStack() as stack:
            trainers = {
                name: stack.enter_context(
                    Trainer(replace(config, sharding=plan), stack.enter_context(contextlib.closing(make_source())))
                )
                for name, plan in plans.items()
            }
            if settings.is_confined:
                stack.enter_context(confined(cores_here() / world, name=str(rank)))
            for number in range(WARM_STEPS + settings.steps):
                # Who comes first changes, so that nobody always finds the caches of the same one.
                names = [*plans][number % len(plans) :] + [*plans][: number % len(plans)]
                for name in names:
                    dist.barrier()
                    begin_s = time.perf_counter()
                    trainers[name].train_step()
                    dist.barrier()
                    if number >= WARM_STEPS:
                        seconds[name].append(time.perf_counter() - begin_s)
            dense = {name: digest(one.weights()) for name, one in trainers.items()}
            if len(set(dense.values())) != 1:
                raise AssertionError(f"weights differ by placement: {dense}")
    return seconds


def torchrec_shards(tables: Sequence[Table], lengths: Sequence[float], ranks: int, batch: int) -> dict[str, int]:
    """The rank of each shard as TorchRec's planner chooses, with mean lengths of bags known to it.

    It may choose among whole tables, row-wise over all ranks if the table has row shards, and replicas. Raises
    `Unsupported` without TorchRec.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            import torchrec
            from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
            from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
            from torchrec.distributed.planner.types import ParameterConstraints
        except (ImportError, OSError) as error:
            raise Unsupported("torchrec", f"cannot be imported ({error}); {HINT}") from None
        finally:
            logging.disable(logging.NOTSET)
        collection = torchrec.EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=table.name,
                    embedding_dim=table.dim,
                    num_embeddings=table.rows,
                    feature_names=list(table.features),
                )
                for table in tables
            ],
        )
        constraints = {
            table.name: ParameterConstraints(
                sharding_types=["table_wise", "data_parallel", *(["row_wise"] if table.row_shards > 1 else [])],
                pooling_factors=[length] * len(table.features),
            )
            for table, length in zip(tables, lengths, strict=True)
        }
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=ranks, compute_device="cpu"),
            batch_size=batch // ranks,
            constraints=constraints,
        )
        plan = planner.plan(collection, [EmbeddingBagCollectionSharder()])
    chosen = {name: one for part in plan.plan.values() for name, one in part.items()}
    found = {}
    for shard in shards_of(tables):
        table, one = tables[shard.table], chosen[tables[shard.table].name]
        if one.sharding_type == "row_wise":
            rank = shard.row * ranks // table.row_shards
        else:
            rank = EVERYWHERE if one.sharding_type == "data_parallel" else one.ranks[0]
        found[shard_name(tables, shard)] = rank
    return found


def render(report: Report, console: Console) -> None:
    settings = report.settings
    where = f"each {cores_here() / settings.ranks:.2f} of a core" if settings.is_confined else f"{cores_here()} cores"
    if settings.hosts > 1:
        where += f", {settings.hosts} hosts"
    if settings.rate_mbit is not None:
        where += f", {settings.rate_mbit:,} Mbit/s"
    lines = Lines("placement", title=f"A step of MLPerf's tables, scaled; {settings.ranks} ranks, {where}")
    for heading in ("busiest rank / mean", "predicted ms", "measured ms", "times planned", "quartiles"):
        lines.add_column(heading, justify="right")
    for name, seconds in report.seconds.items():
        median, low, high = report.gain(name)
        lines.add_row(
            name,
            f"{report.imbalance[name]:.2f}",
            f"{report.predicted_s[name] * 1e3:.1f}",
            f"{statistics.median(seconds) * 1e3:.1f}",
            f"{median:.2f}",
            f"{low:.2f} to {high:.2f}",
        )
    console.print(lines)
    if report.absent is not None:
        console.print(f"{TORCHREC} did not choose: {report.absent}", markup=False)
