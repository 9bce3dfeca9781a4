# SPDX-License-Identifier: Apache-2.0
"""`sennit bench rack`: AllReduce by an aggregator beside the hosts' own algorithms, at links of several rates.

Each rank has a host of its own, a network namespace with a link as slow as asked, and so has the aggregator, whose link
has no limit. The algorithms take turns on the same group. A turn is as long as on its slowest rank.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.calibrate import machine
from sennit.runtime.training import launch
from sennit.testbed.bench.training.confinement import QUEUE_BYTES
from sennit.testbed.bench.training.turns import Hosts, median_and_interval, slowest
from sennit.testbed.topology import Planes
from sennit.testbed.topology.namespace import enter
from sennit.testbed.topology.switch import Impairer
from sennit.transport.aggregator import DEFAULT_PORT
from sennit.transport.choice.selection import Selection
from sennit.transport.communicator import Communicator
from sennit.transport.config import Algorithm, from_environment
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.plan import Plan
from sennit.transport.plans.plan_codec import encode
from sennit.transport.sizes import format_size

MTU: Final = 1_500
TIMEOUT_S: Final = 120.0
OURS: Final = Algorithm.AGGREGATE
# What a cost model would take for large vectors of ranks that share no host. In a world of two they are one.
PEERS: Final = (Algorithm.DIRECT, Algorithm.HALVING)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run. Raises ValueError for what is not allowed."""

    ranks: int = 4
    rates_mbit: tuple[int, ...] = (200,)
    """Rates of a rank's link, in each direction; 0: no limit."""

    size_bytes: int = 16 << 20
    rounds: int = 7
    native: bool = False
    """Sockets in place of XDP."""

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= 16:
            raise ValueError(f"{self.ranks} ranks; allowed: 2..16")
        if self.size_bytes % 4 or self.size_bytes < 65_536:
            raise ValueError(f"{self.size_bytes} bytes; allowed: whole float32 numbers, 64 KiB or more")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of each turn at one rate, by algorithm."""

    rate_mbit: int
    mode: str
    """What `sennit aggregate` says of itself."""

    turns: dict[str, list[float]]

    def median_s(self, algorithm: str) -> float:
        return statistics.median(self.turns[algorithm])

    @property
    def best(self) -> str:
        """The fastest algorithm of the hosts."""
        return min((str(peer) for peer in PEERS), key=self.median_s)

    def ratio(self) -> list[float]:
        """The time of the hosts' best algorithm by that of the aggregator, turn by turn: median and interval."""
        pairs = zip(self.turns[self.best], self.turns[str(OURS)], strict=True)
        return median_and_interval([host / ours for host, ours in pairs])


@dataclass(frozen=True, kw_only=True)
class Report:
    """A row for each rate."""

    settings: Settings
    machine: dict[str, object]
    rows: list[Row]

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "results": [
                {
                    "rate_mbit": row.rate_mbit,
                    "mode": row.mode,
                    "median_s": {name: row.median_s(name) for name in row.turns},
                    "best_of_hosts": row.best,
                    "ratio": row.ratio(),
                }
                for row in self.rows
            ],
        }


def run(settings: Settings) -> Report:
    """Raises `launch.RankFailure` if a rank fails, if algorithms differ in a bit, or if the aggregator fails."""
    rows = []
    for rate_mbit in settings.rates_mbit:
        with _rack(settings, rate_mbit) as (hosts, mode):
            found = launch.run_ranks(_take_turns, (settings, hosts), settings.ranks, timeout_s=TIMEOUT_S)
        rows.append(Row(rate_mbit=rate_mbit, mode=mode, turns=slowest(found)))
    return Report(settings=settings, machine=machine.describe(), rows=rows)


