# SPDX-License-Identifier: Apache-2.0
"""`sennit bench quality`: what a way to train costs in quality.

Every way trains the same model on the same data with the same seeds: seed by seed, so that the luck of a seed drops out
of the difference (a paired comparison). The differences have an interval of 95 % by Student's t.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from sennit.runtime.calibrate import machine
from sennit.testbed.bench import quiet
from sennit.testbed.bench.training.quality_ways import (
    ASYNCHRONOUS,
    FP32,
    HISTORY_WAYS,
    RATE_RULES,
    SAME_TIME,
    SQRT,
    WAYS,
    Job,
    Trained,
    Way,
    batch_way,
    server_way,
    steps_within,
    train,
)

NAMED: Final = {**WAYS, **HISTORY_WAYS}
"""All ways with a name of their own."""

METRICS: Final = {"normalised_entropy": "NE", "auc": "AUC", "calibration": "calibration"}
"""The fields of a run's quality that are compared, and their short names."""
DIGITS: Final = {"normalised_entropy": 5, "auc": 5, "calibration": 4}
"""Digits that are shown. In calibration, seeds agree on fewer than four."""

# The quantile 0.975 of Student's t, for 1, 2, ... degrees of freedom.
T_975: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145)
SEEDS_MAX: Final = len(T_975) + 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run."""

    data: str = "flights"
    seeds: int = 5
    """Runs of each way, with the seeds 1, 2, ..."""

    epochs: int = 1
    ranks: int = 2
    batch_sizes: tuple[int, ...] = ()
    """Further global batch sizes, each in fp32."""

    rate_rules: tuple[str, ...] = (SQRT,)
    """How rates follow `batch_sizes`, and the batch size of the parameter server: each is a way of its own."""

    warmup: float = 0.0
    """The share of the steps in which rates rise: of `batch_sizes` and of the parameter server."""

    equal_time: bool = False
    """Each of `batch_sizes` also for as long as the parameter server took: "batch N, same time"."""

    only: tuple[str, ...] = tuple(WAYS)
    base: str = FP32
    """The way that others are compared with."""

    history: int | None = None
    """Events of a history at most, in ways that read histories; None: as the data say."""

    def __post_init__(self) -> None:
        """Raises ValueError for ways that do not exist, and numbers of seeds without an interval."""
        for rule in self.rate_rules:
            if rule not in RATE_RULES:
                raise ValueError(f"rate rule {rule!r}; allowed: {', '.join(RATE_RULES)}")
        if not self.rate_rules:
            raise ValueError(f"no rate rule; allowed: {', '.join(RATE_RULES)}")
        known = dict.fromkeys([*NAMED, *(way.name for way in (*self._servers, *self._batches))])
        if self.base not in known:
            raise ValueError(f"base {self.base!r}; allowed: {', '.join(known)}")
        for name in self.only:
            if name not in NAMED:
                raise ValueError(f"way {name!r}; allowed: {', '.join(NAMED)}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"a warm-up of {self.warmup:g} of the steps; allowed: 0 to below 1")
        if self.equal_time and not (self.batch_sizes and self._has_servers):
            raise ValueError(f"the same time without batch sizes and {ASYNCHRONOUS!r}; allowed: with both")
        if not 2 <= self.seeds <= SEEDS_MAX:
            raise ValueError(f"{self.seeds} seeds; allowed: 2 to {SEEDS_MAX}")
        if self.history is not None and not any(way.reads_histories for way in self.ways):
            readers = [way.name for way in NAMED.values() if way.reads_histories]
            raise ValueError(
                f"a history of {self.history} without a way that reads it; allowed: with {', '.join(readers)}"
            )

    @property
    def title(self) -> str:
        """The data, the length of training and the seeds in words."""
        epochs = "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"
        history = "" if self.history is None else f"histories of {self.history}, "
        return f"{self.data}, {history}{epochs}, seeds 1 to {self.seeds}"

    @property
    def ways(self) -> tuple[Way, ...]:
        """All ways in the order in which they run: a way that sets a time comes before those that take it."""
        named = [NAMED[name] for name in self.only if name != ASYNCHRONOUS]
        longer = [
            batch_way(size, rule, is_same_time=True)
            for size in self.batch_sizes
            for rule in self.rate_rules
            if self.equal_time
        ]
        servers = self._servers if self._has_servers else []
        found = [*named, *servers, *self._batches, *longer]
        if self.base in NAMED:
            found.append(NAMED[self.base])
        by_name = {way.name: way for way in found}
        return (by_name.pop(self.base), *by_name.values())

    @property
    def _has_servers(self) -> bool:
        return ASYNCHRONOUS in self.only or self.base.startswith(ASYNCHRONOUS)

    @property
    def _servers(self) -> list[Way]:
        return [server_way(rule) for rule in self.rate_rules]

    @property
    def _batches(self) -> list[Way]:
        return [batch_way(size, rule) for size in self.batch_sizes for rule in self.rate_rules]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A metric of this way minus that of the base: the mean over seeds, and half of its interval of 95 %."""

    mean: float
    half: float

    @classmethod
    def of(cls, way: Sequence[float], base: Sequence[float]) -> Difference:
        apart = [ours - theirs for ours, theirs in zip(way, base, strict=True)]
        return cls(mean=statistics.fmean(apart), half=interval_half(apart))


