# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr,assignment,type-arg,func-returns-value"
"""The default process group after deaths, with newcomers, and shrunk by torch's own interface."""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from sennit.runtime.backend import elastic
from sennit.runtime.backend.process_group import communicator
from sennit.transport.errors import SennitError
from sennit.transport.meeting.membership import Terms
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(120)


def check_group() -> None:
    """Checks that collectives, a new group and DDP work in the current default group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.full((1_000,), float(rank + 1))
    dist.all_reduce(total)
    assert total.tolist() == [world * (world + 1) / 2] * 1_000
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, rank)
    assert objects == list(range(world))
    pair = dist.new_group([0, world - 1]) if world > 1 else None
    if pair is not None and rank in (0, world - 1):
        ones = torch.ones(3)
        dist.all_reduce(ones, group=pair)
        assert ones.tolist() == [2.0] * 3
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.full((2, 3), float(rank))).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    assert torch.allclose(gradient, torch.full((1, 3), (world - 1.0)))


def failure(call: Any) -> str:
    try:
        call()
    except dist.DistBackendError as error:
        return str(error)
    raise AssertionError("the call did not fail")


def meet_twice() -> None:
    """Runs two barriers. A rank that dies after the first may be missed in either, if others are still in the first."""
    dist.barrier()
    dist.barrier()


def survive(rank: int, world: int, *, victims: list[int]) -> dict[str, Any] | None:
    """Ranks die one after the other. After each death the others continue."""
    view = None
    me = rank
    for victim in victims:
        model = DistributedDataParallel(torch.nn.Linear(50, 50))
        if rank == victim:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

        def train(model: Any = model) -> None:
            dist.barrier()
            while True:
                model(torch.ones(4, 50)).sum().backward()

        failure(train)
        lost = communicator().lost_ranks
        view = elastic.reconfigure(Terms(timeout_s=40))
        assert view.previous_ranks[view.rank] == me
        assert not set(lost) & set(view.previous_ranks)
        me = view.rank
        assert (dist.get_rank(), dist.get_world_size()) == (view.rank, view.world)
        check_group()
    assert view is not None
    return {"rank": view.rank, "world": view.world, "epoch": view.epoch}


def grow(rank: int, world: int, *, newcomers: int) -> dict[str, Any]:
    """The members of a working group wait for newcomers."""
    check_group()
    view = elastic.reconfigure(Terms(timeout_s=60, wait_s=60, expect=world + newcomers))
    check_group()
    return {"rank": view.rank, "world": view.world, "previous": list(view.previous_ranks)}


def join(rank: int, world: int, *, store: str) -> dict[str, Any]:
    """Joins as a newcomer."""
    view = elastic.join(FileStore(store, -1), terms=Terms(timeout_s=60))
    check_group()
    return {"rank": view.rank, "world": view.world, "previous": list(view.previous_ranks)}


def shrink(rank: int, world: int, *, excluded: list[int], die: bool, abort: bool) -> dict[str, Any] | None:
    """Calls `torch.distributed.shrink_group` on the default group. The excluded ranks have died or still live."""
    # Other ranks may pass the barrier and abort before this rank has passed it.
    barrier_ends = contextlib.suppress(dist.DistBackendError) if abort else contextlib.nullcontext()
    if rank in excluded:
        with barrier_ends:
            dist.barrier()
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        return None
    if die:
        failure(meet_twice)
    else:
        with barrier_ends:
            dist.barrier()
    flags = dist.distributed_c10d.SHRINK_ABORT if abort else dist.distributed_c10d.SHRINK_DEFAULT
    group = dist.shrink_group(excluded, shrink_flags=flags)
    total = torch.full((10,), float(group.rank() + 1))
    dist.all_reduce(total)
    assert total.tolist() == [group.size() * (group.size() + 1) / 2] * 10
    return {"rank": dist.get_rank(), "world": dist.get_world_size(), "routes": list(communicator().routes)}


def too_few(rank: int, world: int) -> str:
    """Fewer survivors than wanted: an error. The old group's own error stays."""
    if rank == 0:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    failure(meet_twice)
    try:
        elastic.reconfigure(Terms(timeout_s=4, wait_s=0.2, min_world=world))
    except SennitError as error:
        failure(lambda: dist.all_reduce(torch.ones(3)))
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it went on")


@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_survivors_go_on_and_on(new_world: WorldFactory, transport: str) -> None:
    world = new_world(4, environment={"SENNIT_TRANSPORT": transport})
    answers = world.run(survive, victims=[0, 2])
    assert answers == [
        None,
        {"rank": 0, "world": 2, "epoch": 2},
        None,
        {"rank": 1, "world": 2, "epoch": 2},
    ]


@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_newcomers_join(new_world: WorldFactory, transport: str) -> None:
    environment = {"SENNIT_TRANSPORT": transport}
    members = new_world(2, environment=environment)
    newcomers = new_world(2, environment=environment, backend="")
    with ThreadPoolExecutor(2) as pool:
        come = pool.submit(newcomers.run, join, store=members.store)
        grown = members.run(grow, newcomers=2)
        came = come.result()
    assert grown == [{"rank": rank, "world": 4, "previous": [0, 1, None, None]} for rank in (0, 1)]
    assert sorted(answer["rank"] for answer in came) == [2, 3]
    assert all(answer["previous"] == [None] * 4 for answer in came)


@pytest.mark.parametrize(("die", "abort"), [(True, False), (False, False), (False, True)])
def test_torch_shrinks_the_group(new_world: WorldFactory, die: bool, abort: bool) -> None:
    world = new_world(3, environment={"SENNIT_TRANSPORT": "shm"})
    answers = world.run(shrink, excluded=[1], die=die, abort=abort)
    assert answers == [
        {"rank": 0, "world": 2, "routes": ["self", "shm"]},
        None,
        {"rank": 1, "world": 2, "routes": ["shm", "self"]},
    ]


def test_too_few_survivors(new_world: WorldFactory) -> None:
    texts = new_world(3).run(too_few)
    for text in texts[1:]:
        assert "TimeoutError: default: epoch 1 was not agreed upon within 4 s: 2 ranks are here" in text
        assert "at least 3 are wanted" in text
