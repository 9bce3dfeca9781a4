# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,no-any-return,arg-type,union-attr,func-returns-value"
"""What gloo takes is taken; calls that would lose data are refused; a refusal leaves no trace."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.runtime.device_stand_in import on_device
from tests.runtime.world import WorldFactory, raised

pytestmark = pytest.mark.timeout(120)
SHAPE = (4, 3, 2, 5)


def permuted(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 3).contiguous().transpose(0, 3)


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    view = torch.full((*tensor.shape, 3), -7.0, dtype=tensor.dtype)[..., 1]
    return view.copy_(tensor)


LAYOUTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (torch.clone, permuted, transposed, with_gaps)


@contextlib.contextmanager
def group_on(device: bool) -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(backend="sennit")
    with on_device(device):
        yield group
    dist.destroy_process_group(group)


def any_strides(rank: int, world: int, device: bool) -> None:
    """Elements meet by their index, with other strides on each rank. What lies between them stays as it was."""
    numbers = [torch.arange(120.0).view(SHAPE) * 3 + 1_000 * peer for peer in range(world)]
    total = torch.stack(numbers).sum(0)
    with group_on(device) as group:
        for turn in range(len(LAYOUTS)):
            layout, other = LAYOUTS[(rank + turn) % len(LAYOUTS)], LAYOUTS[(rank + turn + 1) % len(LAYOUTS)]
            root = turn % world

            def made(layout: Any = layout) -> torch.Tensor:
                return layout(numbers[rank])

            def empty(layout: Any = other) -> torch.Tensor:
                return layout(torch.full(SHAPE, -1.0))

            tensor = made()
            dist.all_reduce(tensor, group=group)
            assert torch.equal(tensor, total)
            assert layout is not with_gaps or (tensor._base is not None and (tensor._base[..., ::2] == -7).all())
            tensor = made()
            dist.broadcast(tensor, root, group=group)
            assert torch.equal(tensor, numbers[root])
            tensor = made()
            dist.reduce(tensor, root, group=group)
            assert torch.equal(tensor, total if rank == root else numbers[rank])

            outputs = [empty() for _ in range(world)]
            dist.all_gather(outputs, made(), group=group)
            assert all(torch.equal(*pair) for pair in zip(outputs, numbers, strict=True))
            columns = torch.zeros(*SHAPE, world)
            dist.all_gather([columns[..., peer] for peer in range(world)], made(), group=group)
            assert torch.equal(columns, torch.stack(numbers, 4))
            outputs = [empty() for _ in range(world)]
            dist.gather(made(), outputs if rank == root else None, root, group=group)
            assert rank != root or all(torch.equal(*pair) for pair in zip(outputs, numbers, strict=True))
            tensor = empty()
            dist.scatter(tensor, [layout(one) for one in numbers] if rank == root else None, root, group=group)
            assert torch.equal(tensor, numbers[rank])
            tensor = empty()
            dist.reduce_scatter(tensor, [layout(numbers[rank] + peer) for peer in range(world)], group=group)
            assert torch.equal(tensor, total + world * rank)
            outputs = [empty() for _ in range(world)]
            dist.all_to_all(outputs, [layout(numbers[rank] + peer) for peer in range(world)], group=group)
            assert all(torch.equal(outputs[peer], numbers[peer] + rank) for peer in range(world))

            rows = other(torch.zeros(world * SHAPE[0], *SHAPE[1:]))
            dist.all_gather_single(rows, made(), group=group)
            assert torch.equal(rows, torch.cat(numbers))
            tensor = empty()
            dist.reduce_scatter_single(tensor, layout(torch.cat([numbers[rank]] * world)), group=group)
            assert torch.equal(tensor, total)
            rows = other(torch.zeros(world * SHAPE[0], *SHAPE[1:]))
            sent = layout(torch.cat([numbers[rank] + peer for peer in range(world)]))
            dist.all_to_all_single(rows, sent, group=group)
            assert torch.equal(rows, torch.cat([numbers[peer] + rank for peer in range(world)]))

            right, left = (rank + 1) % world, (rank - 1) % world
            tensor = empty()
            works = [dist.isend(made(), right, group=group), dist.irecv(tensor, left, group=group)]
            for work in works:
                assert work is not None
                work.wait()
            assert torch.equal(tensor, numbers[left])

            tensor, seen = made(), made()
            future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
            future.wait()
            assert torch.equal(tensor, total)
            dist.all_reduce(seen, group=group, async_op=True)  # Nobody keeps the Work.
            dist.all_reduce(torch.ones(1), group=group)
            dist.barrier(group)
    assert torch.equal(seen, total)  # The group has drained.
    expanded = torch.arange(3.0).expand(4, 3)
    found = torch.zeros(world, 4, 3)
    dist.all_gather_single(found.view(-1, 3), expanded)
    assert torch.equal(found, expanded.expand(world, 4, 3))


def shared_memory(rank: int, world: int, device: bool) -> None:
    """An input in the memory of an output, as MPI_IN_PLACE, or anywhere in it."""
    with group_on(device) as group:
        for rows in (1, 40_000):
            numbers = [torch.arange(3.0 * world * rows).view(-1, 3) + 1_000_000 * peer for peer in range(world)]
            columns = torch.cat([numbers[peer].chunk(world)[rank] for peer in range(world)])
            tensor = numbers[rank].clone()
            dist.all_to_all_single(tensor, tensor, group=group)
            assert torch.equal(tensor, columns)
            tensor = numbers[rank].clone()
            dist.all_to_all(list(tensor.chunk(world)), list(tensor.chunk(world)), group=group)
            assert torch.equal(tensor, columns)

            # Rank r sends (r + peer) % world rows to each peer, and so gets as many from it.
            splits = [rows * ((rank + peer) % world) for peer in range(world)]
            pieces = [
                numbers[peer].split(
                    [rows * ((one + peer) % world) for one in range(world)] + [rows * world - sum(splits)]
                )
                for peer in range(world)
            ]
            tensor = numbers[rank].clone()
            dist.all_to_all_single(tensor[: sum(splits)], tensor[: sum(splits)], splits, splits, group=group)
            assert torch.equal(tensor[: sum(splits)], torch.cat([pieces[peer][rank] for peer in range(world)]))

            root = world - 1
            own, others = numbers[rank].clone(), [torch.empty_like(one) for one in numbers]
            others[rank] = own
            dist.gather(own, others if rank == root else None, root, group=group)
            assert rank != root or all(torch.equal(*pair) for pair in zip(others, numbers, strict=True))
            given = [one.clone() for one in numbers]
            own = given[(rank + 1) % world]  # Of the root: what it sends to another rank.
            dist.scatter(own, given if rank == root else None, root, group=group)
            assert torch.equal(own, numbers[rank])
            listed = [torch.empty_like(one) for one in numbers]
            listed[(rank + 1) % world] = own
            dist.all_gather(listed, own, group=group)
            assert all(torch.equal(*pair) for pair in zip(listed, numbers, strict=True))
            whole = torch.cat(numbers)
            dist.all_gather_single(whole, whole[1 : 1 + len(numbers[0])], group=group)
            assert torch.equal(whole, torch.cat([torch.cat(numbers)[1 : 1 + len(numbers[0])]] * world))


def shared_outputs(rank: int, world: int) -> dict[str, str]:
    """Returns the error of each call in which data of one rank would replace data of another."""
    group = dist.group.WORLD
    one, part = torch.zeros(6), torch.ones(6)
    long = torch.zeros(6 + world)
    table = torch.zeros(3, 6 + world)
    gathered = [torch.zeros(6) for _ in range(world - 1)]
    options = dist.GatherOptions()
    options.rootRank = rank  # Each rank is refused before anything is sent.
    errors = {
        "same": raised(dist.all_gather, [one] * world, part),
        "first and last": raised(dist.all_gather, [one, *gathered[1:], one], part),
        "slices": raised(dist.all_gather, [long[peer : peer + 6] for peer in range(world)], part),
        "gather": raised(group.gather, [[one] * world], [part], options),
        "all_to_all": raised(dist.all_to_all, [one] * world, [part] * world),
        "columns": raised(dist.all_gather, [table[:, peer : peer + 6] for peer in range(world)], torch.ones(3, 6)),
        "coalesced": raised(group.allreduce_coalesced, [one, part, one], dist.AllreduceCoalescedOptions()),
        "expanded": raised(dist.all_reduce, torch.zeros(1).expand(6)),
        "windows": raised(dist.broadcast, long.unfold(0, 4, 1), 0),
    }
    # What lies between each other's elements is apart.
    dist.all_gather([table[:, peer::world][:, :2] for peer in range(world)], torch.full((3, 2), float(rank)))
    for peer in range(world):
        assert (table[:, peer::world][:, :2] == peer).all()
    return errors


def refused_blocks(rank: int, world: int) -> list[str]:
    """A refusal in a batch or a coalescing block is raised at its end, and the group works afterwards."""
    group = dist.group.WORLD
    right, left = (rank + 1) % world, (rank - 1) % world
    found, host = torch.zeros(3), torch.device("cpu")

    def batch(sent: torch.Tensor, to: int, tag: int = 0) -> None:
        operations = [dist.P2POp(dist.isend, sent, to, tag=tag), dist.P2POp(dist.irecv, found, left)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def block(calls: Any, device: torch.device | None = None) -> None:
        with dist._coalescing_manager(group, device, async_ops=True) as manager:
            calls()
        manager.wait()

    def check() -> None:
        total = torch.ones(3)
        work = dist.all_reduce(total, async_op=True)
        work.wait()
        assert total.tolist() == [world] * 3
        batch(torch.full((3,), float(rank)), right)
        assert found.tolist() == [left] * 3

    big, sent = torch.zeros(3 * world), []

    def two_broadcasts() -> None:
        dist.broadcast(torch.ones(1).expand(3), 0)
        sent.append(dist.broadcast(found, 0, async_op=True))  # Not started: others of this block were not.

    def left_by_an_error() -> None:
        raise RuntimeError("of the program")

    errors = []
    for wrong in (
        lambda: batch(torch.ones(3), right, -1),
        lambda: batch(torch.ones(3), rank),
        lambda: block(lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)),
        lambda: block(lambda: dist.all_gather_single(big, torch.ones(2))),
        lambda: block(lambda: dist.reduce_scatter_single(torch.ones(2), big)),
        lambda: block(two_broadcasts, host),
        lambda: block(lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND), host),
        lambda: functional.all_reduce(torch.ones(3), "band", group).sum(),
    ):
        errors.append(raised(wrong))
        check()
    assert sent[0].is_completed()
    # torch leaves its own half of such a block open, whatever the backend. The next block closes both.
    errors.append(raised(block, left_by_an_error, host))
    block(lambda: dist.broadcast(found, 0), host)
    check()
    return errors


@pytest.mark.parametrize("transport", ["shm", "udp"])
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("case", [any_strides, shared_memory])
def test_tensors_are_taken(kept_world: WorldFactory, transport: str, device: bool, case: Callable[..., Any]) -> None:
    kept_world(3, transport).run(case, device=device)


def test_outputs_that_share_memory_are_refused(kept_world: WorldFactory) -> None:
    apart = r"share memory; allowed: outputs apart"
    expected = {
        "same": rf"ValueError: outputs\[0\] and outputs\[1\] {apart}",
        "first and last": rf"ValueError: outputs\[0\] and outputs\[2\] {apart}",
        "slices": rf"ValueError: outputs\[0\] and outputs\[1\] {apart}",
        "gather": rf"ValueError: outputs\[0\] and outputs\[1\] {apart}",
        "all_to_all": rf"ValueError: outputs\[0\] and outputs\[1\] {apart}",
        "columns": rf"ValueError: outputs\[0\] and outputs\[1\] {apart}",
        "coalesced": rf"ValueError: outputs\[0\] and outputs\[2\] {apart}",
        "expanded": r"ValueError: tensor has elements that share memory \(sizes \[6\], strides \[0\]\); pass",
        "windows": r"ValueError: tensor has elements that share memory",
    }
    for errors in kept_world(3).run(shared_outputs):
        assert errors.keys() == expected.keys()
        assert not {name: text for name, text in errors.items() if not re.search(expected[name], text)}


def test_a_refusal_leaves_no_block_open(kept_world: WorldFactory) -> None:
    """torch's manager of blocks has no `finally`: with it open, `all_reduce` does nothing and says nothing."""
    expected = [
        r"ValueError: tag is -1",
        r"ValueError: peer is \d, this rank itself",
        r"ValueError: reduce op BAND is not defined",
        r"ValueError: outputs has 9 elements; needed: 6",
        r"ValueError: input has 9 elements; needed: 6",
        r"ValueError: tensor has elements that share memory",
        r"ValueError: reduce op BAND is not defined",
        r"ValueError: reduce op BAND is not defined",
        r"RuntimeError: of the program",
    ]
    for errors in kept_world(3).run(refused_blocks):
        for error, text in zip(errors, expected, strict=True):
            assert re.search(text, error), errors
