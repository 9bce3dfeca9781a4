# SPDX-License-Identifier: Apache-2.0
"""`sennit bench planner`: predicted beside measured step times.

Each case is a run of the trainer on this machine: a model, a placement and a network. Some of the cases were looked at
while the model of costs was made; six were not.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.calibrate import calibrate, machine
from sennit.runtime.data.source import Source
from sennit.runtime.model.sharding_settings import Sharding
from sennit.runtime.planner.constants import read_constants
from sennit.runtime.planner.search import of_placement, search
from sennit.runtime.planner.step_time import Rating
from sennit.runtime.training import launch
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.planned import cluster_of, problem_of, source_of
from sennit.runtime.training.streamed import sources_of
from sennit.runtime.training.trainer import Trainer
from sennit.testbed.bench.training.turns import joined
from sennit.transport.config import from_environment

TIMEOUT_S: Final = 120.0
WARM_STEPS: Final = 5
STEPS: Final = 25
# The sharding of a case that is to be planned.
BEST = "planned"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run on this machine."""

    name: str
    ranks: int
    sharding: str = "table_wise"
    """The name of a sharding, or "planned"."""
    transport: str = "auto"
    is_held_out: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `TrainingConfig`."""

    def config(self) -> TrainingConfig:
        options = dict(self.options)
        source = Source(data=options.pop("data", "synthetic"), samples=options.pop("samples", 40_000))
        return TrainingConfig(
            source=source,
            epochs=100,
            max_steps=1_000,
            slices=4,
            sharding=Sharding(default=self.sharding),
            timeout_s=TIMEOUT_S,
            **options,
        )


def _cases() -> Iterator[Case]:
    """MLPerf's table shape, scaled (`synthetic`), and flights."""

    def of(dim: int, batch: int, **more: Any) -> dict[str, Any]:
        return {"embedding_dim": dim, "batch_size": batch} | more

    yield Case(name="dim 32", ranks=2, options=of(32, 4096))
    yield Case(name="dim 32", ranks=4, options=of(32, 4096))
    yield Case(name="dim 32", ranks=4, sharding="data_parallel", options=of(32, 4096))
    yield Case(name="dim 64, 4 row shards", ranks=2, sharding="row_wise", options=of(64, 4096, row_shards=4))
    yield Case(name="dim 32", ranks=2, transport="udp", options=of(32, 4096))
    yield Case(name="dim 32", ranks=4, transport="udp", options=of(32, 4096))
    # These two were held out until 2026-11-24.
    yield Case(name="dim 64, 4 row shards", ranks=4, sharding="row_wise", transport="udp",
               options=of(64, 4096, row_shards=4))  # fmt: skip
    yield Case(name="dim 32, 4 row shards", ranks=4, sharding=BEST, options=of(32, 8192, row_shards=4))
    held: dict[str, Any] = {"is_held_out": True}
    yield Case(name="dcnv2, dim 8", ranks=2, options=of(8, 4096, model="dcnv2"), **held)
    yield Case(name="dim 128", ranks=4, options=of(128, 4096), **held)
    yield Case(name="dim 16", ranks=2, sharding="data_parallel", options=of(16, 8192), **held)
    yield Case(name="flights, dim 64", ranks=2, options=of(64, 8192, data="flights"), **held)
    yield Case(name="deepfm, dim 48", ranks=2, transport="udp", options=of(48, 4096, model="deepfm"), **held)
    yield Case(name="dim 24, 2 row shards", ranks=4, sharding=BEST, options=of(24, 4096, row_shards=2), **held)


CASES: Final = tuple(_cases())


