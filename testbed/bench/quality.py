# SPDX-License-Identifier: Apache-2.0
"""`sennit bench quality`: what a way to train costs in quality.

Every way trains the same model on the same data with the same seeds: seed by seed, so that the luck of a seed drops out
of the difference (a paired comparison). The differences have an interval of 95 % by Student's t.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from sennit.runtime.data import sources
from sennit.runtime.data.batch_source import prepared
from sennit.runtime.data.sources import Source
from sennit.runtime.training.config import TrainingConfig
from sennit.testbed.bench import machine, parameter_server, plain_torch
from sennit.transport.errors import SennitError

FP32: Final = "fp32"
PLAIN: Final = "plain torch"
ASYNCHRONOUS: Final = "parameter server"
# Of the asynchronous way: small batches, as there.
ASYNCHRONOUS_BATCH, WORKERS = 256, 4
SAME_TIME: Final = ", same time"
DEADLINE_S: Final = 1800.0
# Of 1, 2, ... degrees of freedom: the quantile 0.975 of Student's t.
T_975: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145)
SEEDS_MAX: Final = len(T_975) + 1
HALF_PRECISION: Final = '[defaults]\nprecision = "{}"\nrounding = "stochastic"\n'

WAYS: Final[Mapping[str, Sequence[str]]] = {
    FP32: (),
    PLAIN: (),
    ASYNCHRONOUS: (),
    "exchange bf16": ("--exchange", "bf16"),
    "exchange fp8": ("--exchange", "fp8"),
    "exchange int8": ("--exchange", "int8"),
    "exchange and gradient int8": ("--exchange", "int8", "--gradient", "int8"),
    "tables fp16": ("--tables", "fp16"),
    "tables bf16": ("--tables", "bf16"),
}
"""Options of `sennit train` by the name of a way. `--tables` names a precision here. Two ways are other programs."""

BATCH_SIZES: Final = (256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run."""

    data: str = "flights"
    seeds: int = 5
    """Runs of each way, with the seeds 1, 2, ..."""

    epochs: int = 1
    ranks: int = 2
    batch_sizes: tuple[int, ...] = ()
    """Also these, in fp32. Rates grow with the square root of the batch size, as AdaGrad's noise does."""

    warmup: float = 0.0
    """The share of the steps of `batch_sizes` in which rates rise."""

    equal_time: bool = False
    """Each of `batch_sizes` also for as long as the parameter server took, and its best epoch: "batch N, same time"."""

    only: tuple[str, ...] = tuple(WAYS)
    base: str = FP32
    """The way that others are compared with."""

    def __post_init__(self) -> None:
        """Raises ValueError for ways that do not exist, and numbers of seeds without an interval."""
        known = (*WAYS, *map(batch_way, self.batch_sizes))
        if self.base not in known:
            raise ValueError(f"base {self.base!r}; allowed: {', '.join(known)}")
        for way in self.only:
            if way not in WAYS:
                raise ValueError(f"way {way!r}; allowed: {', '.join(WAYS)}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"a warm-up of {self.warmup:g} of the steps; allowed: 0 to below 1")
        if self.equal_time and (not self.batch_sizes or ASYNCHRONOUS not in (self.base, *self.only)):
            raise ValueError(f"the same time without batch sizes and {ASYNCHRONOUS!r}; allowed: with both")
        if not 2 <= self.seeds <= SEEDS_MAX:
            raise ValueError(f"{self.seeds} seeds; allowed: 2 to {SEEDS_MAX}")

    @property
    def ways(self) -> tuple[str, ...]:
        """All of them, the base first."""
        sizes = list(map(batch_way, self.batch_sizes))
        longer = [f"{way}{SAME_TIME}" for way in sizes] if self.equal_time else []
        return tuple(dict.fromkeys((self.base, *self.only, *sizes, *longer)))


def batch_way(size: int) -> str:
    return f"batch {size:,}"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One run."""

    quality: dict[str, float]
    seconds: float | None = None
    """Of training, without loading data and evaluation; None: not measured."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Of a metric, this way minus the base: the mean over seeds, and half of its interval of 95 %."""

    mean: float
    half: float

    @classmethod
    def of(cls, way: Sequence[float], base: Sequence[float]) -> Difference:
        apart = [ours - theirs for ours, theirs in zip(way, base, strict=True)]
        half = T_975[len(apart) - 2] * statistics.stdev(apart) / math.sqrt(len(apart))
        return cls(mean=statistics.fmean(apart), half=half)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The quality of each run, by way and in the order of seeds."""

    settings: Settings
    machine: dict[str, object]
    qualities: dict[str, list[dict[str, float]]]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of training, by way and seed."""

    def values(self, way: str, metric: str) -> list[float]:
        return [found[metric] for found in self.qualities[way]]

    def difference(self, way: str, metric: str) -> Difference:
        return Difference.of(self.values(way, metric), self.values(self.settings.base, metric))

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
            "minus base": {
                way: {metric: asdict(self.difference(way, metric)) for metric in ("normalised_entropy", "auc")}
                for way in self.others
            },
        }


