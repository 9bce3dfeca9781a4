# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,attr-defined,union-attr,arg-type,misc"
"""torch's communication hooks of DDP, whose callbacks post and wait, over sennit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.runtime.frameworks.over_sennit import DEADLINE_S, group_over_sennit

with warnings.catch_warnings():  # torch uses what it advises against
    warnings.simplefilter("ignore")
    from torch.distributed.algorithms.ddp_comm_hooks import (
        ddp_zero_hook,
        default_hooks,
        post_localSGD_hook,
        powerSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer


STEPS: Final = 6


def model() -> Any:
    torch.manual_seed(5)
    return DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16), torch.nn.Linear(16, 1))
    )


def backward(replica: Any, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    replica(torch.randn(8, 32, generator=generator)).square().mean().backward()


def with_hook(rank: int, state: Any, hook: Any) -> list[torch.Tensor]:
    """The weights after some steps."""
    replica = model()
    replica.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for step in range(STEPS):
        backward(replica, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach() for weight in replica.parameters()]


def power(rank: int) -> list[torch.Tensor]:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    return with_hook(rank, state, powerSGD_hook.powerSGD_hook)


def post_local(rank: int) -> list[torch.Tensor]:
    replica = model()
    alone, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    replica.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    inner = torch.optim.SGD(replica.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2, warmup_steps=2))
    for step in range(STEPS):
        backward(replica, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach() for weight in replica.parameters()]


HOOKS: Final[dict[str, Callable[[int], list[torch.Tensor]]]] = {
    "allreduce": lambda rank: with_hook(rank, None, default_hooks.allreduce_hook),
    "fp16": lambda rank: with_hook(rank, None, default_hooks.fp16_compress_hook),
    "PowerSGD": power,
    "post-local SGD": post_local,
}


def hooks(rank: int, world: int, folder: str) -> None:
    """Each of torch's hooks gives the bits of gloo."""
    with group_over_sennit(rank, world, folder, "hooks"):
        ours = {name: train(rank) for name, train in HOOKS.items()}
    store = dist.FileStore(str(Path(folder) / "gloo"), world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        limit = timedelta(seconds=DEADLINE_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        theirs = {name: train(rank) for name, train in HOOKS.items()}
        dist.destroy_process_group()
    for name, weights in ours.items():
        assert all(torch.equal(mine, other) for mine, other in zip(weights, theirs[name], strict=True)), name


def overlapped_zero(rank: int, world: int, folder: str) -> None:
    """ZeRO's step within the hook, which torch refuses to gloo because it may hang: the bits of plain DDP."""
    with group_over_sennit(rank, world, folder, "zero"):
        for make in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
            plain, sharded = model(), model()
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
            zero = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
            sharded.register_comm_hook(None, make(default_hooks.allreduce_hook, sharded, zero))
            for step in range(STEPS):
                for one in (plain, sharded):
                    backward(one, rank, step)
                # The hook has no update in the first two steps, in which DDP finds its buckets.
                if step >= 2:
                    optimizer.step()
                for one in (plain, sharded):
                    one.zero_grad()
            for mine, other in zip(sharded.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine, other)
