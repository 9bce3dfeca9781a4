# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,assignment"
"""Symmetric tensors: what torch may do with them, collectives on them, and programs that know nothing of them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sennit.runtime.backend import communicator, is_symmetric, symmetric_empty, symmetric_memory
from sennit.transport.config import wants_shared_allocator
from sennit.transport.errors import ConfigError
from tests.runtime.ddp_training import network, train
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)
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


@pytest.mark.parametrize("size", [2, 3])
def test_all_collectives_mix_symmetric_and_ordinary_tensors(kept_world: WorldFactory, size: int) -> None:
    assert min(kept_world(size).run(mixed, seed=size)) > 0


def test_over_udp_symmetric_tensors_are_like_others(kept_world: WorldFactory) -> None:
    assert kept_world(2, "udp").run(mixed, seed=1) == [0, 0]


@pytest.mark.parametrize("case", [groups, registered])
def test_tensors_and_groups(kept_world: WorldFactory, case: Callable[..., Any]) -> None:
    kept_world(2).run(case)


def test_ddp(kept_world: WorldFactory) -> None:
    assert min(kept_world(2).run(ddp)) > 0


def test_only_tensors_of_the_block_and_its_thread_are_symmetric() -> None:
    with symmetric_memory():
        inside = torch.ones(10_000)
        with symmetric_memory():
            nested = torch.ones(10_000)
        layer = torch.nn.Linear(200, 200)
        small = torch.ones(100)
    outside = torch.ones(10_000)
    assert is_symmetric(inside)
    assert is_symmetric(nested)
    assert is_symmetric(layer.weight)
    assert not is_symmetric(small)
    assert not is_symmetric(outside)
    assert torch.equal(inside, outside)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.bool])
def test_a_symmetric_tensor_is_a_tensor(dtype: Any) -> None:
    tensor = symmetric_empty((300, 200), dtype).fill_(1)
    assert is_symmetric(tensor)
    assert tensor.dtype is dtype
    ordinary = torch.ones(300, 200, dtype=dtype)
    assert torch.equal(tensor, ordinary)
    assert torch.equal(tensor[5:, ::3], ordinary[5:, ::3])
    assert not is_symmetric(tensor.clone())
    tensor.resize_(900, 200)
    assert torch.equal(tensor[:300], ordinary)


def test_empty_and_scalar_shapes() -> None:
    assert symmetric_empty(0).shape == (0,)
    assert symmetric_empty(()).shape == ()
    assert symmetric_empty((3, 0, 2)).numel() == 0


def _write(tensor: Any, done: Any) -> None:
    tensor.fill_(2.0)
    done.put(float(tensor.sum()))


def test_a_forked_child_writes_to_its_own_copy() -> None:
    context = multiprocessing.get_context("fork")
    tensor = symmetric_empty(50_000).fill_(1.0)
    done = context.Queue()
    child = context.Process(target=_write, args=(tensor, done))
    child.start()
    assert done.get(timeout=60) == 100_000.0
    child.join(60)
    assert child.exitcode == 0
    assert float(tensor.sum()) == 50_000.0


def test_sharing_through_torch_still_works() -> None:
    tensor = symmetric_empty(50_000).fill_(1.0)
    tensor.share_memory_()
    assert tensor.is_shared()
    assert float(tensor.sum()) == 50_000.0


def test_the_variable_is_zero_or_one() -> None:
    assert not wants_shared_allocator({})
    assert not wants_shared_allocator({"SENNIT_SHARED_ALLOCATOR": "0"})
    assert wants_shared_allocator({"SENNIT_SHARED_ALLOCATOR": "1"})
    with pytest.raises(ConfigError, match="SENNIT_SHARED_ALLOCATOR=yes; allowed: 0 or 1"):
        wants_shared_allocator({"SENNIT_SHARED_ALLOCATOR": "yes"})


UNMODIFIED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("sennit")
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(1_000, 1_000))
model(torch.randn(8, 1_000) * (dist.get_rank() + 1)).square().mean().backward()
gradient = model.module.weight.grad
others = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
dist.all_gather(others, gradient)
assert all(torch.equal(gradient, other) for other in others)
"""


@pytest.mark.long
def test_an_unmodified_program_gets_symmetric_tensors(tmp_path: Path) -> None:
    """The program does not know sennit's Python names. Only the lines that this test adds do."""
    script = tmp_path / "script.py"
    script.write_text(
        UNMODIFIED
        + textwrap.dedent(
            """
            from sennit.runtime.backend import communicator, is_symmetric
            assert is_symmetric(gradient)
            counters = communicator().counters()
            assert counters["shm_references_received"] > 0, counters
            """
        )
    )
    environment = {**os.environ, "SENNIT_SHARED_ALLOCATOR": "1", "SENNIT_TRANSPORT": "shm", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "import sennit, sys, runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"]
    ranks = [
        subprocess.Popen(
            [*command, str(script)],
            env={
                **environment,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": _free_port(tmp_path),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def _free_port(folder: Path) -> str:
    """The same free port for all ranks of a test."""
    import socket

    kept = folder / "port"
    if not kept.exists():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            kept.write_text(str(probe.getsockname()[1]))
    return kept.read_text()