@contextmanager
def _rack(settings: Settings, rate_mbit: int) -> Iterator[tuple[Hosts, str]]:
    """The hosts of the ranks, and how the aggregator works beside them."""
    ranks = range(settings.ranks)
    with Planes(hosts=settings.ranks + 1, planes=1, mtu=MTU, impairer=Impairer.AUTO) as planes:
        if rate_mbit:
            planes.limit_rate(rate_mbit * 10**6, queue_bytes=QUEUE_BYTES, hosts=ranks)
        where = ["--native"] if settings.native else planes.interfaces(settings.ranks)[:1]
        command = [sys.executable, "-m", "sennit", "aggregate", *where]
        server = planes.popen(settings.ranks, command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        ready = server.stdout.readline()
        if not ready.startswith("ready: "):
            raise RuntimeError(f"sennit aggregate ended with {server.wait()}: {ready}")
        address = f"[{planes.addresses(settings.ranks)[0]}]:{DEFAULT_PORT}"
        yield (
            [(planes.netns_name(rank), {**planes.environment(rank), "SENNIT_AGGREGATOR": address}) for rank in ranks],
            ready.removeprefix("ready: ").partition(",")[0].partition(" at ")[0],
        )


def _take_turns(given: tuple[Settings, Hosts], rank: int, world: int, store: Store) -> dict[str, list[float]]:
    settings, hosts = given
    namespace, environment = hosts[rank]
    enter(namespace)
    os.environ.update(environment)
    elements = settings.size_bytes // 4
    leaf = np.random.default_rng(rank).standard_normal(elements).astype(np.float32)
    turns: dict[str, list[float]] = {str(name): [] for name in (OURS, *PEERS)}
    digests = set()
    with Communicator(rank=rank, world=world, store=store, config=from_environment(), timeout_s=TIMEOUT_S) as group:
        plans = {
            name: Selection(hosts=group.hosts, forced=Algorithm(name), has_aggregator=True).allreduce(
                world=world, rank=rank, elements=elements, dtype=Dtype.F32, op=ReduceOp.SUM
            )
            for name in turns
        }
        for number in range(settings.rounds + 1):
            for name, plan in plans.items():
                data = leaf.copy()
                seconds = _turn(group, plan, data)
                if number:  # the first one warms
                    turns[name].append(seconds)
                digests.add(hashlib.sha256(data.tobytes()).digest())
        failures = group.counters()["aggregator_failed"]
    if len(digests) != 1 or failures:
        raise AssertionError(f"{len(digests)} digests of one sum; {failures} failures of the aggregator")
    return turns


def _turn(group: Communicator, plan: Plan, data: Any) -> float:
    group.barrier()
    begun_s = time.perf_counter()
    group.post(encode(plan), lambda: plan, [data]).wait()
    return time.perf_counter() - begun_s


def render(report: Report, console: Console) -> None:
    settings = report.settings
    table = Table(
        title=f"AllReduce of {format_size(settings.size_bytes)} of float32, {settings.ranks} ranks, a host each; "
        f"{settings.rounds} turns"
    )
    for heading in ("link", "aggregator", *turn_names(), "hosts / aggregator", "95 % interval"):
        table.add_column(heading, justify="left" if heading in ("link", "aggregator") else "right")
    for row in report.rows:
        middle, low, high = row.ratio()
        table.add_row(
            link_name(row.rate_mbit),
            row.mode,
            *(f"{row.median_s(name) * 1e3:,.0f} ms" for name in turn_names()),
            f"{middle:.2f}",
            f"{low:.2f} to {high:.2f}",
        )
    console.print(table)


def turn_names() -> Sequence[str]:
    return [str(name) for name in (OURS, *PEERS)]


def link_name(rate_mbit: int) -> str:
    return f"{rate_mbit:,} Mbit/s" if rate_mbit else "no limit"


def plot(report: Report, path: Path) -> None:
    """Time against the rate of a link: where an aggregator stops paying."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.8), layout="constrained")
    places = range(len(report.rows))
    for name in turn_names():
        middles = [row.median_s(name) * 1e3 for row in report.rows]
        lows, highs = zip(
            *((min(row.turns[name]) * 1e3, max(row.turns[name]) * 1e3) for row in report.rows), strict=True
        )
        line = axis.plot(places, middles, marker="o", ms=4, label=name)[0]
        axis.fill_between(places, lows, highs, color=line.get_color(), alpha=0.2, lw=0)
    axis.set_xticks(places, [link_name(row.rate_mbit) for row in report.rows])
    axis.set_yscale("log")
    axis.set_xlabel("link of a rank")
    axis.set_ylabel(f"ms for {format_size(report.settings.size_bytes)}, slowest rank")
    axis.set_title(f"AllReduce of {report.settings.ranks} ranks, aggregator: {report.rows[0].mode}")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=150)
