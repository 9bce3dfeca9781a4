# SPDX-License-Identifier: Apache-2.0
"""`sennit bench drift`: what it costs to train late, without new ids, or in another order, on data that drift.

The data are days of `synthetic-stream`, so the best normalised entropy (NE) of each day is known. All ways train the
same model on the same days, seed by seed. A seed decides the stream and the model.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.calibrate import machine
from sennit.runtime.data.samples import Samples
from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.sharded import DynamicIds
from sennit.runtime.stream.attainable import Attainable, by_day
from sennit.runtime.stream.planted import DAY_S, Planted, indices
from sennit.runtime.stream.synthetic import days_of
from sennit.runtime.stream.synthetic_settings import SyntheticStream
from sennit.runtime.training import launch
from sennit.runtime.training.predictions import quality
from sennit.testbed.bench.training.drift_learner import BATCH, Day, Learner, Vocabulary, with_own_ids
from sennit.testbed.bench.training.quality import SEEDS_MAX, Difference, interval_half
from sennit.testbed.bench.training.turns import joined

IN_ORDER: Final = "in order"
NO_NEW_IDS: Final = "in order, no new ids"
SHUFFLED: Final = "shuffled"
LEFT: Final = "trained once, then left"
DYNAMIC: Final = "in order, dynamic, few rows"
SHARING: Final = "in order, dynamic, few rows, one shared at first"
HASHED: Final = "in order, hashed, few rows"
WAYS: Final = (IN_ORDER, SHUFFLED, NO_NEW_IDS, LEFT, DYNAMIC, SHARING, HASHED)
"""In order: each day after all days before it, once. Shuffled: a new model for each day, which sees all days before it
once, in no order. No new ids: ids that the first days have not share one row. Then left: after the first days.
Few rows: as many as ids live at any one time, or `FEW_MIN`; all other ways have several times as many. One shared at
first: an id has a row of its own from its second time on.
"""

FEW_MIN: Final = 100
"""Rows of a table with few, at least: all ids of a batch need rows, and some are born in it."""

IDS: Final = {DYNAMIC: DynamicIds(), SHARING: DynamicIds(admit_after=2, unadmitted="shared")}

KNOWS_MIDNIGHT: Final = "all weights of midnight known"
KNOWS_FIRST: Final = "all weights of the first days known"
"""Forecasters, which need no training (`Planted.forecast`): they know the true weights at midnight before the day, or
at the end of the first days."""

TIMEOUT_S: Final = 600.0
STREAM: Final = SyntheticStream(days=12, rows_per_day=40 * BATCH, living=(2_000, 500, 100))


def late(days: int) -> str:
    """The name of the way that is so many days late."""
    return f"{days} day{'s' if days > 1 else ''} late"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run."""

    stream: SyntheticStream = STREAM
    """Its seed is that of the run."""

    first_days: int = 4
    """Days before the first one that is evaluated."""

    delays: tuple[int, ...] = (1, 2, 4)
    """Days between the last one that a late model has seen and the one that it predicts."""

    seeds: int = 5

    def __post_init__(self) -> None:
        """Raises ValueError where there is nothing to compare."""
        if not 2 <= self.seeds <= SEEDS_MAX:
            raise ValueError(f"{self.seeds} seeds; allowed: 2 to {SEEDS_MAX}")
        most = self.stream.days - 1 - self.first_days
        if self.first_days < 1 or not self.delays or not all(1 <= delay <= most for delay in self.delays):
            raise ValueError(
                f"{self.first_days} first days and delays of {self.delays} of {self.stream.days} days; allowed: 1 or "
                f"more first days, and delays of 1 day or more that leave a day to evaluate"
            )

    @property
    def windows(self) -> range:
        """The days that are evaluated. On the one before, a model that is left has not been left yet."""
        return range(self.first_days + 1, self.stream.days)

    @property
    def late_windows(self) -> range:
        """The days for which there is a model of each delay."""
        return range(self.first_days + max(self.delays), self.stream.days)


