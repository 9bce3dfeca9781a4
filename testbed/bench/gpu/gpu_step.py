# SPDX-License-Identifier: Apache-2.0
"""Part of `sennit bench gpu`: training steps of a torch model, all of it on the device.

`ShardedEmbeddingBags`, table-wise, and layers as `SlicedReplicas` with a slice a rank. Before steps are timed, some are
taken on a copy of the model, and both must have the same bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.runtime.backend.process_group import load_extension
from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import Features, ShardedEmbeddingBags, Table
from sennit.runtime.training import launch
from sennit.testbed.bench.gpu.gpu_staging import TIMEOUT_S, device_of
from sennit.testbed.bench.tables.embedding_cuda import call_ms

if TYPE_CHECKING:
    from sennit.testbed.bench.gpu.gpu import Settings

CHECKED_STEPS: Final = 2


@dataclass(frozen=True, kw_only=True)
class Load:
    """The model, and the batch of a rank."""

    tables: int = 26
    rows: int = 1_000_000
    dim: int = 64
    pooling: int = 20
    samples: int = 4_096
    hidden: int = 512


SMALL: Final = Load(tables=2, rows=40, dim=8, pooling=2, samples=8, hidden=8)
"""The model and the batch without a GPU."""


class Layers(nn.Module):
    """Vectors of all tables side by side [B, n], labels [B] -> mean loss."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(load.tables * load.dim, load.hidden), nn.ReLU(), nn.Linear(load.hidden, 1)
        )

    def forward(self, vectors: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.layers(vectors).squeeze(1), labels)


class Model:
    """Tables and layers on a device, and their steps."""

    def __init__(self, load: Load, settings: Settings, device: torch.device) -> None:
        self.embeddings = ShardedEmbeddingBags(
            [
                Table(
                    name=str(number),
                    rows=load.rows,
                    dim=load.dim,
                    optimizer=OptimizerSpec(kind=Optimizer.ROW_WISE_ADAGRAD),
                )
                for number in range(load.tables)
            ],
            lr=0.05,
            seed=settings.seed,
            slices=settings.world,
            gradients="sum",
            implementation_name="triton",
            device=device,
        )
        torch.manual_seed(settings.seed)
        self.replicas = SlicedReplicas(Layers(load).to(device), slices=settings.world)
        self.optimizer = torch.optim.SGD(self.replicas.parameters(), lr=0.01)

    def step(self, features: Features, labels: Tensor) -> None:
        vectors = torch.cat(list(self.embeddings(features).values()), 1)
        losses = self.replicas(vectors, labels)
        self.optimizer.zero_grad()
        torch.autograd.backward(self.replicas.loss(losses))
        self.optimizer.step()

    def digests(self) -> tuple[str, str]:
        """SHA-256 of tables and layers."""
        return self.embeddings.digest(), self.replicas.digest()


def run(settings: Settings, _: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Times of the slowest rank. Raises `launch.RankFailure`, also if two runs have other bits."""
    load = SMALL if settings.interpreter else Load()
    by_rank = launch.run_ranks(_rank, settings, settings.world, timeout_s=TIMEOUT_S)
    one: dict[str, Any] = {"name": f"{settings.world} ranks, {load.samples:,} samples each", "digests": by_rank[0][0]}
    if not settings.interpreter:
        one["ms"] = max(ms for _, ms in by_rank)
        one["samples_per_s"] = settings.world * load.samples / (one["ms"] * 1e-3)
    return {"load": asdict(load), "results": [one]}


def _rank(settings: Settings, rank: int, world: int, store: Store) -> tuple[tuple[str, str], float]:
    torch.set_num_threads(1)
    device, load = device_of(settings, rank), SMALL if settings.interpreter else Load()
    dist.init_process_group("sennit", store=store, rank=rank, world_size=world)
    before = load_extension().stand_in.set_active(settings.interpreter)
    try:
        generator = torch_stream(settings.seed, "bench gpu", rank)
        features = Features(
            lengths=torch.full((load.tables, load.samples), load.pooling, dtype=torch.int32),
            values=torch.randint(load.rows, (load.tables * load.samples * load.pooling,), generator=generator),
        )
        labels = torch.randint(2, (load.samples,), generator=generator).float().to(device)
        bits = []
        for _ in range(2):
            model = Model(load, settings, device)
            for _ in range(CHECKED_STEPS):
                model.step(features, labels)
            bits.append(model.digests())
        if bits[0] != bits[1]:
            raise RuntimeError(f"{CHECKED_STEPS} steps from the same model gave different bits")
        ms = 0.0
        if not settings.interpreter:
            ms = statistics.median(call_ms(lambda: model.step(features, labels), settings.rounds))
        return bits[0], ms
    finally:
        load_extension().stand_in.set_active(before)
        dist.destroy_process_group()