@dataclass(frozen=True, kw_only=True)
class Result:
    """Seconds of a step."""

    name: str
    ranks: int
    sharding: str
    transport: str
    is_held_out: bool
    predicted_s: float
    measured_s: float
    """Seconds of a step on the slowest rank: the median over steps."""
    predicted_phases_s: Mapping[str, float]
    measured_phases_s: Mapping[str, float]
    """Seconds by phase, the mean over ranks of medians over steps."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def run(cases: Sequence[Case], *, steps: int = STEPS) -> list[Result]:
    """Predicts, then runs, each case, with calibrations made here. Raises `launch.RankFailure` if a rank fails."""
    results: dict[int, Result] = {}
    for ranks in sorted({case.ranks for case in cases}):
        # Just before its cases: what a machine takes changes by the hour.
        with calibrations({ranks}) as files:
            for number, case in enumerate(cases):
                if case.ranks == ranks:
                    results[number] = _run(case, steps, files[ranks])
    return [results[number] for number in range(len(cases))]


@contextmanager
def calibrated(ranks: int) -> Iterator[None]:
    """Uses a calibration of this machine with `ranks` ranks inside the block, unless the environment names one."""
    if from_environment().calibration is not None:
        yield
        return
    with calibrations({ranks}) as files, _environment(SENNIT_CALIBRATION=str(files[ranks])):
        yield


@contextmanager
def calibrations(ranks: set[int]) -> Iterator[dict[int, Path]]:
    """Files by the ranks that they were made with."""
    with tempfile.TemporaryDirectory(prefix="sennit-planner-") as folder:
        files = {count: Path(folder) / f"{count}.json" for count in sorted(ranks)}
        for count, path in files.items():
            calibrate.write(path, calibrate.run_here(count))
        yield files


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _run(case: Case, steps: int, file: Path) -> Result:
    config = case.config() if case.sharding != BEST else None
    if config is None:
        config = Case(name=case.name, ranks=case.ranks, options=case.options).config()
    with _environment(SENNIT_TRANSPORT=case.transport, SENNIT_CALIBRATION=str(file)):
        constants, _ = read_constants(from_environment().calibration)
        with contextlib.closing(source_of(config, case.ranks)) as source:
            rating = Rating(problem_of(config, source, cluster_of(config, case.ranks, case.ranks, None), constants))
        if case.sharding == BEST:
            found = search(rating).best
        else:
            placement = config.sharding.placement(rating.problem.tables, case.ranks)
            found = of_placement(rating, case.sharding, placement)
        plan = Sharding(shards=found.shards(rating))
        by_rank = launch.run_ranks(_train, (config, plan, steps), case.ranks, timeout_s=TIMEOUT_S)
    phases = {name for _, by_phase in by_rank for name in by_phase}
    return Result(
        name=case.name,
        ranks=case.ranks,
        sharding=case.sharding,
        transport=case.transport,
        is_held_out=case.is_held_out,
        predicted_s=found.seconds,
        measured_s=max(seconds for seconds, _ in by_rank),
        predicted_phases_s=found.phases,
        measured_phases_s={name: statistics.fmean(one.get(name, 0.0) for _, one in by_rank) for name in sorted(phases)},
    )


def _train(given: tuple[TrainingConfig, Sharding, int], rank: int, world: int, store: Store) -> Any:
    """(seconds of a step, seconds by phase): medians."""
    config, plan, steps = given
    with joined(rank, world, store, timeout_s=TIMEOUT_S):
        seconds, phases = [], []
        with (
            contextlib.closing(sources_of(config)()) as source,
            Trainer(replace(config, sharding=plan), source) as trainer,
        ):
            for _ in range(WARM_STEPS + steps):
                before, begin_s = _spent(trainer), time.perf_counter()
                trainer.train_step()
                seconds.append(time.perf_counter() - begin_s)
                phases.append({name: now - before.get(name, 0.0) for name, now in _spent(trainer).items()})
            dist.barrier()
    names = {name for one in phases[WARM_STEPS:] for name in one}
    typical = {name: statistics.median(one.get(name, 0.0) for one in phases[WARM_STEPS:]) for name in names}
    return statistics.median(seconds[WARM_STEPS:]), typical


def _spent(trainer: Trainer) -> dict[str, float]:
    """Seconds by phase so far, of the step and of the threads beside it."""
    return dict(trainer.clock.seconds) | {f"{name}, beside": spent_s for name, spent_s in trainer.clock.beside.items()}


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    return {
        "machine": machine.describe(),
        "cases": [asdict(result) | {"error": result.error} for result in results],
    }


def render(results: Sequence[Result], console: Console) -> None:
    lines = Table("case", "placement", "network", title="A step, predicted and measured")
    for heading in ("ranks", "predicted ms", "measured ms", "error"):
        lines.add_column(heading, justify="right")
    for result in results:
        lines.add_row(
            f"{result.name}{', held out' if result.is_held_out else ''}",
            result.sharding,
            "shared memory" if result.transport == "auto" else result.transport,
            str(result.ranks),
            f"{result.predicted_s * 1e3:.1f}",
            f"{result.measured_s * 1e3:.1f}",
            f"{result.error:+.0%}",
        )
    console.print(lines)
    errors = [abs(result.error) for result in results]
    console.print(f"error: median {statistics.median(errors):.1%}, most {max(errors):.1%}")