@dataclass(frozen=True, kw_only=True)
class Run:
    """All ways with one seed: NE of each day that is evaluated."""

    attainable: list[dict[str, float]]
    """Of each of these days, as `Attainable`."""

    entropies: dict[str, list[float]]
    """By way, and by forecaster."""

    late: dict[str, list[float]]
    """NE of each of the later days, by delay."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The runs of all seeds."""

    settings: Settings
    machine: dict[str, object]
    load_average: list[float]
    """Over the last minute, when the first run began and when the last one ended. No figure here is a time."""

    runs: list[Run]

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Report:
        given, stream = found["settings"], found["settings"]["stream"]
        settings = Settings(
            stream=SyntheticStream(**{**stream, "living": tuple(stream["living"])}),
            first_days=given["first_days"],
            delays=tuple(given["delays"]),
            seeds=given["seeds"],
        )
        runs = [Run(**run) for run in found["runs"]]
        return cls(settings=settings, machine=found["machine"], load_average=found["load_average"], runs=runs)

    def above(self, way: str) -> list[list[float]]:
        """NE above the attainable one, by seed and day."""
        return [
            [ours - best["normalised_entropy"] for ours, best in zip(run.entropies[way], run.attainable, strict=True)]
            for run in self.runs
        ]

    def above_late(self, delay: int) -> list[float]:
        """The mean over the later days, by seed. 0: not late."""
        count, found = len(self.settings.late_windows), []
        for run in self.runs:
            best = [one["normalised_entropy"] for one in run.attainable[-count:]]
            ours = run.late[str(delay)] if delay else run.entropies[IN_ORDER][-count:]
            found.append(statistics.fmean(ours) - statistics.fmean(best))
        return found

    def mean(self, way: str) -> list[float]:
        """NE above the attainable one, the mean over days, by seed."""
        return [statistics.fmean(days) for days in self.above(way)]

    def cost(self, way: str) -> Difference:
        """What the way has more than training in order, paired by seed."""
        return Difference.of(self.mean(way), self.mean(IN_ORDER))

    def cost_late(self, delay: int) -> Difference:
        """What a delay costs."""
        return Difference.of(self.above_late(delay), self.above_late(0))

    def as_json(self) -> dict[str, Any]:
        others = [way for way in self.runs[0].entropies if way != IN_ORDER]
        return {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "load_average": self.load_average,
            "runs": [asdict(run) for run in self.runs],
            "above attainable": {way: statistics.fmean(self.mean(way)) for way in self.runs[0].entropies},
            "minus in order": {way: asdict(self.cost(way)) for way in others}
            | {late(delay): asdict(self.cost_late(delay)) for delay in self.settings.delays},
        }


def run(settings: Settings, tell: Callable[[str, int, int], None] = lambda *_: None) -> Report:
    """Trains all ways, seed by seed, each seed in a process of its own. `tell` hears what begins, how many seeds are
    done, and how many there are. Raises `launch.RankFailure`.
    """
    begun, runs = os.getloadavg()[0], []
    for seed in range(1, settings.seeds + 1):
        tell(f"seed {seed}", seed - 1, settings.seeds)
        seeded = replace(settings, stream=replace(settings.stream, seed=seed))
        runs += launch.run_ranks(run_rank, seeded, 1, timeout_s=TIMEOUT_S)
    load = [begun, os.getloadavg()[0]]
    return Report(settings=settings, machine=machine.describe(), load_average=load, runs=runs)


def run_rank(settings: Settings, rank: int, world_size: int, store: Store) -> Run:
    """What a rank does: all ways on one stream. The result is the same on all of them, and with any number of ranks."""
    with joined(rank, world_size, store, timeout_s=TIMEOUT_S):
        return _run_seed(settings)


