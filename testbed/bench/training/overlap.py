# SPDX-License-Identifier: Apache-2.0
"""`sennit bench overlap`: what overlapped training steps gain on a slow network, and what of the exchanges is exposed.

Trainers of several schedules in the same processes take turns of a few steps, in random order. A ratio is of turns that
follow each other, so that other load of the machine meets both. Hosts are network namespaces; a rank enters its own.
Exposed is what a timeline says a step waited for (docs/reference/timeline.md).
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.calibrate import machine
from sennit.runtime.timeline import Timeline
from sennit.runtime.training import launch
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.streamed import sources_of
from sennit.runtime.training.trainer import Trainer
from sennit.testbed.bench.training.confinement import hosts_of
from sennit.testbed.bench.training.turns import (
    Exposed,
    Hosts,
    TurnSettings,
    exposed_of,
    joined,
    median_and_interval,
    slowest,
    turn_of,
)

SERIAL: Final = "serial"
SCHEDULES: Final[Mapping[str, Mapping[str, Any]]] = {
    SERIAL: {"batches_ahead": 0},
    "ids": {"overlap": "ids"},
    "tables": {"overlap": "tables"},
}
WARM_TURNS: Final = 2
TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, kw_only=True)
class Settings(TurnSettings):
    """What to run. A round is a turn of each schedule."""

    world: int = 2
    hosts: int = 1
    """Network namespaces that ranks are spread over; 1: shared memory."""

    round_trip_us: int = 0
    """What the network adds to a round trip."""

    rate_mbit: int | None = None
    """Rate of each host's link, in each direction; None: no limit."""

    batch_size: int = 2_048

    def __post_init__(self) -> None:
        if self.world % self.hosts:
            raise ValueError(f"{self.world} ranks on {self.hosts} hosts; allowed: equally many on each")
        if self.hosts == 1 and (self.round_trip_us or self.rate_mbit):
            raise ValueError("a network, but 1 host; allowed: 2 or more")

    def config(self, schedule: str) -> TrainingConfig:
        return self.endless(batch_size=self.batch_size, timeout_s=TIMEOUT_S, **SCHEDULES[schedule])


@dataclass(frozen=True, kw_only=True)
class Report:
    """Seconds of each turn of the slowest rank, by schedule."""

    settings: Settings
    machine: dict[str, object]
    turns: dict[str, list[float]]
    exposed: dict[str, Exposed]
    processor_s: dict[str, float] = field(default_factory=dict)
    """Processor seconds of all ranks together for a step, by schedule."""

    def ratio(self, schedule: str) -> list[float]:
        """The step's time to the serial one's, turn by turn: median and interval."""
        pairs = zip(self.turns[schedule], self.turns[SERIAL], strict=True)
        return median_and_interval([one / serial for one, serial in pairs])

    def step_ms(self, schedule: str) -> float:
        return statistics.median(self.turns[schedule]) / self.settings.steps * 1e3

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "schedules": {
                name: {
                    "step_ms": self.step_ms(name),
                    "to_serial": self.ratio(name),
                    "processor_ms": self.processor_s[name] * 1e3,
                    "exposed": asdict(self.exposed[name]),
                }
                for name in self.turns
            },
        }


def run(settings: Settings) -> Report:
    """Raises `launch.RankFailure` if a rank fails, or if a schedule changes a weight."""
    network = hosts_of(settings.hosts, round_trip_us=settings.round_trip_us, rate_mbit=settings.rate_mbit)
    with network as names, tempfile.TemporaryDirectory(prefix="sennit-overlap-") as folder:
        found = launch.run_ranks(_take_turns, (settings, names, Path(folder)), settings.world, timeout_s=TIMEOUT_S)
    return Report(
        settings=settings,
        machine=machine.describe(),
        turns=slowest([rank[0] for rank in found]),
        exposed=found[0][2],
        processor_s={name: sum(rank[1][name] for rank in found) for name in SCHEDULES},
    )


def _take_turns(given: tuple[Settings, Hosts, Path], rank: int, world: int, store: Store) -> Any:
    """(seconds of turns, processor seconds of a step, exposed) by schedule; the last is there on rank 0."""
    settings, hosts, folder = given
    with joined(rank, world, store, timeout_s=TIMEOUT_S, hosts=hosts):
        config = settings.config(SERIAL)
        make_source = sources_of(config)
        turns: dict[str, list[float]] = {name: [] for name in SCHEDULES}
        busy: dict[str, list[float]] = {name: [] for name in SCHEDULES}
        exposed = {}
        with contextlib.ExitStack() as stack:
            trainers, timelines = {}, {}
            for name in SCHEDULES:
                source = make_source()
                stack.callback(source.close)
                timelines[name] = Timeline(folder / f"{name}.json.gz")
                trainers[name] = stack.enter_context(Trainer(settings.config(name), source, timelines[name]))
                source.begin(trainers[name].order.next_batch(0))
            chance = random.Random(1)
            for _ in range(WARM_TURNS + settings.rounds):
                for name in chance.sample(list(SCHEDULES), len(SCHEDULES)):
                    seconds, processor_s = turn_of(trainers[name], settings.steps)
                    turns[name].append(seconds)
                    busy[name].append(processor_s / settings.steps)
            for name, trainer in trainers.items():
                exposed[name] = exposed_of(trainer, timelines[name], steps=settings.steps * 5, world=world)
            weights = {name: trainer.weights() for name, trainer in trainers.items()}
            for name, found in weights.items():
                if any(not found[key].equal(value) for key, value in weights[SERIAL].items()):
                    raise AssertionError(f"the weights of schedule {name} are not those of serial steps")
            dist.barrier()
    middle = {name: statistics.median(found[WARM_TURNS:]) for name, found in busy.items()}
    return {name: found[WARM_TURNS:] for name, found in turns.items()}, middle, exposed


def render(report: Report, console: Console) -> None:
    settings = report.settings
    network = "shared memory" if settings.hosts == 1 else f"{settings.hosts} hosts, +{settings.round_trip_us} µs"
    if settings.rate_mbit is not None:
        network += f", {settings.rate_mbit:,} Mbit/s"
    table = Table(
        title=f"{settings.data}, dim {settings.dim}, batches of {settings.batch_size:,}, {settings.world} ranks, "
        f"{network}; {settings.rounds} turns of {settings.steps} steps"
    )
    for heading in (
        "schedule", "ms a step", "to serial", "95 % interval", "processor ms", "AlltoAll exposed", "of the serial step",
        "other exposed",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for name in report.turns:
        middle, low, high = report.ratio(name)
        exposed = report.exposed[name]
        table.add_row(
            name,
            f"{report.step_ms(name):.2f}",
            f"{middle:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{report.processor_s[name] * 1e3:.2f}",
            f"{exposed.alltoall_ms:.2f} ms",
            f"{exposed.alltoall_ms / report.exposed[SERIAL].step_ms:.1%}",
            f"{exposed.others_ms:.2f} ms",
        )
    console.print(table)
