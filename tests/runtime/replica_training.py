# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,list-item"
"""A module in `SlicedReplicas`, trained for some steps on every rank."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.runtime.replicas import Along, SlicedReplicas

FEATURES, VECTORS, WIDTH = 13, 5, 16


class Cross(nn.Module):
    """A model like DCNv2: cross layers, an MLP with dropout, embedding vectors [VECTORS, B, WIDTH]; its own loss."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(FEATURES, 40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, WIDTH))
        inputs = (VECTORS + 1) * WIDTH
        self.cross = nn.ModuleList(nn.Linear(inputs, inputs) for _ in range(2))
        self.top = nn.Sequential(nn.Linear(inputs, 51), nn.ReLU(), nn.Dropout(0.1), nn.Linear(51, 1))
        self.reduction = reduction

    def forward(self, dense: Tensor, vectors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.cat((self.bottom(dense).unsqueeze(0), vectors)).transpose(0, 1).flatten(1)
        crossed = first
        for layer in self.cross:
            crossed = first * layer(crossed) + crossed
        logits = self.top(crossed).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction=self.reduction)
        return loss, logits


def batch(step: int, count: int, ids: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    """The global batch of a step: dense features, ids of embedding rows [VECTORS, count], labels."""
    generator = torch.Generator().manual_seed(1000 + step)
    return (
        torch.randn(count, FEATURES, generator=generator),
        torch.randint(ids, (VECTORS, count), generator=generator),
        torch.randint(2, (count,), generator=generator).float(),
    )


def mine(replicas: SlicedReplicas, count: int) -> slice:
    return replicas.slices.own_samples(count)


def digest(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(rank: int, world: int, autocast: str = "", no_sync: bool = False, transport: str = "") -> list[str]:
    """Five steps of Adam with a learning-rate schedule, odd and uneven batches. Returns hashes of all that is left."""
    torch.manual_seed(rank)  # Parameters are those of rank 0.
    if rank == 0:
        torch.manual_seed(5)
    replicas = SlicedReplicas(Cross("sum"), seed=3)
    table = torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(4))
    optimizer = torch.optim.Adam(replicas.parameters(), lr=0.01, weight_decay=0.001)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    kind = getattr(torch, autocast) if autocast else torch.bfloat16
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, enabled=autocast == "float16")
    found = []
    for step, count in enumerate((104, 8, 37, 131, 61)):
        dense, ids, labels = batch(step, count)
        part = mine(replicas, count)
        vectors = table[ids[:, part]].requires_grad_()

        def lost(part: slice, vectors: Tensor, count: int, data: tuple[Tensor, ...]) -> Tensor:
            with torch.autocast("cpu", kind, enabled=bool(autocast)):
                losses: Tensor = replicas(data[0][part], Along(vectors, 1), data[2][part], global_batch=count)[0]
            return losses

        losses = lost(part, vectors, count, (dense, ids, labels))
        optimizer.zero_grad()
        if no_sync:
            with replicas.no_sync():
                earlier = lost(part, vectors, count, (dense * 0.5, ids, labels))
                scaler.scale(replicas.loss(earlier, count)).backward()
        scaler.scale(replicas.loss(losses, count)).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        gathered: list[Tensor] = [None] * world
        dist.all_gather_object(gathered, vectors.grad)
        found.append(digest(torch.cat(gathered, 1), replicas.global_loss(losses, count)))
    # Nothing was drawn from the generator that the caller sees.
    state = torch.get_rng_state()
    replicas(dense[part], Along(vectors, 1), labels[part], global_batch=count)
    assert torch.equal(torch.get_rng_state(), state)
    if scaler.is_enabled():
        assert scaler.get_scale() < 2.0**20  # The first steps overflowed, on all ranks.
    found += [digest(*replicas.parameters()), replicas.digest()]
    assert all(torch.isfinite(parameter).all() for parameter in replicas.parameters())
    return found
