# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr,assignment,type-arg,func-returns-value"
"""Collectives on accelerator tensors.

Without a GPU, host tensors take their place (device_stand_in.py), which leaves out only streams and pinned memory.
The tests marked `gpu` run both ranks on one device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sennit.runtime.backend.torch_versions import coalescing
from tests.runtime.device_stand_in import delayed_copies, on_device
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)
# More bytes than an operation's scratch, so that all scratch is reused.
MANY = 3_000_001
# Elements of an output whose input is dropped. The inputs are so small that the allocator reuses their memory.
DROPPED = 20_000


@contextmanager
def device_group(device: str) -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(backend="sennit")
    with on_device(device == "cpu"):
        yield group
    dist.destroy_process_group(group)


def numbers(rank: int, elements: int, device: str) -> torch.Tensor:
    """Returns small whole numbers: their sums are exact in any order, and differ by rank and place."""
    return ((torch.arange(elements, device=device) * 7 + rank * 3) % 1_001).float()


def every_collective(rank: int, world: int, device: str) -> None:
    with device_group(device) as group:
        for elements in (0, 5, 4_099):
            parts = [numbers(peer, elements, device) for peer in range(world)]
            total = torch.stack(parts).sum(0)
            root = elements % world

            tensor = parts[rank].clone()
            dist.all_reduce(tensor, group=group)
            assert torch.equal(tensor, total)

            tensor = parts[rank].clone()
            dist.reduce(tensor, root, group=group)
            assert torch.equal(tensor, total if rank == root else parts[rank])

            tensor = parts[rank].clone()
            dist.broadcast(tensor, root, group=group)
            assert torch.equal(tensor, parts[root])

            outputs = [torch.empty_like(part) for part in parts]
            dist.all_gather(outputs, parts[rank], group=group)
            assert all(torch.equal(*pair) for pair in zip(outputs, parts, strict=True))

            whole = torch.zeros(world, elements, device=device)
            whole[rank] = parts[rank]
            dist.all_gather_single(whole.view(-1), whole[rank], group=group)
            assert torch.equal(whole, torch.stack(parts))

            outputs = [torch.empty_like(part) for part in parts]
            dist.gather(parts[rank], outputs if rank == root else None, root, group=group)
            assert rank != root or all(torch.equal(*pair) for pair in zip(outputs, parts, strict=True))

            tensor = torch.empty(elements, device=device)
            dist.scatter(tensor, parts if rank == root else None, root, group=group)
            assert torch.equal(tensor, parts[rank])

            rows = [numbers(peer, elements * world, device) for peer in range(world)]
            dist.reduce_scatter_single(tensor, rows[rank], group=group)
            assert torch.equal(tensor, torch.stack(rows).sum(0).view(world, elements)[rank])

            exchanged = torch.empty(elements * world, device=device)
            dist.all_to_all_single(exchanged, rows[rank], group=group)
            assert torch.equal(exchanged, torch.cat([row.view(world, elements)[rank] for row in rows]))

            right, left = (rank + 1) % world, (rank - 1) % world
            receive = dist.irecv(tensor, left, group=group)
            send = dist.isend(parts[rank], right, group=group)
            assert send is not None
            assert receive is not None
            send.wait()
            receive.wait()
            assert torch.equal(tensor, parts[left])
        dist.barrier(group=group)


def large_tensors(rank: int, world: int, device: str) -> None:
    """Tensors larger than the scratch of an operation, and uneven splits."""
    with device_group(device) as group:
        parts = [numbers(peer, MANY, device) for peer in range(world)]
        works = []
        tensors = []
        for _ in range(3):
            tensors.append(parts[rank].clone())
            works.append(dist.all_reduce(tensors[-1], group=group, async_op=True))
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            assert torch.equal(tensor, torch.stack(parts).sum(0))

        # Rank r sends (r + peer) * step elements to each peer. Rank 0 sends nothing to itself.
        step = MANY // (4 * world)
        splits = [[(one + other) * step for other in range(world)] for one in range(world)]
        rows = [numbers(peer, sum(splits[peer]), device) for peer in range(world)]
        expected = torch.cat([rows[peer].split(splits[peer])[rank] for peer in range(world)])
        output = torch.empty_like(expected)
        dist.all_to_all_single(output, rows[rank], [splits[peer][rank] for peer in range(world)], splits[rank], group)
        assert torch.equal(output, expected)

        received = torch.empty(MANY, device=device)
        if rank == 0:
            # The sender is not given: a message comes from one rank as a whole.
            for _ in range(world - 1):
                source = dist.recv(received, None, group, tag=2)
                assert torch.equal(received, parts[source])
        else:
            dist.send(parts[rank], 0, group, tag=2)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, received, (rank - 1) % world, group),
                dist.P2POp(dist.isend, parts[rank], (rank + 1) % world, group),
            ]
        )
        for work in works:
            work.wait()
        assert torch.equal(received, parts[(rank - 1) % world])


def order_with_host_tensors(rank: int, world: int, device: str) -> None:
    """A host tensor's collective that follows a device tensor's keeps its place in the order of the group."""
    with device_group(device) as group:
        for trial in range(5):
            large = numbers(rank, MANY // 4, device)
            small = torch.full((3,), float(trial))
            works = [
                dist.all_reduce(large, group=group, async_op=True),
                host_all_reduce(small, group),
                dist.barrier(group=group, async_op=True),
            ]
            for work in reversed(works):
                work.wait()
            assert small.tolist() == [trial * world] * 3


def host_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    with on_device(False):
        work: dist.Work = dist.all_reduce(tensor, group=group, async_op=True)
    return work


def futures(rank: int, world: int, device: str) -> None:
    with device_group(device) as group:
        done = threading.Event()
        tensor = torch.ones(1_000, device=device)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        chained = work.get_future().then(lambda future: (future.value()[0] * 2, done.set())[0])
        assert done.wait(60)
        assert torch.equal(chained.wait().cpu(), torch.full((1_000,), 2.0 * world))
        work.wait()
        assert work.is_completed()
        assert torch.equal(work.get_future().value()[0].cpu(), torch.full((1_000,), float(world)))
        tensors = [torch.ones(1_000, device=device) for _ in range(3)]
        with coalescing(group, async_ops=True) as block:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        for total in block.works[0].get_future().then(lambda future: future.value()).wait():
            assert torch.equal(total.cpu(), torch.full((1_000,), float(world)))


def streams(rank: int, world: int, device: str) -> None:
    """The collective waits for writes on the caller's stream, and the caller's stream waits for its result."""
    with device_group(device) as group:
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            a = torch.randn(2_048, 2_048, device=device)
            for _ in range(20):
                a = a @ a / 50
            tensor = torch.ones(MANY, device=device) + rank
            work = dist.all_reduce(tensor, group=group, async_op=True)
            work.wait()
            result = tensor * 2
        side.synchronize()
        assert torch.equal(result, torch.full_like(result, float(2 * sum(range(1, world + 1)))))


def failure(rank: int, world: int, device: str) -> str:
    """Ranks call different collectives: both get the error."""
    group = dist.new_group(backend="sennit", timeout=timedelta(seconds=60))
    with on_device():
        work = dist.all_reduce(torch.ones(10 + rank), group=group, async_op=True)
    try:
        work.wait()
    except RuntimeError as error:
        assert not work.is_success()
        return str(error)
    return ""


def dropped_work(rank: int, world: int, device: str) -> None:
    """Drops inputs and Works at once. The call must keep their memory until its last copy is done."""
    outputs = []
    with delayed_copies(rank, 40), device_group(device) as group:
        for trial in range(30):
            outputs.append(post_and_forget(rank + trial, world, device, group))
            # These tensors would reuse an input's memory if it were freed too early.
            spoilers = [torch.full((DROPPED * world,), float("nan"), device=device) for _ in range(4)]
            del spoilers
        # Leaving the block destroys the group. Calls in flight still end.
    for trial, output in enumerate(outputs):
        total = float(sum(range(trial, trial + world)))
        assert torch.equal(output.cpu(), torch.full((DROPPED,), total)), f"trial {trial}"


def post_and_forget(value: int, world: int, device: str, group: dist.ProcessGroup) -> torch.Tensor:
    given = torch.full((DROPPED * world,), float(value), device=device)
    output = torch.empty(DROPPED, device=device)
    dist.reduce_scatter_single(output, given, group=group, async_op=True)
    return output


def deadline(rank: int, world: int, device: str) -> str:
    """Rank 1 never calls. Rank 0 gets the error at its deadline, for a call that it holds and for a dropped one."""
    group = dist.new_group(backend="sennit")
    # A busy machine may need longer to make the group.
    group._get_backend(torch.device(device)).set_timeout(timedelta(seconds=1))
    if rank != 0:
        return ""
    with on_device(device == "cpu"):
        dist.all_reduce(torch.ones(MANY, device=device), group=group, async_op=True)
        work = dist.all_reduce(torch.ones(MANY, device=device), group=group, async_op=True)
        try:
            work.wait()
        except RuntimeError as error:
            return str(error)
    return "no error"


def aborted(rank: int, world: int, device: str) -> str:
    """Rank 0 aborts while copies of its calls are queued, and drops their tensors at once."""
    group = dist.new_group(backend="sennit")
    if rank != 0:
        return ""
    with delayed_copies(rank, 200), on_device(device == "cpu"):
        for _ in range(8):
            work = dist.all_reduce(torch.ones(MANY, device=device), group=group, async_op=True)
        group._get_backend(torch.device(device)).abort()
        try:
            work.wait()
        except RuntimeError as error:
            return str(error)
    return "no error"


def unlike_memory(rank: int, world: int) -> str:
    """One rank passes device memory, the other host memory. Both get the error, even if sizes are equal."""
    group = dist.new_group(backend="sennit", timeout=timedelta(seconds=60))
    try:
        with on_device(rank == 0):
            dist.all_reduce(torch.ones(10), group=group)
    except RuntimeError as error:
        return str(error)
    return "no error"


def message_between_memories(rank: int, world: int) -> None:
    """A message from device memory can be received into host memory, and the other way round."""
    with device_group("cpu") as group:
        for device_rank in range(2):
            expected = numbers(1, MANY, "cpu")
            with on_device(rank == device_rank):
                if rank == 1:
                    dist.send(expected, 0, group)
                else:
                    received = torch.empty(MANY)
                    dist.recv(received, 1, group)
                    assert torch.equal(received, expected)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", [every_collective, large_tensors, order_with_host_tensors, futures, dropped_work])
def test_on_the_stand_in(kept_world: WorldFactory, size: int, case: Callable[..., Any]) -> None:
    kept_world(size).run(case, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [every_collective, large_tensors, order_with_host_tensors, futures, dropped_work, streams]
)
def test_on_a_gpu(new_world: WorldFactory, case: Callable[..., Any]) -> None:
    new_world(2).run(case, device="cuda:0")


def test_ranks_that_disagree(new_world: WorldFactory) -> None:
    texts = new_world(2).run(failure, device="cpu")
    assert all("all_reduce" in text for text in texts)


def test_deadline_of_a_device_operation(new_world: WorldFactory) -> None:
    text, _ = new_world(2).run(deadline, device="cpu")
    assert "timed out on rank 0: not finished within its timeout of 1 s" in text


def test_abort_with_copies_queued(new_world: WorldFactory) -> None:
    text, _ = new_world(2).run(aborted, device="cpu")
    assert "abort was called" in text


def test_device_and_host_memory_in_one_collective(new_world: WorldFactory) -> None:
    texts = new_world(2).run(unlike_memory)
    assert all("on a device" in text for text in texts), texts


def test_a_message_between_device_and_host(kept_world: WorldFactory) -> None:
    kept_world(2).run(message_between_memories)
