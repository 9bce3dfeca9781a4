# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr,assignment,type-arg,func-returns-value"
"""Tensors in symmetric memory: run on each rank by test_symmetric.py."""

from __future__ import annotations

import gc
import random

import torch
import torch.distributed as dist
from framework_cases import network, train  # type: ignore[import-not-found]
from torch.nn.parallel import DistributedDataParallel

from sennit.runtime.backend import communicator, is_symmetric, symmetric_empty, symmetric_memory

SIZES = (1, 1_000, 8_192, 40_000, 300_001)


def direct_messages() -> int:
    counters = communicator().counters()
    return sum(counters.get(f"shm_{name}_received", 0) for name in ("references", "placements"))


def mixed(rank: int, world: int, seed: int) -> int:
    """Every collective, with tensors of either memory, gives what it gives with ordinary ones. Returns how many
    messages were direct."""
    draws = random.Random(1_000 * seed + rank)
    before = direct_messages()

    def maybe(tensor: torch.Tensor) -> torch.Tensor:
        if draws.random() < 0.5:
            return tensor.clone()
        return symmetric_empty(tensor.shape, tensor.dtype).copy_(tensor)

    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            values = torch.randn(size * world, generator=torch.Generator().manual_seed(size + rank))
            mine = (values * 100).to(dtype)
            part = mine[:size].clone()
            for name, given, got in (
                ("all_reduce", part, part),
                ("broadcast", part, part),
                ("all_to_all_single", mine, torch.empty_like(mine)),
                ("reduce_scatter_single", mine, torch.empty_like(part)),
                ("all_gather_single", part, torch.empty_like(mine)),
            ):
                results = []
                for memory in (torch.clone, maybe):
                    if given is got:
                        result = memory(given)
                        arguments = (result, 0) if name == "broadcast" else (result,)
                    else:
                        result = memory(got)
                        arguments = (result, memory(given))
                    getattr(dist, name)(*arguments)
                    results.append(result)
                assert torch.equal(*results), (name, size, dtype)
    return direct_messages() - before


def ddp(rank: int, world: int) -> int:
    """A model in symmetric memory has the bits of one in ordinary memory. Returns how many messages were direct."""
    ordinary = train(DistributedDataParallel(network()), rank, world)
    before = direct_messages()
    with symmetric_memory():
        symmetric = train(DistributedDataParallel(torch.nn.Sequential(network(), Wide())), rank, world)
        expected = train(torch.nn.Sequential(network(), Wide()), None, world)
    assert len(ordinary) + 1 == len(symmetric)
    for one, other in zip(symmetric, expected, strict=True):
        torch.testing.assert_close(one, other)
    return direct_messages() - before


class Wide(torch.nn.Module):
    """Passes its input on, and has a parameter that makes DDP's bucket large."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3, 40_000), 0.01))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.weight.mean(1)


def groups(rank: int, world: int) -> None:
    """One tensor is used in several groups, and in one that ends before the tensor does."""
    tensor = symmetric_empty(100_000).fill_(1.0)
    other = dist.new_group()
    for step in range(6):
        dist.all_reduce(tensor, group=other if step % 2 else None)
    assert torch.equal(tensor, torch.full((100_000,), float(world**6)))
    dist.destroy_process_group(other)
    dist.all_reduce(tensor)
    assert tensor[0].item() == float(world**7)


def registered(rank: int, world: int) -> None:
    """A tensor that a group knows is forgotten when its last view goes."""
    tensor = symmetric_empty((100, 1_000), group=dist.group.WORLD).fill_(1.0)
    view = tensor[3]
    del tensor
    gc.collect()
    dist.all_reduce(view)
    assert view.sum().item() == 1_000.0 * world
    del view
    gc.collect()
    again = symmetric_empty((100, 1_000), group=dist.group.WORLD).fill_(2.0)
    dist.all_reduce(again)
    assert again[99, 999].item() == 2.0 * world
    assert is_symmetric(again)
