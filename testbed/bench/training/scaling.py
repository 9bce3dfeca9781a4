# SPDX-License-Identifier: Apache-2.0
"""`sennit bench scaling`: training steps of 1 to 16 ranks with equally many samples for each rank, and one model.

Ideally a step takes as long with any number of ranks, as long as each has a core. Ranks that share cores take turns:
then the ideal is that much longer. Processor time does not depend on turns, so its efficiency is given beside.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.calibrate import machine
from sennit.runtime.planner.constants import cores_here
from sennit.runtime.timeline import Timeline
from sennit.runtime.training import launch
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.streamed import sources_of
from sennit.runtime.training.trainer import Trainer
from sennit.testbed.bench.training.turns import Exposed, TurnSettings, exposed_of, joined, turn_of

TIMEOUT_S: Final = 300.0
WARM_TURNS: Final = 1
# Slices are powers of two, and so are worlds of equally many slices.
WORLDS: Final = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Settings(TurnSettings):
    """What to run. A round is a run of each world, one world after the other."""

    data: str = "synthetic"
    samples: int = 40_000
    worlds: tuple[int, ...] = WORLDS
    local_batch: int = 512
    """Samples of each rank in a step."""

    rank_slices: int = 2
    """Slices of the dense step that each rank takes. So all ranks compute the same, in any world."""

    turns: int = 4
    """Timed turns of a run."""

    rounds: int = 3

    def __post_init__(self) -> None:
        if 1 not in self.worlds or any(world not in WORLDS for world in self.worlds):
            raise ValueError(f"worlds {self.worlds}; allowed: 1, and others of {WORLDS}")

    def config(self, world: int) -> TrainingConfig:
        return self.endless(batch_size=self.local_batch * world, slices=self.rank_slices * world, timeout_s=TIMEOUT_S)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of a world."""

    step_s: float
    """Seconds of a step on the slowest rank."""

    processor_s: float
    """Processor seconds of all ranks together for a step."""

    exposed: Exposed


@dataclass(frozen=True, kw_only=True)
class Report:
    """Runs of each world."""

    settings: Settings
    machine: dict[str, object]
    cores: int
    runs: Mapping[int, list[Measured]]

    def median(self, world: int, of: Callable[[Measured], float]) -> float:
        return statistics.median(of(run) for run in self.runs[world])

    def efficiency(self, world: int) -> float:
        """The ideal wall time to the measured. In the ideal, ranks that share a core only take turns."""
        ideal_s = self.median(1, lambda run: run.step_s) * max(1.0, world / self.cores)
        return ideal_s / self.median(world, lambda run: run.step_s)

    def processor_efficiency(self, world: int) -> float:
        """Processor time of a sample with one rank, to that of a sample with so many."""
        return self.median(1, lambda run: run.processor_s) * world / self.median(world, lambda run: run.processor_s)

    def exposed_share(self, world: int) -> float:
        """The share of a step that waits for exchanges, by a timeline."""
        return self.median(world, lambda run: (run.exposed.alltoall_ms + run.exposed.others_ms) / run.exposed.step_ms)

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "cores": self.cores,
            "worlds": {
                str(world): {
                    "step_ms": self.median(world, lambda run: run.step_s) * 1e3,
                    "processor_ms": self.median(world, lambda run: run.processor_s) * 1e3,
                    "efficiency": self.efficiency(world),
                    "processor_efficiency": self.processor_efficiency(world),
                    "exposed_share": self.exposed_share(world),
                    "runs": [asdict(run) for run in runs],
                }
                for world, runs in self.runs.items()
            },
        }


def run(settings: Settings) -> Report:
    """Raises `launch.RankFailure` if a rank fails."""
    runs: dict[int, list[Measured]] = {world: [] for world in settings.worlds}
    with tempfile.TemporaryDirectory(prefix="sennit-scaling-") as folder:
        for number in range(settings.rounds):
            for world in settings.worlds:
                path = Path(folder) / f"{number}-{world}.json.gz"
                runs[world].append(_run(settings, world, path))
    return Report(settings=settings, machine=machine.describe(), cores=cores_here(), runs=runs)


def _run(settings: Settings, world: int, path: Path) -> Measured:
    found = launch.run_ranks(_train, (settings, path), world, timeout_s=TIMEOUT_S)
    turns = list(zip(*(rank[0] for rank in found), strict=True))
    return Measured(
        step_s=statistics.median(max(seconds for seconds, _ in ranks) for ranks in turns) / settings.steps,
        processor_s=statistics.median(sum(busy_s for _, busy_s in ranks) for ranks in turns) / settings.steps,
        exposed=found[0][1],
    )


def _train(given: tuple[Settings, Path], rank: int, world: int, store: Store) -> Any:
    """(seconds and processor seconds of each turn, what was exposed); the last is there on rank 0."""
    settings, path = given
    with joined(rank, world, store, timeout_s=TIMEOUT_S):
        config = settings.config(world)
        source, timeline = sources_of(config)(), Timeline(path)
        with Trainer(config, source, timeline) as trainer:
            source.begin(0)
            turns = [turn_of(trainer, settings.steps) for _ in range(WARM_TURNS + settings.turns)]
            exposed = exposed_of(trainer, timeline, steps=settings.steps * 2, world=world)
            dist.barrier()
        source.close()
    return turns[WARM_TURNS:], exposed


def render(report: Report, console: Console) -> None:
    settings = report.settings
    lines = Table(
        title=f"{settings.data}, dim {settings.dim}, {settings.local_batch:,} samples a rank, {report.cores} cores of "
        f"{report.machine['processor']}; {settings.rounds} runs of {settings.turns} turns of {settings.steps} steps"
    )
    for heading in ("ranks", "ms a step", "efficiency", "processor ms", "processor efficiency", "exposed"):
        lines.add_column(heading, justify="right")
    for world in report.runs:
        lines.add_row(
            str(world),
            f"{report.median(world, lambda run: run.step_s) * 1e3:.1f}",
            f"{report.efficiency(world):.0%}",
            f"{report.median(world, lambda run: run.processor_s) * 1e3:.1f}",
            f"{report.processor_efficiency(world):.0%}",
            f"{report.exposed_share(world):.0%}",
        )
    console.print(lines)
