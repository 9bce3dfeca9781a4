# SPDX-License-Identifier: Apache-2.0
"""The result of a training run: one record, printed for people and written as JSON for programs."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sennit.offload.admission import Verdict
from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.runtime.sharded.tables import Table as EmbeddingTable
from sennit.runtime.sharded.tables import shard_spec, shards_of
from sennit.runtime.telemetry import process_cost
from sennit.runtime.telemetry.process_cost import Cost
from sennit.runtime.training import overlap
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.left_out import LeftOutSamples
from sennit.runtime.training.metrics import Evaluation, Quality
from sennit.runtime.training.rebalance import Move

VERDICTS = tuple(verdict.name.lower() for verdict in Verdict)
# Phases in which no samples are trained on. They are reported separately.
NOT_TRAINING = ("evaluation", "checkpoint", "rebalance")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """One rank's part of the report."""

    tables: list[str]
    """Names of the tables of which it holds a shard."""

    phases_s: dict[str, float]
    """Seconds in each phase of this process."""

    beside_s: dict[str, float]
    """Seconds of the threads beside the step, by phase."""

    counters: dict[str, int]
    """The backend's counters over the run; empty if the backend has none."""

    cost: Cost
    """Cost of this process over the run: training, evaluations and checkpoints."""

    ingest: dict[str, int | float] = field(default_factory=dict)
    """Counters of samples from feeders; empty if samples are in memory."""

    rows: dict[str, int] = field(default_factory=dict)
    """Counters of the row cache and of its file; empty if tables are in memory."""

    ids: dict[str, dict[str, int]] = field(default_factory=dict)
    """Counters of this rank's shards of each dynamic table (`ShardedTables.id_counters`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change of the ranks of an elastic run: ranks were lost, or joined."""

    lost: list[int]
    """Lost ranks, with their numbers before the change."""

    joined: list[int]
    """New ranks, with their numbers after the change."""

    world_size: int
    """The number of ranks after the change."""

    reason: str
    """The transport's reason; empty if no rank was lost."""

    step: int | None = None
    """The step at which training went on; None until it is known.

    If no rank was lost, this is the step of the change, else that of the last checkpoint, or 0.
    """

    def __str__(self) -> str:
        what = [f"lost {_ranks(self.lost)}"] if self.lost else []
        what += [f"took in {_ranks(self.joined)}"] if self.joined else []
        # The newcomer died before it was taken in.
        text = " and ".join(what or ["nobody came"]) + f", went on with {self.world_size}"
        if self.step is not None:
            text += f" from step {self.step + 1}"
        return f"{text}: {self.reason}" if self.reason else text


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSize:
    """The number of parameters in the embedding tables of a run, over all ranks, without optimizer states."""

    tables: int
    tensor_trains: int
    """The parameters of these tables."""

    table_numbers: int
    """Rows times columns of all tables."""

    stored_numbers: int
    """Stored parameters: fewer if tables are tensor trains."""

    @classmethod
    def of(cls, model: Sequence[EmbeddingTable]) -> EmbeddingSize:
        specs = [shard_spec(model, shard) for shard in shards_of(model)]
        trains = [spec for spec in specs if isinstance(spec, TensorTrainSpec)]
        whole = sum(table.rows * table.dim for table in model)
        saved = sum(train.row_count * train.dim - train.parameter_count for train in trains)
        return cls(tables=len(model), tensor_trains=len(trains), table_numbers=whole, stored_numbers=whole - saved)

    def __str__(self) -> str:
        text = f"{self.tables} tables, {self.table_numbers:,} numbers"
        if not self.tensor_trains:
            return text
        trains = "tensor train" if self.tensor_trains == 1 else "tensor trains"
        ratio = self.table_numbers / self.stored_numbers
        return f"{text}; {self.stored_numbers:,} stored ({ratio:.1f} times fewer): {self.tensor_trains} {trains}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """The report of a finished run."""

    config: TrainingConfig
    ranks: list[RankReport]
    sample_count: int
    """Samples trained on by this process's run, over all ranks. A resumed run does not count earlier samples."""

    first_step: int
    step: int
    run_s: float
    """Wall-clock time of the loop on this rank: training, evaluations, checkpoints."""

    final_loss: float | None
    """Rank 0's loss in the last step."""

    quality: Quality
    """On the evaluation rows, by the weights at the end."""

    run_id: str
    """The run's id, as in the manifests of its checkpoints. A resumed run keeps it."""

    weights_sha256: str
    embedding: EmbeddingSize
    data: str
    """Name of the data set."""

    validation: Quality | None = None
    """The same on the validation rows, if there are any."""

    labels: dict[str, Quality] = field(default_factory=dict)
    """The quality by label, if samples have several. `quality` is of the first."""

    windows: list[Evaluation] = field(default_factory=list)
    """All evaluations, if each is of another window of time."""

    best: Evaluation | None = None
    """The best evaluation (`TrainingConfig.best_by`)."""

    best_text: str = ""
    """The best evaluation in words; empty if it was the last one."""

    changes: list[Change] = field(default_factory=list)
    """The changes of an elastic run, in order."""

    looks: int = 0
    """How often the run looked whether shards should move (`--rebalance`)."""

    moves: list[Move] = field(default_factory=list)
    """Moves of shards, in order."""

    left_out: LeftOutSamples = field(default_factory=LeftOutSamples)
    """Samples that this run's steps left out, since its ranks last changed (`--skip-samples`)."""

    predicted_step_s: float | None = None
    """Predicted seconds of a step, if the run planned its placement."""

    @property
    def order(self) -> str:
        """In which order the samples came, in words."""
        return f"order: {self.config.stream.order}"

    @property
    def steps(self) -> str:
        """The steps of this run, in words. One that resumes where it had ended has none."""
        if self.step == self.first_step:
            return f"none: all {self.step} were taken before"
        return f"{self.first_step + 1} to {self.step}, {self.config.batch_size:,} samples each"

    @property
    def step_s(self) -> float:
        """The mean of a step."""
        return self.train_s / max(1, self.step - self.first_step)

    @property
    def train_s(self) -> float:
        """Seconds of training, without evaluations and checkpoints."""
        return self.run_s - sum(self.ranks[0].phases_s.get(name, 0.0) for name in NOT_TRAINING)

    @property
    def samples_per_s(self) -> float:
        return self.sample_count / self.train_s if self.train_s else 0.0

    def phases_s(self) -> dict[str, float]:
        """Seconds by phase: the mean over ranks, longest first."""
        return _mean([rank.phases_s for rank in self.ranks])

    def beside_s(self) -> dict[str, float]:
        """The same of the threads beside the step."""
        return _mean([rank.beside_s for rank in self.ranks])

    def bytes_moved(self) -> dict[str, int]:
        """The counters that count bytes (by their names), summed over ranks."""
        total: dict[str, int] = {}
        for rank in self.ranks:
            for name, count in rank.counters.items():
                if "bytes" in name and count:
                    total[name] = total.get(name, 0) + count
        return dict(sorted(total.items()))

    def cost(self) -> dict[str, Any]:
        """Processor seconds of all ranks, by role too, and joules of their machines (`process_cost.summary`)."""
        ranks = self.ranks
        return process_cost.summary([rank.cost for rank in ranks], [rank.counters for rank in ranks], self.sample_count)

    def ingest(self) -> dict[str, Any] | None:
        """Ingest counters summed over ranks, and the mean of the seconds waited; None if samples are in memory."""
        if self.config.ingest is None:
            return None
        total: dict[str, float] = {}
        for rank in self.ranks:
            for name, count in rank.ingest.items():
                total[name] = total.get(name, 0) + count
        total["waited_s"] /= len(self.ranks)
        datagrams = {str(verdict): total.pop(str(verdict)) for verdict in VERDICTS}
        return {"target": str(self.config.ingest), "data": self.data, "datagrams": datagrams, **total}

    def rows(self) -> dict[str, int] | None:
        """Row counters summed over ranks; None if all tables are in memory."""
        if self.config.table_store is None:
            return None
        names = {name: None for rank in self.ranks for name in rank.rows}
        return {name: sum(rank.rows.get(name, 0) for rank in self.ranks) for name in names} or None

    def ids(self) -> dict[str, dict[str, int]] | None:
        """Counters of each dynamic table, summed over ranks; None if there is none."""
        found: dict[str, Counter[str]] = {}
        for rank in self.ranks:
            for name, counts in rank.ids.items():
                found.setdefault(name, Counter()).update(counts)
        return {name: dict(found[name]) for name in sorted(found)} or None

    def as_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "config": asdict(self.config),
            "world_size": len(self.ranks),
            "torch": torch.__version__,
            "machine": f"{platform.machine()} {platform.system()}",
            "changes": [asdict(change) for change in self.changes],
            "steps": {"first": self.first_step, "last": self.step},
            "samples": self.sample_count,
            "run_s": self.run_s,
            "train_s": self.train_s,
            "samples_per_s": self.samples_per_s,
            "predicted_step_s": self.predicted_step_s,
            "rebalance": {"looks": self.looks, "moves": [asdict(move) for move in self.moves]},
            "final_loss": self.final_loss,
            "left_out": {"samples": self.left_out.count, "named": [asdict(one) for one in self.left_out.named]},
            "quality": asdict(self.quality),
            "labels": {name: asdict(quality) for name, quality in self.labels.items()},
            "validation": None if self.validation is None else asdict(self.validation),
            "windows": [asdict(one) for one in self.windows],
            "best": None if self.best is None else asdict(self.best),
            "embedding": asdict(self.embedding),
            "phases_s": self.phases_s(),
            "beside_s": self.beside_s(),
            "cost": self.cost(),
            "bytes_moved": self.bytes_moved(),
            "ingest": self.ingest(),
            "rows": self.rows(),
            "ids": self.ids(),
            "ranks": [asdict(rank) for rank in self.ranks],
            "weights_sha256": self.weights_sha256,
        }