def _run_seed(settings: Settings) -> Run:
    stream, planted = settings.stream, Planted(settings.stream)
    days = [Day.read(file) for file in days_of(stream)]
    rows = stream.hashed_rows
    every, few = Vocabulary(rows=rows), Vocabulary.of(days[: settings.first_days], rows)
    samples = [every.samples(day) for day in days]
    entropies, left, delayed = _in_order(settings, samples)
    found = {
        IN_ORDER: entropies,
        SHUFFLED: [
            _shuffled(settings, every.samples(Day.joined(days[:day])), samples[day]) for day in settings.windows
        ],
        NO_NEW_IDS: _in_order(settings, [few.samples(day) for day in days])[0],
        LEFT: left,
    }
    few_rows = tuple(max(count, FEW_MIN) for count in stream.living)
    own = [with_own_ids(day, few_rows) for day in days]
    found |= {way: _in_order(settings, own, rows=few_rows, ids=ids)[0] for way, ids in IDS.items()}
    hashed = [Vocabulary(rows=few_rows).samples(day) for day in days]
    found[HASHED] = _in_order(settings, hashed, rows=few_rows)[0]
    for name, until in ((KNOWS_MIDNIGHT, None), (KNOWS_FIRST, settings.first_days)):
        found[name] = [
            _entropy(planted.forecast(_index(stream, day), DAY_S * (day if until is None else until)), samples[day])
            for day in settings.windows
        ]
    best: list[Attainable] = list(by_day(planted))
    return Run(attainable=[asdict(best[day]) for day in settings.windows], entropies=found, late=delayed)


def _in_order(
    settings: Settings, samples: Sequence[Samples], *, rows: Sequence[int] | None = None, ids: DynamicIds | None = None
) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """NE of days by a model that has trained on all days before; by one that is left; by late ones."""
    rows = settings.stream.hashed_rows if rows is None else rows
    learner = Learner(rows, settings.stream.dense, seed=settings.stream.seed, ids=ids)
    found: list[float] = []
    left: list[float] = []
    delayed: dict[str, list[float]] = {str(delay): [] for delay in settings.delays}
    for day in range(settings.stream.days):
        known: dict[int, float] = {}

        def entropy(window: int, known: dict[int, float] = known) -> float:
            if window not in known:
                known[window] = _entropy(learner.logits(samples[window]), samples[window])
            return known[window]

        if day in settings.windows:
            found.append(entropy(day))
        if day == settings.first_days:
            left = [entropy(window) for window in settings.windows]
        for delay in settings.delays:
            if day + delay in settings.late_windows:
                delayed[str(delay)].append(entropy(day + delay))
        learner.train(samples[day])
    return found, left, delayed


def _shuffled(settings: Settings, before: Samples, window: Samples) -> float:
    """NE by a new model that has trained once on all samples before, in no order."""
    learner = Learner(settings.stream.hashed_rows, settings.stream.dense, seed=settings.stream.seed)
    chance = torch_stream(settings.stream.seed, "drift", "shuffled", len(before))
    learner.train(before, torch.randperm(len(before), generator=chance))
    return _entropy(learner.logits(window), window)


def _index(stream: SyntheticStream, day: int) -> Any:
    return indices(day * stream.rows_per_day, (day + 1) * stream.rows_per_day)


def _entropy(logits: Any, samples: Samples) -> float:
    return quality(torch.as_tensor(logits).numpy(), samples.labels.numpy()).normalised_entropy


def render(report: Report, console: Console) -> None:
    """A line for each way."""
    settings = report.settings
    table = Table(title=f"{settings.stream.days} days, {settings.first_days} at first, seeds 1 to {settings.seeds}")
    for heading in ("", "NE above the attainable", "minus in order"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for way in report.runs[0].entropies:
        table.add_row(way, *texts(report.mean(way), None if way == IN_ORDER else report.cost(way)))
    for delay in settings.delays:
        table.add_row(late(delay), *texts(report.above_late(delay), report.cost_late(delay)))
    console.print(table)


def texts(values: Sequence[float], cost: Difference | None) -> list[str]:
    """A mean and a difference with their intervals of 95 %, in words."""
    mean = f"{statistics.fmean(values):.4f} ± {interval_half(values):.4f}"
    return [mean, "" if cost is None else f"{cost.mean:+.4f} ± {cost.half:.4f}"]
