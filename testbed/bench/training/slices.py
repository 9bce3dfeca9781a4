# SPDX-License-Identifier: Apache-2.0
"""`sennit bench slices`: what it costs that the dense part's bits do not depend on the number of ranks.

The dense part of a DLRM with the MLPs of Naumov et al. 2019, forward, backward and SGD, on given embedding vectors.
`SlicedReplicas` with V slices, the same with one slice a rank, and torch's DDP take turns, step by step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table as Lines
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.calibrate import machine
from sennit.runtime.model.dlrm import DLRM
from sennit.runtime.model.inputs import ModelInputs
from sennit.runtime.replicas import Along, SlicedReplicas
from sennit.runtime.sharded import Table
from sennit.runtime.training import launch
from sennit.testbed.bench.ratios import spread
from sennit.testbed.bench.training.turns import joined, slowest

OURS: Final = "slices"
PEERS: Final = ("one slice a rank", "ddp")
DENSE_COUNT, TABLES, WIDTH = 13, 26, 64
BOTTOM: Final = (512, 256)
TOP: Final = (512, 512, 256)
WARM_STEPS: Final = 3
TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run."""

    world: int = 2
    """Ranks, all on this machine, a power of two."""

    slices: int = 8
    local_batch: int = 1_024
    rounds: int = 25
    """Timed steps of each."""

    def __post_init__(self) -> None:
        """Raises ValueError unless ranks, slices and samples divide each other."""
        if self.slices % self.world or self.local_batch * self.world % self.slices:
            raise ValueError(
                f"{self.world} ranks, {self.slices} slices, {self.local_batch * self.world} samples in all; allowed: "
                "each divides the next"
            )


@dataclass(frozen=True, kw_only=True)
class Report:
    """Seconds of each step of the slowest rank, by peer."""

    settings: Settings
    machine: dict[str, object]
    seconds: dict[str, list[float]]

    def ratio(self, peer: str) -> float:
        """The median over rounds of sliced / peer: what slices cost."""
        pairs = zip(self.seconds[OURS], self.seconds[peer], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    def as_json(self) -> dict[str, Any]:
        ratios = {peer: self.ratio(peer) for peer in PEERS}
        return {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "seconds": self.seconds,
            "slices / peer": ratios,
        }


class WithLoss(nn.Module):
    """dense [B, 13], a vector [B, width] of each table, labels [B] -> mean loss."""

    def __init__(self, tables: int = TABLES, width: int = WIDTH) -> None:
        super().__init__()
        self.inputs = ModelInputs(
            dense_count=DENSE_COUNT,
            tables=tuple(Table(name=str(number), rows=1, dim=width) for number in range(tables)),
            bottom=BOTTOM,
            top=TOP,
            seed=1,
        )
        self.dense = DLRM(self.inputs)

    def forward(self, dense: Tensor, vectors: Iterable[Tensor], labels: Tensor) -> Tensor:
        logits = self.dense(dense, dict(zip(self.inputs.names, vectors, strict=True)))
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def run(settings: Settings) -> Report:
    """Raises `launch.RankFailure` if a rank fails, or if the three disagree."""
    by_rank = launch.run_ranks(_take_turns, settings, settings.world, timeout_s=TIMEOUT_S)
    return Report(settings=settings, machine=machine.describe(), seconds=slowest(by_rank))


def _take_turns(settings: Settings, rank: int, world: int, store: Store) -> dict[str, list[float]]:
    with joined(rank, world, store, timeout_s=TIMEOUT_S):
        generator = torch.Generator().manual_seed(rank)
        batch = settings.local_batch
        dense = torch.randn(batch, DENSE_COUNT, generator=generator)
        vectors = torch.randn(TABLES, batch, WIDTH, generator=generator).requires_grad_()
        labels = torch.randint(2, (batch,), generator=generator).float()

        def sliced(slices: int) -> tuple[nn.Module, Callable[[], Tensor]]:
            replicas = SlicedReplicas(WithLoss(), slices=slices)
            return replicas.module, lambda: replicas.loss(replicas(dense, Along(vectors, 1), labels))

        ddp = DistributedDataParallel(WithLoss())
        steps: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {
            OURS: sliced(settings.slices),
            PEERS[0]: sliced(world),
            PEERS[1]: (ddp.module, lambda: ddp(dense, vectors, labels)),
        }
        optimizers = {peer: torch.optim.SGD(module.parameters(), lr=0.01) for peer, (module, _) in steps.items()}
        seconds: dict[str, list[float]] = {peer: [] for peer in steps}
        for number in range(WARM_STEPS + settings.rounds):
            for peer, (_, loss) in steps.items():
                optimizers[peer].zero_grad()
                vectors.grad = None
                dist.barrier()
                start = time.perf_counter()
                torch.autograd.backward(loss())
                optimizers[peer].step()
                if number >= WARM_STEPS:
                    seconds[peer].append(time.perf_counter() - start)
        for module, _ in steps.values():
            for ours, theirs in zip(module.parameters(), ddp.module.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    return seconds


def render(report: Report, console: Console) -> None:
    """One line per peer."""
    settings = report.settings
    table = Lines(
        title=f"dense step, {settings.slices} slices on {settings.world} ranks, local batch {settings.local_batch:,}, "
        f"{settings.rounds} rounds"
    )
    for heading in ("", "slices / peer", "step  (p10 – p90)"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for peer, seconds in report.seconds.items():
        table.add_row(peer, f"{report.ratio(peer):.3f}", spread(seconds))
    console.print(table)
