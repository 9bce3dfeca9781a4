# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr,assignment,type-arg,func-returns-value"
"""Callbacks of futures wait, lock, block, throw and destroy groups: everything else goes on, and nothing hangs."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.runtime.world import WorldFactory, raised

pytestmark = pytest.mark.timeout(120)


with warnings.catch_warnings():  # torch uses what it advises against
    warnings.simplefilter("ignore")
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook


LIMIT_S = 20
COUNT = 1_000


def sum_of(value: float, group: Any = None) -> Any:
    """The future of a sum of `value` of each rank."""
    return dist.all_reduce(torch.full((COUNT,), value), group=group, async_op=True).get_future()


def nested(rank: int, world: int, depth: int, chains: int) -> None:
    """Callbacks wait for sums whose callbacks wait for sums, as torch's PowerSGD does, several chains at a time."""

    def multiply(left: int) -> Callable[[Any], torch.Tensor]:
        def callback(future: Any) -> torch.Tensor:
            total: torch.Tensor = future.value()[0]
            if left == 0:
                return total
            result: torch.Tensor = sum_of(float(total[0])).then(multiply(left - 1)).wait()
            return result

        return callback

    for future in [sum_of(1.0).then(multiply(depth)) for _ in range(chains)]:
        assert torch.equal(future.wait(), torch.full((COUNT,), float(world) ** (depth + 1)))


def chained(rank: int, world: int, callback: Callable[[Any], Any]) -> Any:
    """The future of `callback`, which surely does not run within `then`: the message that it waits for comes after."""
    after, before = (rank + 1) % world, (rank - 1) % world
    received = dist.irecv(torch.zeros(COUNT), after, tag=1).get_future()
    future = received.then(callback)
    asked = dist.irecv(torch.zeros(1), before, tag=2)
    dist.send(torch.zeros(1), after, tag=2)
    asked.wait()
    dist.send(torch.ones(COUNT), before, tag=1)
    return future


def waits_for_a_future_from_outside(rank: int, world: int) -> None:
    """The future's own callback may be behind the one that waits for it."""
    other = dist.irecv(torch.zeros(COUNT), (rank + 1) % world, tag=3).get_future()
    future = chained(rank, world, lambda future: future.value()[0] + other.wait()[0])
    dist.send(torch.full((COUNT,), 2.0), (rank - 1) % world, tag=3)
    assert torch.equal(future.wait(), torch.full((COUNT,), 3.0))


def locked(rank: int, world: int) -> None:
    """The program holds a lock in its calls. Callbacks take it, so none may run inside a call.

    A group of its own: it gives up the order of calls here, for good.
    """
    lock, group = threading.Lock(), dist.new_group()

    def callback(future: Any) -> None:
        with lock:
            pass

    futures = []
    for _ in range(40):
        futures.append(sum_of(1.0, group).then(callback))
        with lock:
            dist.all_reduce(torch.ones(COUNT), group=group)
    for future in futures:
        future.wait()
    dist.destroy_process_group(group)


def blocked(rank: int, world: int) -> None:
    """While a callback of rank 0 blocks, all ranks finish other operations, and callbacks of rank 0 run."""
    gate, ran = threading.Event(), threading.Event()
    held = chained(rank, world, lambda future: gate.wait(2 * LIMIT_S) if rank == 0 else True)
    for _ in range(20):
        total = torch.ones(COUNT)
        dist.all_reduce(total)
        assert total[0].item() == world
    sum_of(1.0).then(lambda future: ran.set())
    assert ran.wait(LIMIT_S)
    assert rank != 0 or not held.done()
    gate.set()
    assert held.wait() is True


def thrown(rank: int, world: int, error: BaseException) -> str:
    """Also what would end a main thread ends no thread of callbacks."""

    def callback(future: Any) -> None:
        raise error

    text: str = raised(sum_of(1.0).then(callback).wait)
    future = sum_of(1.0)
    future.add_done_callback(callback)
    assert torch.equal(future.wait()[0], torch.full((COUNT,), float(world)))
    assert torch.equal(sum_of(1.0).then(lambda future: future.value()).wait()[0], torch.full((COUNT,), float(world)))
    return text


def makes_and_destroys_groups(rank: int, world: int) -> None:
    """A callback makes a group, uses it and destroys it, and another one."""
    other = dist.new_group()

    def callback(future: Any) -> torch.Tensor:
        fresh = dist.new_group()
        total: torch.Tensor = sum_of(2.0, fresh).wait()[0]
        dist.destroy_process_group(fresh)
        dist.destroy_process_group(other)
        both: torch.Tensor = future.value()[0] + total
        return both

    pending = dist.irecv(torch.ones(COUNT), (rank + 1) % world, group=other).get_future()
    assert torch.equal(sum_of(1.0).then(callback).wait(), torch.full((COUNT,), 3.0 * world))
    assert raised(pending.wait) != ""


def done_after_wait(rank: int, world: int) -> None:
    """Once a work's wait has returned its future is done, as over gloo, also when a callback blocks."""
    gate = threading.Event()
    held = chained(rank, world, lambda future: gate.wait(2 * LIMIT_S))
    works = [dist.all_reduce(torch.ones(COUNT), async_op=True) for _ in range(3)]
    futures = [work.get_future() for work in works]
    for work, future in zip(works, futures, strict=True):
        work.wait()
        assert future.done()
        assert future.value()[0][0].item() == world
    gate.set()
    held.wait()