def interval_half(values: Sequence[float]) -> float:
    """Half of the interval of 95 % of the mean of 2 to `SEEDS_MAX` values."""
    return T_975[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True, kw_only=True)
class Report:
    """The quality of each run, by way and in the order of seeds: of all of them, or of those that are done."""

    settings: Settings
    machine: dict[str, object]
    qualities: dict[str, list[dict[str, float]]]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of training, by way and seed, where they were measured."""

    steps: dict[str, list[int]] = field(default_factory=dict)
    """Steps of training, by way and seed, where they were counted."""

    @classmethod
    def of(cls, settings: Settings, by_seed: Sequence[dict[str, Trained]], where: dict[str, object]) -> Report:
        """The report of the runs of each seed, the last of which need not have all ways."""
        runs = {way.name: [found[way.name] for found in by_seed if way.name in found] for way in settings.ways}
        timed = {name: found for name, found in runs.items() if found and found[0].seconds is not None}
        return cls(
            settings=settings,
            machine=where,
            qualities={name: [one.quality for one in found] for name, found in runs.items()},
            seconds={name: [one.seconds or 0.0 for one in found] for name, found in timed.items()},
            steps={name: [one.steps or 0 for one in found] for name, found in timed.items()},
        )

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Report:
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in found["settings"].items()
        }
        return cls(
            settings=Settings(**settings),
            machine=found["machine"],
            qualities=found["qualities"],
            seconds=found["seconds"],
            steps=found["steps"],
        )

    def against(self, base: str) -> Report:
        """The same runs, compared with another way."""
        return replace(self, settings=replace(self.settings, base=base))

    def values(self, way: str, metric: str) -> list[float]:
        return [found[metric] for found in self.qualities[way]]

    def difference(self, way: str, metric: str) -> Difference:
        """Over the seeds that both have: 2 or more."""
        pairs = self._pairs(way)
        return Difference.of(self.values(way, metric)[:pairs], self.values(self.settings.base, metric)[:pairs])

    def _pairs(self, way: str) -> int:
        return min(len(self.qualities[way]), len(self.qualities[self.settings.base]))

    def with_seed(self, seed: int) -> dict[str, Trained]:
        """The runs with this seed, by name of the way."""
        at = seed - 1
        return {
            way: Trained(
                quality=found[at],
                steps=self.steps[way][at] if way in self.steps else None,
                seconds=self.seconds[way][at] if way in self.seconds else None,
            )
            for way, found in self.qualities.items()
            if at < len(found)
        }

    def text(self, way: str, metric: str) -> str:
        """The difference from the base in words; empty for the base itself."""
        if way == self.settings.base:
            return ""
        apart = self.difference(way, metric)
        return f"{apart.mean:+.{DIGITS[metric]}f} ± {apart.half:.{DIGITS[metric]}f}"

    def mean_text(self, way: str, metric: str) -> str:
        """The mean over seeds."""
        return f"{statistics.fmean(self.values(way, metric)):.{DIGITS[metric]}f}"

    def time_ratio(self, way: str) -> float | None:
        """The median over seeds of its time of training divided by the parameter server's; None: not measured."""
        rules = {one.name: one.rule for one in self.settings.ways}
        server = server_way(rules[way]).name
        if way not in self.seconds or server not in self.seconds:
            return None
        pairs = zip(self.seconds[way], self.seconds[server], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    @property
    def others(self) -> list[str]:
        """All ways but the base."""
        return [way for way in self.qualities if way != self.settings.base]

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "qualities": self.qualities,
            "seconds": self.seconds,
            "steps": self.steps,
            "minus base": {
                way: {metric: asdict(self.difference(way, metric)) for metric in METRICS}
                for way in self.others
                if self._pairs(way) >= 2
            },
        }