def _mean(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean seconds by name, the longest first."""
    names = {name for one in seconds for name in one}
    mean = {name: sum(one.get(name, 0.0) for one in seconds) / len(seconds) for name in names}
    return dict(sorted(mean.items(), key=lambda item: -item[1]))


def render(report: RunReport, console: Console) -> None:
    """The summary of a run."""
    quality = report.quality
    summary = Table(show_header=False, box=None, pad_edge=False)
    summary.add_column(style="bold")
    summary.add_column()
    for name, value in (
        ("data", f"{report.data}, seed {report.config.seed}, {report.order}"),
        ("ranks", f"{len(report.ranks)} over {report.config.backend}"),
        ("steps", report.steps),
        ("embeddings", str(report.embedding)),
        ("speed", f"{report.samples_per_s:,.0f} samples/s, {report.train_s:.1f} s of training"),
        ("AUC", f"{quality.auc:.4f} on {quality.sample_count:,} held-back samples"
         + (f", without {quality.not_finite:,} whose predictions are not finite" if quality.not_finite else "")
         + (f"; not defined: {quality.undefined}" if quality.undefined else "")),
        ("normalised entropy", f"{quality.normalised_entropy:.4f} (log loss {quality.log_loss:.4f}, "
         f"base rate {quality.base_rate:.4f})"),
        ("calibration", f"{quality.calibration:.4f} (predicted positives / observed ones)"),
        ("weights SHA-256", report.weights_sha256),
    ):  # fmt: skip
        summary.add_row(name, value)
    if quality.gauc is not None:
        summary.add_row(f"by {report.config.gauc}", quality.gauc.text())
    for name, one in report.labels.items():
        summary.add_row(name, one.text())
    if report.left_out.count:
        summary.add_row("left out", f"{report.left_out.count:,} samples whose loss was not finite (--skip-samples)")
    if report.validation is not None:
        summary.add_row("validation", report.validation.text())
    for name, value in process_cost.lines(report.cost()):
        summary.add_row(name, value)
    if report.best_text:
        summary.add_row("best", report.best_text)
    if report.predicted_step_s is not None:
        summary.add_row("step", f"{report.step_s * 1e3:.1f} ms, {report.predicted_step_s * 1e3:.1f} ms predicted")
    if report.config.rebalance is not None:
        summary.add_row("shards", f"looked {report.looks} times, moved some {len(report.moves)} times")
    for move in report.moves:
        summary.add_row("moved", str(move))
    if (hidden := overlap.outcome(report.beside_s(), report.phases_s(), report.step - report.first_step)) is not None:
        summary.add_row("overlap", hidden)
    ingest = report.ingest()
    if ingest is not None:
        again = ingest["gaps"] + ingest["silences"]
        text = f"{ingest['records']:,} records, waited {ingest['waited_s']:.1f} s; asked again {again} times"
        summary.add_row("ingest", f"{ingest['target']}: {text}, feeders lost: {ingest['feeders_lost']}")
    rows = report.rows()
    if rows is not None:
        asked = rows["hits"] + rows["misses"]
        text = f"{rows['misses']:,} of {asked:,} were not in memory, {rows['conflicts']:,} found their set full"
        summary.add_row("rows", f"{text}; read {rows['bytes_read'] / 2**20:,.0f} MiB, "
                        f"wrote {rows['bytes_written'] / 2**20:,.0f} MiB")  # fmt: skip
    for name, ids in (report.ids() or {}).items():
        hits = f"{ids['hits'] / max(1, ids['lookups']):.1%} of lookups hit"
        text = f"{ids['admitted']:,} admitted, {ids['evicted']:,} evicted, {ids['expired']:,} expired"
        summary.add_row(f"ids of {name}", f"{ids['used']:,} of {ids['rows']:,} rows, {hits}; {text}; "
                        f"{ids['without_row']:,} lookups of ids without a row")  # fmt: skip
    for change in report.changes:
        summary.add_row("changed", str(change))
    console.print(summary)

    phases = report.phases_s()
    total = sum(phases.values()) or 1.0
    times = Table(title="time by phase, mean over ranks", title_justify="left", box=None, pad_edge=False)
    times.add_column("phase")
    times.add_column("s", justify="right")
    times.add_column("share", justify="right")
    for name, seconds in phases.items():
        times.add_row(name, f"{seconds:.2f}", f"{seconds / total:.0%}")
    console.print(times)

    moved = report.bytes_moved()
    if moved:
        traffic = Table(title="bytes moved, all ranks", title_justify="left", box=None, pad_edge=False)
        traffic.add_column("counter")
        traffic.add_column("MiB", justify="right")
        for name, count in moved.items():
            traffic.add_row(name, f"{count / 2**20:,.2f}")
        console.print(traffic)
    else:
        console.print(f"bytes moved: not counted ({report.config.backend}, world size {len(report.ranks)})")
