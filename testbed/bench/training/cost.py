# SPDX-License-Identifier: Apache-2.0
"""`sennit bench cost`: processor time for a million samples and for a gigabyte moved, by who takes it.

A run fed through XDP, over sennit, beside a run fed through a plain Python receiver, over gloo; beside both from
memory, and beside TorchRec where it is installed. Feeders, ranks and all their threads are counted, and BPF programs
besides. Two kinds of figures: of whole training steps, and of ingest and exchange alone, where a step takes a batch and
moves what it would move, but computes nothing.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from sennit.runtime.calibrate import machine
from sennit.runtime.data.source import Source
from sennit.runtime.telemetry.process_cost import BPF, INGEST, TRAINER, TRANSPORT
from sennit.runtime.training import launch
from sennit.runtime.training.config import TrainingConfig
from sennit.testbed.bench.training.cost_ways import TIMEOUT_S, Measured, Place, Plan, Way, take_turns
from sennit.testbed.topology import Planes

# The largest packet that native XDP takes on a veth interface.
MTU_BYTES: Final = 3506
PORT: Final = 4800
FEEDER_HOST, RANK_HOST = 0, 1
LEAVE_S: Final = 30.0
GB: Final = 1e9
FEEDER: Final = "feeder"

XDP: Final = Way(name="XDP + sennit", backend="sennit", ingest="xdp")
PYTHON: Final = Way(name="Python + gloo", backend="gloo", ingest="python")
WHOLE: Final = (
    XDP,
    PYTHON,
    Way(name="cpu + sennit", backend="sennit", ingest="cpu"),
    Way(name="memory + sennit", backend="sennit"),
    Way(name="memory + gloo", backend="gloo"),
    Way(name="TorchRec from memory", backend="gloo", is_torchrec=True),
)
BARE: Final = (
    Way(name="XDP + sennit, bare", backend="sennit", ingest="xdp", is_bare=True),
    Way(name="Python + gloo, bare", backend="gloo", ingest="python", is_bare=True),
    Way(name="memory + sennit, bare", backend="sennit", is_bare=True),
    Way(name="memory + gloo, bare", backend="gloo", is_bare=True),
)
KINDS: Final = {"whole": WHOLE, "bare": BARE}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run."""

    data: str = "flights"
    ranks: int = 2
    batch_size: int = 2_048
    dim: int = 16
    samples: int = 200_000
    """Samples of synthetic data."""

    steps: int = 12
    """Steps of a turn."""

    rounds: int = 8
    """Turns of each way."""

    kind: str = "whole"
    """whole: training steps. bare: ingest and exchange alone."""

    def __post_init__(self) -> None:
        if self.ranks not in (1, 2, 4, 8):
            raise ValueError(f"{self.ranks} ranks; allowed: 1, 2, 4 or 8, which have equally many of 8 slices")
        if self.batch_size % 8:
            raise ValueError(f"batches of {self.batch_size}; allowed: a multiple of 8")
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r}; allowed: {', '.join(KINDS)}")

    @property
    def ways(self) -> tuple[Way, ...]:
        return KINDS[self.kind]

    @property
    def config(self) -> TrainingConfig:
        return TrainingConfig(
            source=Source(data=self.data, samples=self.samples),
            batch_size=self.batch_size,
            embedding_dim=self.dim,
            epochs=1_000,
            timeout_s=TIMEOUT_S,
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """The turns of each way, by its name."""

    settings: Settings
    machine: dict[str, object]
    ways: dict[str, Measured]

    def processor_s(self, name: str) -> float:
        """Processor seconds for a million samples: the median of the turns. Run times of BPF programs are added."""
        found = self.ways[name]
        turns = [seconds + roles.get(BPF, 0.0) for seconds, roles in zip(found.processor_s, found.roles_s, strict=True)]
        return statistics.median(turns) * 1e6 / found.samples

    def ratio(self, name: str, base: str) -> list[float]:
        """Processor seconds of way `name` to those of way `base`, turn by turn: median, lowest and highest ratio."""
        turns = [
            [seconds + roles.get(BPF, 0.0) for seconds, roles in zip(way.processor_s, way.roles_s, strict=True)]
            for way in (self.ways[name], self.ways[base])
        ]
        ratios = [one / other for one, other in zip(*turns, strict=True)]
        return [statistics.median(ratios), min(ratios), max(ratios)]

    def roles(self, name: str) -> dict[str, float]:
        """Seconds for a million samples by role, medians of turns."""
        found = self.ways[name]
        seconds = {role: statistics.median(one.get(role, 0.0) for one in found.roles_s) for role in found.roles_s[0]}
        seconds[FEEDER] = statistics.median(found.feeder_s)
        return {role: one * 1e6 / found.samples for role, one in seconds.items()}

    def per_gb(self, name: str) -> float | None:
        """Seconds for a GB that ranks sent one another, by the count of the same step over sennit."""
        moved = max((way.moved_bytes / way.samples for way in self.ways.values() if way.moved_bytes), default=0.0)
        return self.processor_s(name) / 1e6 / moved * GB if moved else None

    def as_json(self) -> dict[str, Any]:
        present = [name for name, way in self.ways.items() if not way.absent]
        base = self.settings.ways[1].name
        return {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "processor_s_per_million_samples": {name: self.processor_s(name) for name in present},
            "processor_s_per_gb_moved": {name: self.per_gb(name) for name in present},
            "roles_s_per_million_samples": {name: self.roles(name) for name in present},
            f"to {base}": {name: self.ratio(name, base) for name in present},
            "absent": {name: way.absent for name, way in self.ways.items() if way.absent},
            "turns": {name: asdict(way) for name, way in self.ways.items()},
        }


def run(settings: Settings) -> Report:
    """Raises `launch.RankFailure` if a rank fails."""
    with contextlib.ExitStack() as stack:
        places = tuple(stack.enter_context(_placed(settings, way)) for way in settings.ways)
        plan = Plan(
            ways=settings.ways,
            places=places,
            config=settings.config,
            ranks=settings.ranks,
            steps=settings.steps,
            rounds=settings.rounds,
            port=PORT,
        )
        found = launch.run_ranks(take_turns, plan, len(plan.ways) * plan.ranks, timeout_s=TIMEOUT_S)
    ways = {way.name: found[number * settings.ranks] for number, way in enumerate(settings.ways)}
    return Report(settings=settings, machine=machine.describe(), ways=ways)


@contextlib.contextmanager
def _placed(settings: Settings, way: Way) -> Iterator[Place]:
    """A network for a way that is fed, and its feeder there."""
    if not way.is_fed:
        yield Place(network=None, address="", interface="", feeder=None)
        return
    with Planes(hosts=2, planes=1, mtu=MTU_BYTES, per_packet=True) as planes, contextlib.ExitStack() as stack:
        address = planes.addresses(RANK_HOST)[0]
        command = [sys.executable, "-m", "sennit", "feed", "--data", settings.data, "--to", f"[{address}]:{PORT}"]
        if settings.data == "synthetic":
            command += ["--samples", str(settings.samples)]
        feeder = planes.popen(FEEDER_HOST, command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(feeder.wait, LEAVE_S)
        stack.callback(feeder.terminate)
        yield Place(
            network=planes.netns_name(RANK_HOST),
            address=address,
            interface=planes.interfaces(RANK_HOST)[0],
            feeder=feeder.pid,
        )


def render(report: Report, console: Console) -> None:
    settings = report.settings
    what = "whole steps" if settings.kind == "whole" else "ingest and exchange alone"
    base = settings.ways[1].name
    table = Table(
        title=f"{what}: {settings.data}, dim {settings.dim}, batches of {settings.batch_size:,}, {settings.ranks} "
        f"ranks, {settings.rounds} turns of {settings.steps} steps, {report.machine['processor']}"
    )
    table.add_column("processor seconds for a million samples")
    for heading in ("in all", f"to {base}", "for a GB", FEEDER, INGEST, "BPF", TRANSPORT, TRAINER):
        table.add_column(heading, justify="right")
    for name, way in report.ways.items():
        if way.absent:
            console.print(f"{name} did not run: {way.absent}", markup=False, soft_wrap=True)
            continue
        roles, (middle, low, high), for_gb = report.roles(name), report.ratio(name, base), report.per_gb(name)
        cells = [f"{roles[role]:.2f}" if roles.get(role) else "" for role in (FEEDER, INGEST, BPF, TRANSPORT, TRAINER)]
        table.add_row(
            name,
            f"{report.processor_s(name):.2f}",
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
            "" if for_gb is None else f"{for_gb:.1f}",
            *cells,
        )
    console.print(table)