def run(
    settings: Settings,
    tell: Callable[[str, int, int], None] = lambda *_: None,
    *,
    earlier: Report | None = None,
    keep: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Trains all of them, one after another, but for the runs that `earlier` has.

    `tell` hears what begins, how many runs are done, and how many in all. `keep` gets what there is after each run.
    """
    ways = settings.ways
    by_seed: list[dict[str, Trained]] = []
    for seed in range(1, settings.seeds + 1):
        job = Job(
            data=settings.data,
            seed=seed,
            epochs=settings.epochs,
            ranks=settings.ranks,
            warmup=settings.warmup,
            history=settings.history,
        )
        found = {} if earlier is None else earlier.with_seed(seed)
        by_seed.append(found)
        for number, way in enumerate(ways):
            if way.name not in found:
                tell(f"seed {seed}: {way.name}", (seed - 1) * len(ways) + number, settings.seeds * len(ways))
                found[way.name] = train(job, way, _steps(way, found))
                keep(Report.of(settings, by_seed, machine.describe()))
    return Report.of(settings, by_seed, machine.describe())


def _steps(way: Way, found: Mapping[str, Trained]) -> int | None:
    """How many steps fit into the time of the parameter server, of a way with that time."""
    if not way.is_same_time:
        return None
    server = found[server_way(way.rule).name]
    assert server.seconds is not None
    return steps_within(server.seconds, found[way.name.removesuffix(SAME_TIME)])


def read_earlier(path: Path | None, settings: Settings, *, is_resumed: bool) -> Report | None:
    """The runs that a run with these settings, of as many seeds or fewer, left in its file. None: there are none.

    Raises ValueError for another file, other settings, another processor or other versions. Without `is_resumed`, there
    must be no run that has not ended.
    """
    if is_resumed and path is None:
        raise ValueError("--resume without --json; allowed: with the file of the run")
    if path is None or not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        is_partial, report = found.get(quiet.PARTIAL), Report.from_json(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if not is_resumed:
            return None
        raise ValueError(f"{path} has no run of bench quality ({type(error).__name__}: {error})") from None
    if not is_resumed:
        if is_partial:
            raise ValueError(f"{path} has a run that has not ended; give --resume to go on with it, or another file")
        return None
    for one in fields(Settings):
        there, here = getattr(report.settings, one.name), getattr(settings, one.name)
        if there > here if one.name == "seeds" else there != here:
            raise ValueError(f"{path} has a run with {one.name} {there}, not {here}; allowed: the same, or more seeds")
    here = machine.describe()
    for name in ("processor", "cores", "versions"):
        if report.machine[name] != here[name]:
            raise ValueError(f"{path} was measured with {name} {report.machine[name]}; allowed: {here[name]}")
    quiet.go_on(found, str(path))
    return report


def render(report: Report, console: Console) -> None:
    """A line for each way: means, and differences from the base with their intervals."""
    settings = report.settings
    table = Table(title=f"{settings.title}, {settings.ranks} ranks")
    table.add_column("way")
    for short in METRICS.values():
        table.add_column(short, justify="right")
        table.add_column(f"{short} - {settings.base}", justify="right")
    table.add_column("seconds", justify="right")
    for way in report.qualities:
        cells = [way]
        for metric in METRICS:
            cells += [report.mean_text(way, metric), report.text(way, metric)]
        table.add_row(*cells, f"{statistics.fmean(report.seconds[way]):.1f}" if way in report.seconds else "")
    console.print(table)
