# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr,assignment,type-arg,func-returns-value"
"""Callbacks of futures that do what callbacks may do: run on each rank by test_backend_callbacks.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fault_cases import raised  # type: ignore[import-not-found]

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

    # In a group the order of calls must be the same on all ranks. Sums of one size may end in any order, so each chain
    # begins in a group of its own. What the callbacks of a chain post stays together.
    groups = [dist.new_group() for _ in range(chains)]
    for one in groups:
        total = sum_of(1.0, one).then(multiply(depth)).wait()
        assert torch.equal(total, torch.full((COUNT,), float(world) ** (depth + 1)))


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
    """The program holds a lock in its calls. Callbacks take it, so none may run inside a call."""
    lock = threading.Lock()

    def callback(future: Any) -> None:
        with lock:
            pass

    futures = []
    for _ in range(200):
        futures.append(sum_of(1.0).then(callback))
        with lock:
            dist.all_reduce(torch.ones(COUNT))
    for future in futures:
        future.wait()


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


def thrown(rank: int, world: int) -> str:
    def callback(future: Any) -> None:
        raise RuntimeError("of the user's callback")

    text: str = raised(sum_of(1.0).then(callback).wait)
    assert torch.equal(sum_of(1.0).wait()[0], torch.full((COUNT,), float(world)))
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