def many_buckets(rank: int, world: int, hook: str) -> None:
    """DDP with a bucket for each weight, whose hook's callbacks post and wait while backward posts more.

    The bits are those of the same hook when it waits for its future at once, over gloo too. Rank 0 dawdles.
    """
    alone = train_with_hook(rank, hook, dist.group.WORLD, together=False)
    assert equal(alone, train_with_hook(rank, hook, dist.group.WORLD, together=True))
    if world == 2:  # gloo adds three numbers in another order
        # It lives until the process ends: a thread of gloo that drops the last reference to its group aborts.
        gloo = dist.new_group(backend="gloo")
        assert equal(alone, train_with_hook(rank, hook, gloo, together=False))


def train_with_hook(rank: int, name: str, group: Any, together: bool) -> list[torch.Tensor]:
    """The weights after some steps with torch's hook. `together`: its callbacks run beside backward."""
    torch.manual_seed(3)
    layers: list[torch.nn.Module] = [torch.nn.Linear(24, 24) for _ in range(12)]
    model: Any = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group, bucket_cap_mb=1e-4)
    state: Any = group
    hook: Any = default_hooks.fp16_compress_hook
    if name == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(group, 1, start_powerSGD_iter=2)
        hook = powerSGD_hook.powerSGD_hook
    dawdling = random.Random(rank)

    def dawdle() -> None:
        if together and rank == 0 and dawdling.random() < 0.3:
            time.sleep(dawdling.random() * 0.002)

    def run(state: Any, bucket: Any) -> Any:
        dawdle()
        future = hook(state, bucket)
        dawdle()
        if not together:
            future.wait()
        return future.then(lambda future: (dawdle(), future.value())[1])

    model.register_comm_hook(state, lambda state, bucket: run(state, bucket))  # torch reads annotations
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        numbers = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(8, 24, generator=numbers)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach() for weight in model.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def begun_in_order(rank: int, world: int) -> None:
    """Callbacks of sums in flight together run in the order in which they were asked for, and post in that order."""
    posted = []

    def callback(number: int) -> Callable[[Any], Any]:
        def post(future: Any) -> Any:
            total = torch.full((COUNT,), float(number))
            posted.append((number, total, dist.all_reduce(total, async_op=True)))

        return post

    for step in range(20):
        works = [dist.all_reduce(torch.ones(1 + 10_000 * (number % 3)), async_op=True) for number in range(9)]
        if rank == step % world:
            works[4].wait()
        futures = [work.get_future().then(callback(number)) for number, work in enumerate(works)]
        after = torch.full((COUNT,), -1.0)
        dist.all_reduce(after)
        assert after[0].item() == -world
        for future in futures:
            future.wait()
        assert [number for number, _, _ in posted] == list(range(9))
        for number, total, work in posted:
            work.wait()
            assert total[0].item() == number * world
        posted.clear()


def refused_after_a_block(rank: int, world: int) -> str:
    """A callback blocks until its own program has finished a later sum. Then it may post no sum."""
    gate = threading.Event()
    group = dist.new_group()
    start = dist.irecv(torch.zeros(1), (rank + 1) % world, tag=9)
    first = torch.ones(COUNT)

    def late(future: Any) -> Any:
        gate.wait(LIMIT_S)
        return sum_of(1.0, group)

    # The sum cannot have ended when its callback is asked for: each rank waits for the other one's word.
    if rank == 0:
        future = dist.all_reduce(first, group=group, async_op=True).get_future().then(late)
        dist.send(torch.zeros(1), 1, tag=9)
        start.wait()
    else:
        start.wait()
        future = None
        dist.send(torch.zeros(1), 0, tag=9)
        dist.all_reduce(first, group=group)
    later = torch.ones(COUNT)
    dist.all_reduce(later, group=group)
    assert later[0].item() == world
    gate.set()
    text: str = raised(future.wait) if future is not None else ""
    dist.barrier()
    return text


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("shm", 4), ("udp", 3)])
def test_callbacks_that_wait(kept_world: WorldFactory, transport: str, size: int) -> None:
    kept_world(size, transport).run(nested, depth=3, chains=3)


@pytest.mark.parametrize(
    "case",
    [waits_for_a_future_from_outside, locked, blocked, makes_and_destroys_groups, done_after_wait],
)
@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_callbacks(kept_world: WorldFactory, transport: str, case: Callable[..., Any]) -> None:
    kept_world(2, transport).run(case)


@pytest.mark.parametrize("hook", ["fp16", "PowerSGD"])
@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("udp", 3)])
def test_hooks_of_many_buckets(kept_world: WorldFactory, transport: str, size: int, hook: str) -> None:
    kept_world(size, transport).run(many_buckets, hook=hook)


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("udp", 3)])
def test_callbacks_begin_in_order(kept_world: WorldFactory, transport: str, size: int) -> None:
    kept_world(size, transport).run(begun_in_order)


def test_a_callback_that_posts_after_it_has_blocked(kept_world: WorldFactory) -> None:
    text, _ = kept_world(2, "shm").run(refused_after_a_block)
    assert "ranks would number their collectives in different orders" in text


@pytest.mark.parametrize("error", [RuntimeError("of a callback"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_callback_that_throws(kept_world: WorldFactory, error: BaseException) -> None:
    """As over gloo: torch gives the error to whoever waits for the callback's future, and else logs it."""
    texts = kept_world(2, "shm").run(thrown, error=error)
    assert all(f"running the callback: {type(error).__name__}" in text for text in texts), texts


EXIT = """
import sys, threading, torch, torch.distributed as dist, sennit
dist.init_process_group("sennit", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
keep = [dist.all_reduce(torch.ones(1000), async_op=True).get_future() for _ in range(3)]
lock = threading.Lock()
lock.acquire()
for future in keep:
    future.then(lambda future: lock.acquire(timeout=1) and lock.release())
"""


def test_exit_with_callbacks_that_block(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", EXIT, str(rank), str(tmp_path / "store")], cwd="/") for rank in range(2)
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
