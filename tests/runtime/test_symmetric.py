# SPDX-License-Identifier: Apache-2.0
"""Symmetric tensors: what torch may do with them, collectives on them, and programs that know nothing of them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sennit.runtime.backend import is_symmetric, symmetric_empty, symmetric_memory  # noqa: E402
from sennit.transport.config import wants_shared_allocator  # noqa: E402
from sennit.transport.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.timeout(180)

CASES = "symmetric_cases.py"


@pytest.mark.parametrize("size", [2, 3])
def test_all_collectives_mix_symmetric_and_ordinary_tensors(kept_world: Callable[..., Any], size: int) -> None:
    assert min(kept_world(size).run(CASES, "mixed", seed=size)) > 0


def test_over_udp_symmetric_tensors_are_like_others(kept_world: Callable[..., Any]) -> None:
    assert kept_world(2, "udp").run(CASES, "mixed", seed=1) == [0, 0]


@pytest.mark.parametrize("case", ["groups", "registered"])
def test_tensors_and_groups(kept_world: Callable[..., Any], case: str) -> None:
    kept_world(2).run(CASES, case)


def test_ddp(kept_world: Callable[..., Any]) -> None:
    assert min(kept_world(2).run(CASES, "ddp")) > 0


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
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    assert tensor.is_shared()  # type: ignore[no-untyped-call]
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