def run(settings: Settings, tell: Callable[[str, int, int], None] = lambda *_: None) -> Report:
    """Trains all of them, one after another. `tell` hears what begins, how many runs are done, and how many in all."""
    found: dict[str, list[Trained]] = {way: [] for way in settings.ways}
    total = len(found) * settings.seeds
    for seed in range(1, settings.seeds + 1):
        for number, (way, runs) in enumerate(found.items()):
            tell(f"seed {seed}: {way}", (seed - 1) * len(found) + number, total)
            epochs = settings.epochs
            if way.endswith(SAME_TIME):
                theirs, ours = found[ASYNCHRONOUS][-1].seconds, found[way.removesuffix(SAME_TIME)][-1].seconds
                assert theirs is not None
                assert ours is not None
                epochs = max(epochs, int(epochs * theirs / ours))
            runs.append(_train(replace(settings, epochs=epochs), way, seed))
    return Report(
        settings=settings,
        machine=machine.describe(),
        qualities={way: [one.quality for one in runs] for way, runs in found.items()},
        seconds={
            way: [one.seconds for one in runs if one.seconds is not None]
            for way, runs in found.items()
            if runs[0].seconds is not None
        },
    )


def _train(settings: Settings, way: str, seed: int) -> Trained:
    config = TrainingConfig(source=Source(data=settings.data), seed=seed, epochs=settings.epochs)
    if way == PLAIN:
        return Trained(quality=asdict(plain_torch.train(config)))
    if way == ASYNCHRONOUS:
        rates = _rates(ASYNCHRONOUS_BATCH)
        small = replace(config, batch_size=ASYNCHRONOUS_BATCH, sparse_rate=rates[0], dense_rate=rates[1])
        outcome = parameter_server.train(small, WORKERS)
        return Trained(quality=asdict(outcome.quality), seconds=outcome.seconds)
    return _ours(settings, way, seed)


def _ours(settings: Settings, way: str, seed: int) -> Trained:
    """`sennit train` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        options = list(WAYS.get(way, ()))
        if "--tables" in options:
            place = options.index("--tables") + 1
            tables = Path(folder) / "tables.toml"
            tables.write_text(HALF_PRECISION.format(options[place]))
            options[place] = str(tables)
        for size in settings.batch_sizes:
            if way.removesuffix(SAME_TIME) == batch_way(size):
                options += [*batch_options(size), *_warmup(settings, size, seed)]
        report = Path(folder) / "report.json"
        common = ["--data", settings.data, "--seed", str(seed), "--epochs", str(settings.epochs)]
        ranks = ["--ranks", str(settings.ranks), "--json", str(report)]
        ended = subprocess.run(
            [sys.executable, "-m", "sennit", "train", *common, *ranks, *options],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        if ended.returncode:
            raise SennitError(f"sennit train ({way}, seed {seed}) failed: {ended.stderr.strip()[-500:]}")
        told = json.loads(report.read_text())
        quality = told["best"]["quality"] if way.endswith(SAME_TIME) else told["quality"]
        return Trained(quality=quality, seconds=told["train_s"])


def _warmup(settings: Settings, size: int, seed: int) -> list[str]:
    """The option of `sennit train`, whose warm-up is in steps."""
    if not settings.warmup:
        return []
    config = TrainingConfig(source=Source(data=settings.data), seed=seed, epochs=settings.epochs, batch_size=size)
    data = prepared(sources.load(config.source, seed=seed), config.order_settings)
    return ["--warmup", str(round(settings.warmup * data.order.step_count))]


def batch_options(size: int) -> list[str]:
    """Of `sennit train`: this batch size, and rates that grow with its square root."""
    sparse, dense = _rates(size)
    return ["--batch-size", str(size), "--sparse-rate", str(sparse), "--dense-rate", str(dense)]


def _rates(size: int) -> tuple[float, float]:
    default = TrainingConfig()
    factor = math.sqrt(size / default.batch_size)
    return default.sparse_rate * factor, default.dense_rate * factor


def render(report: Report, console: Console) -> None:
    """A line for each way: means, and differences from the base with their intervals."""
    settings = report.settings
    table = Table(
        title=f"{settings.data}, {settings.epochs} epochs, seeds 1 to {settings.seeds}, {settings.ranks} ranks"
    )
    for name in ("way", "NE", f"NE - {settings.base}", "AUC", f"AUC - {settings.base}", "seconds"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for way in report.qualities:
        cells = [way]
        for metric in ("normalised_entropy", "auc"):
            cells.append(f"{statistics.fmean(report.values(way, metric)):.5f}")
            apart = report.difference(way, metric)
            cells.append("" if way == settings.base else f"{apart.mean:+.5f} ± {apart.half:.5f}")
        table.add_row(*cells, f"{statistics.fmean(report.seconds[way]):.1f}" if way in report.seconds else "")
    console.print(table)


def plot(report: Report, path: Path) -> None:
    """Differences of normalised entropy from the base with their intervals, as a picture."""
    import matplotlib.pyplot as plt

    ways = report.others
    apart = [report.difference(way, "normalised_entropy") for way in ways]
    figure, axes = plt.subplots(figsize=(7.5, 0.9 + 0.36 * len(ways)), layout="constrained")
    axes.axvline(0, color="#888888", linewidth=1)
    axes.errorbar(
        [one.mean for one in apart],
        range(len(ways)),
        xerr=[one.half for one in apart],
        fmt="o",
        color="#0072B2",
        capsize=3,
    )
    axes.set_yticks(range(len(ways)), ways)
    axes.invert_yaxis()
    axes.set_xlabel(f"normalised entropy minus that of {report.settings.base}, and interval of 95 % (less is better)")
    axes.set_title(f"{report.settings.data}, {report.settings.epochs} epochs, {report.settings.seeds} seeds")
    figure.savefig(path)
    plt.close(figure)
