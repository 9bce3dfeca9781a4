# SPDX-License-Identifier: Apache-2.0
"""`sennit bench sharded`: a training step of a user's model on sharded tables, by placement, beside TorchRec.

A DLRM (Naumov et al. 2019) with 26 tables. Dense part: `SlicedReplicas` here, DDP there. All take turns, step by step,
in the same processes, on the same batches, from the same initial weights; their losses are compared at the end.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table as Lines
from torch import Tensor, nn

from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.calibrate import machine
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import Features, ShardedEmbeddingBags, Table
from sennit.runtime.training import launch
from sennit.testbed.bench.ratios import spread
from sennit.testbed.bench.training import slices
from sennit.testbed.bench.training.sharded_torchrec import torchrec_step
from sennit.testbed.bench.training.turns import joined, slowest
from sennit.transport.errors import Unsupported

RATE: Final = 0.01
TIMEOUT_S: Final = 600.0
SHARDINGS: Final = ("table_wise", "row_wise", "column_wise", "grid", "data_parallel")
TORCHREC: Final = "torchrec"

Step = Callable[[Tensor, Features, Tensor], float]
"""(dense [B, 13], ids, labels [B]) -> the loss of this rank's samples, after a whole step."""


@dataclass(frozen=True, kw_only=True)
class Settings(slices.Settings):
    """What to run: the dense step of `sennit bench slices`, with tables."""

    tables: int = slices.TABLES
    rows: int = 100_000
    dim: int = slices.WIDTH
    pooling: int = 20
    """Ids of each bag."""

    zipf: float | None = None
    """The exponent of the ids' distribution; None: uniform."""

    rounds: int = 15


@dataclass(frozen=True, kw_only=True)
class Report:
    """Seconds of each step of the slowest rank, by peer."""

    settings: Settings
    machine: dict[str, object]
    seconds: dict[str, list[float]]
    absent: str | None
    """Why TorchRec did not run."""

    def ratio(self, peer: str) -> float:
        """The median over rounds of peer / table-wise: above 1, the peer is slower."""
        pairs = zip(self.seconds[peer], self.seconds[SHARDINGS[0]], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    def samples_per_second(self, peer: str) -> float:
        return self.settings.world * self.settings.local_batch / statistics.median(self.seconds[peer])

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "seconds": self.seconds,
            "peer / table_wise": {peer: self.ratio(peer) for peer in self.seconds},
            "samples per second": {peer: self.samples_per_second(peer) for peer in self.seconds},
            "absent": {} if self.absent is None else {TORCHREC: self.absent},
        }


class Dense(nn.Module):
    """The dense part of a user's model, with its loss. Takes a vector of each table."""

    def __init__(self, tables: int, dim: int) -> None:
        super().__init__()
        self.model = slices.WithLoss(tables, dim)

    def forward(self, dense: Tensor, labels: Tensor, *vectors: Tensor) -> Tensor:
        loss: Tensor = self.model(dense, vectors, labels)
        return loss


def run(settings: Settings) -> Report:
    """Raises `launch.RankFailure` if a rank fails, or if peers disagree."""
    by_rank = launch.run_ranks(_take_turns, settings, settings.world, timeout_s=TIMEOUT_S)
    seconds, absent = slowest([rank[0] for rank in by_rank]), by_rank[0][1]
    return Report(settings=settings, machine=machine.describe(), seconds=seconds, absent=absent)


def _take_turns(settings: Settings, rank: int, world: int, store: Store) -> tuple[dict[str, list[float]], str | None]:
    with joined(rank, world, store, timeout_s=TIMEOUT_S, backend="cpu:sennit"):
        steps: dict[str, Step] = {sharding: _our_step(settings, sharding) for sharding in SHARDINGS}
        absent = None
        try:
            tables = _tables(settings, SHARDINGS[0])
            steps[TORCHREC] = torchrec_step(tables, Dense(settings.tables, settings.dim), rate=RATE)
        except Unsupported as missing:
            absent = str(missing)
        generator = torch.Generator().manual_seed(rank)
        seconds: dict[str, list[float]] = {peer: [] for peer in steps}
        for number in range(slices.WARM_STEPS + settings.rounds):
            batch = _batch(settings, generator)
            losses = {}
            for peer, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                losses[peer] = step(*batch)
                if number >= slices.WARM_STEPS:
                    seconds[peer].append(time.perf_counter() - start)
            # Column shards have their own optimizer states, so their weights differ a little after the first step.
            expected = losses[SHARDINGS[0]]
            for peer, loss in losses.items():
                if abs(loss - expected) > (0.05 if number else 1e-5) * abs(expected):
                    raise AssertionError(f"step {number}: the loss of {peer} is {loss}, of {SHARDINGS[0]} {expected}")
    return seconds, absent


def _tables(settings: Settings, sharding: str) -> list[Table]:
    world = settings.world
    cut = {"row_wise": (world, 1), "column_wise": (1, world), "grid": (world, 2)}.get(sharding, (1, 1))
    return [
        Table(name=f"t{number}", rows=settings.rows, dim=settings.dim, row_shards=cut[0], column_shards=cut[1])
        for number in range(settings.tables)
    ]


def _our_step(settings: Settings, sharding: str) -> Step:
    tables = ShardedEmbeddingBags(
        _tables(settings, sharding), lr=RATE, placement=sharding, slices=settings.slices, gradients="sum"
    )
    replicas = SlicedReplicas(Dense(settings.tables, settings.dim), slices=settings.slices)
    optimizer = torch.optim.Adagrad(replicas.parameters(), lr=RATE, foreach=False)

    def step(dense: Tensor, features: Features, labels: Tensor) -> float:
        losses = replicas(dense, labels, *tables(features).values())
        optimizer.zero_grad()
        torch.autograd.backward(replicas.loss(losses))
        optimizer.step()
        return float(losses.mean())

    return step


def _batch(settings: Settings, generator: torch.Generator) -> tuple[Tensor, Features, Tensor]:
    batch, bags = settings.local_batch, settings.tables * settings.local_batch
    count = bags * settings.pooling
    if settings.zipf is None:
        values = torch.randint(settings.rows, (count,), generator=generator)
    else:
        weights = torch.arange(1, settings.rows + 1, dtype=torch.float64) ** -settings.zipf
        places = torch.cumsum(weights, 0) / weights.sum()
        values = torch.searchsorted(places, torch.rand(count, generator=generator, dtype=torch.float64))
        # The hot rows are not neighbours, as hashed ids are not.
        values = values.clamp(max=settings.rows - 1) * 48_271 % settings.rows
    lengths = torch.full((settings.tables, batch), settings.pooling, dtype=torch.int32)
    dense = torch.randn(batch, slices.DENSE_COUNT, generator=generator)
    labels = torch.randint(2, (batch,), generator=generator).float()
    return dense, Features(lengths=lengths, values=values), labels


def render(report: Report, console: Console) -> None:
    """One line per peer."""
    settings = report.settings
    lines = Lines(
        title=f"step on {settings.world} ranks, {settings.tables} tables of {settings.rows:,} x {settings.dim}, "
        f"{settings.pooling} ids a bag, local batch {settings.local_batch:,}, {settings.rounds} rounds"
    )
    for heading in ("", "time / table_wise", "samples/s", "step  (p10 – p90)"):
        lines.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for peer, seconds in report.seconds.items():
        lines.add_row(peer, f"{report.ratio(peer):.2f}", f"{report.samples_per_second(peer):,.0f}", spread(seconds))
    console.print(lines)
    if report.absent is not None:
        console.print(f"torchrec did not run: {report.absent}")
