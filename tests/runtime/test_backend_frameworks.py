# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,union-attr,arg-type,no-untyped-call"
"""DDP, FSDP2, DTensor, functional and compiled collectives, DCP and the debug wrapper run unchanged over sennit."""

from __future__ import annotations

import copy
import importlib.metadata
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.extent import briefly
from tests.runtime.ddp_training import network, train
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)


def ddp(rank: int, world: int) -> None:
    """Parameters are equal on all ranks, close to one process, and with two ranks equal to gloo bit for bit."""
    ours = train(DistributedDataParallel(network()), rank, world)
    theirs = train(DistributedDataParallel(network(), process_group=dist.new_group(backend="gloo")), rank, world)
    alone = train(network(), None, world)
    for mine, gloo, reference in zip(ours, theirs, alone, strict=True):
        if world == 2:
            assert torch.equal(mine, gloo)
        torch.testing.assert_close(mine, reference)
        copies = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(copies, mine)
        assert all(torch.equal(mine, other) for other in copies)


def ddp_variants(rank: int, world: int) -> None:
    """Small buckets that overlap the backward pass, and gradients as views of buckets."""
    reference = train(DistributedDataParallel(network()), rank, world)
    bucketed = DistributedDataParallel(network(), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    for one, other in zip(reference, train(bucketed, rank, world), strict=True):
        assert torch.equal(one, other)


def ddp_sparse(rank: int, world: int) -> None:
    torch.manual_seed(3)
    table = nn.Embedding(20, 4, sparse=True)
    model = DistributedDataParallel(table)
    rows = torch.tensor([rank, 5, 5, 19 - rank])
    model(rows).sum().backward()
    counts = torch.zeros(20)
    for peer in range(world):
        counts.index_add_(0, torch.tensor([peer, 5, 5, 19 - peer]), torch.ones(4))
    assert table.weight.grad is not None
    torch.testing.assert_close(table.weight.grad.to_dense(), (counts / world).unsqueeze(1).expand(20, 4))


def fsdp2(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for mine, reference in zip(train(model, rank, world), train(network(), None, world), strict=True):
        torch.testing.assert_close(mine, reference)


def dtensor(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(4.0 * world * 3 * world).view(4 * world, 3 * world)
    placements = [Shard(0), Shard(1), Replicate()]
    for before in placements:
        for after in placements:
            moved = distribute_tensor(whole, mesh, [before]).redistribute(mesh, [after])
            assert torch.equal(moved.full_tensor(), whole), (before, after)
    partial = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
    total = whole * (world * (world + 1) / 2)
    for after in placements:
        assert torch.equal(partial.redistribute(mesh, [after]).full_tensor(), total), after
    # An uneven shard: some ranks have fewer rows, or none.
    narrow = distribute_tensor(whole[: world + 1], mesh, [Shard(0)])
    assert torch.equal(narrow.full_tensor(), whole[: world + 1])


def functional_collectives(rank: int, world: int) -> None:
    group = dist.group.WORLD
    ones = torch.full((6,), float(rank))
    total = float(sum(range(world)))
    assert torch.equal(functional.all_reduce(ones, "sum", group) + 0, torch.full((6,), total))
    gathered = functional.all_gather_single(ones, 0, group)
    assert torch.equal(gathered + 0, torch.arange(float(world)).repeat_interleave(6))
    scattered = functional.reduce_scatter_single(torch.arange(2.0 * world), "sum", 0, group)
    assert torch.equal(scattered + 0, torch.arange(2.0 * world)[2 * rank : 2 * rank + 2] * world)
    exchanged = functional.all_to_all_single(torch.full((world,), float(rank)), None, None, group)
    assert torch.equal(exchanged + 0, torch.arange(float(world)))
    several = functional.all_reduce_coalesced([ones, ones * 2], "sum", group)
    assert torch.equal(several[1] + 0, torch.full((6,), 2 * total))
    broadcast = functional.broadcast(ones, world - 1, group)
    assert torch.equal(broadcast + 0, torch.full((6,), float(world - 1)))


def compiled(rank: int, world: int) -> None:
    """Collectives inside a compiled graph, and the group's name as TorchRec reads it."""

    def step(x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        z = functional.all_to_all_single(y + rank, None, None, dist.group.WORLD)
        return z + 1

    x = torch.arange(4.0 * world)
    with warnings.catch_warnings():
        # Warnings of the compiler's own imports.
        warnings.simplefilter("ignore")
        result = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    expected = torch.cat([(x * 2 * world)[4 * rank : 4 * rank + 4] + peer for peer in range(world)]) + 1
    assert torch.equal(result, expected)


def checkpoint(rank: int, world: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    table = distribute_tensor(torch.arange(10.0 * world).view(5 * world, 2), mesh, [Shard(0)])
    state = {"table": table, "dense": torch.full((3,), 4.0), "step": 17}
    dcp.save(state, checkpoint_id=folder)
    loaded = {"table": torch.zeros_like(table), "dense": torch.zeros(3), "step": 0}
    dcp.load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["table"].full_tensor(), table.full_tensor())
    assert torch.equal(loaded["dense"], state["dense"])
    assert loaded["step"] == 17


def names(rank: int, world: int) -> None:
    """Every spelling of the backend's name, and the names that groups report."""
    for spelling in ("sennit", "cpu:sennit", "cpu:sennit,cuda:sennit", "cpu:sennit,cuda:gloo"):
        group = dist.new_group(backend=spelling)
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [world] * 3
        assert group._get_backend(torch.device("cpu")).name() == "sennit"
        if spelling == "sennit":
            # TorchRec takes "custom" for a backend without peers (docs/reference/torch.md).
            assert group._get_backend_name() == "sennit"
            assert group.name() == "sennit"
            assert dist.get_backend(group) == "sennit"
        dist.destroy_process_group(group)
    assert dist.new_group(backend="gloo")._get_backend_name() == "gloo"
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    assert options.backend == "sennit"


def logged_name(rank: int, world: int) -> None:
    """The backend name in DDP's logging. The C++ logger knows only types, and all outside backends have type CUSTOM."""
    model = DistributedDataParallel(network())
    assert model._get_ddp_logging_data()["backend_name"] == "sennit"
    # If this fails, torch logs names: then remove the correction in process_group.py.
    assert model.logger._get_ddp_logging_data().strs_map["backend_name"] == "custom"
    over_gloo = DistributedDataParallel(network(), process_group=dist.new_group(backend="gloo"))
    assert over_gloo._get_ddp_logging_data()["backend_name"] == "gloo"


def subgroups(rank: int, world: int) -> None:
    """Groups of some ranks, their rank numbers, and two halves at once."""
    halves = [list(range(world // 2)), list(range(world // 2, world))]
    groups = [dist.new_group(half) for half in halves]
    mine = 0 if rank in halves[0] else 1
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=groups[mine])
    assert tensor.item() == sum(halves[mine])
    root = halves[mine][-1]
    tensor.fill_(rank)
    dist.broadcast(tensor, root, group=groups[mine])
    assert tensor.item() == root
    dist.destroy_process_group(groups[mine])


def names_again(rank: int, world: int, folder: str) -> None:
    """torch gives the name of a group of one rank to a group of all, in the same store, after destroy_process_group."""
    store = dist.FileStore(f"{folder}/store", world)
    for ranks in ([0], list(range(world)), [world - 1], list(range(world))):
        dist.init_process_group("sennit", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        group = dist.new_group(ranks, timeout=timedelta(seconds=60))
        if rank in ranks:
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total.item() == len(ranks)
        dist.barrier()
        dist.destroy_process_group()


def one_of_each(rank: int, world: int, folder: str) -> None:
    """Calls each kind of collective that the DETAIL wrapper checks. TORCH_DISTRIBUTED_DEBUG sets the same level."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("sennit", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    assert isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), dist.distributed_c10d._ProcessGroupWrapper)
    ones = torch.ones(4)
    dist.all_reduce(ones)
    assert ones.tolist() == [world] * 4
    dist.broadcast(ones, 0)
    dist.all_gather([torch.empty(4) for _ in range(world)], ones)
    output = torch.empty(4 * world)
    dist.all_gather_single(output, ones)
    dist.reduce_scatter_single(torch.empty(4), output)
    dist.all_to_all_single(torch.empty(4 * world), output)
    dist.reduce(ones, 0)
    dist.barrier()
    assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == "sennit"
    parameters = [p.detach().clone() for p in DistributedDataParallel(copy.deepcopy(network())).parameters()]
    assert len(parameters) == 6


CASES = [
    (case, size)
    for case in (
        ddp,
        ddp_variants,
        ddp_sparse,
        fsdp2,
        dtensor,
        functional_collectives,
        compiled,
        names,
        logged_name,
    )
    for size in (2, 3)
]


@pytest.mark.parametrize(("case", "size"), briefly(CASES, [one for one in CASES if one != (compiled, 2)]))
def test_framework(kept_world: WorldFactory, size: int, case: Callable[..., Any]) -> None:
    kept_world(size).run(case)


def test_subgroups(kept_world: WorldFactory) -> None:
    kept_world(4).run(subgroups)


def test_checkpoint(kept_world: WorldFactory, tmp_path: Path) -> None:
    kept_world(2).run(checkpoint, folder=str(tmp_path))


def test_a_name_serves_other_ranks_after_destroy(new_world: WorldFactory, tmp_path: Path) -> None:
    new_world(2, backend="").run(names_again, folder=str(tmp_path))


def test_detail_debug_mode(new_world: WorldFactory, tmp_path: Path) -> None:
    new_world(2, backend="").run(one_of_each, folder=str(tmp_path))


SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("sennit")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
assert total.item() == 3.0
dist.barrier()
dist.destroy_process_group()
dist.init_process_group("sennit")
dist.all_reduce(total)
assert total.item() == 6.0
"""


def has_entry_point() -> bool:
    return any(point.name == "sennit" for point in importlib.metadata.entry_points(group="torch.backends"))


@pytest.mark.skipif(not has_entry_point(), reason="sennit is not installed: torch finds no entry point")
def test_unmodified_script_under_torchrun(tmp_path: Path) -> None:
    """The script does not import sennit, makes groups twice over one store, and does not call destroy_process_group."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        check=True,
        timeout=120,
        cwd=tmp_path,
    )


def run_python(code: str, **environment: str) -> str:
    import os

    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={**os.environ, **environment},
    )
    return result.stdout


@pytest.mark.long
def test_import_sennit_registers_in_any_order() -> None:
    for imports in ("import sennit, torch", "import torch, sennit"):
        run_python(f"{imports}; import torch.distributed as d; assert 'sennit' in d.Backend.backend_list")
    run_python(
        "import sennit; import torch.distributed as d; assert 'sennit' in d.Backend.backend_list",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_registration_loads_nothing_native() -> None:
    run_python(
        """
        import sys, sennit, torch
        from sennit.runtime.backend.process_group import register
        register()
        assert "sennit.runtime.backend._c10d" not in sys.modules
        assert "sennit.transport" not in sys.modules
        """
    )
