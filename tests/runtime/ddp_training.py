# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call"
"""A small network, trained for some steps: what DDP and its like are compared by."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

BATCH = 8
STEPS = 3


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def batches(world: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    for _ in range(STEPS):
        yield (
            torch.randn(world, BATCH, 12, generator=generator),
            torch.randn(world, BATCH, 3, generator=generator),
        )


def train(model: nn.Module, rank: int | None, world: int) -> list[torch.Tensor]:
    """Returns the parameters after some steps on this rank's part of each batch, or on the whole batch."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches(world):
        mine = slice(None) if rank is None else rank
        optimiser.zero_grad()
        nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
        optimiser.step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]
