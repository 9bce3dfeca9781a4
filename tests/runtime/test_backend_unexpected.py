# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr,assignment,type-arg,func-returns-value"
"""Messages that come too early hold up nothing that is needed, and what nobody took never counts as sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.extent import briefly
from tests.runtime.world import WorldFactory, raised

pytestmark = pytest.mark.timeout(120)
SMALL = 2_000  # floats: 8,000 bytes, which travel eagerly
AT_ONCE = 500
LONG_S = 500  # 36,000 messages take 8 s of processor over shm and 15 over udp, of which a busy machine gives little


def beside_a_sum(rank: int, world: int, messages: int, elements: int) -> None:
    """Rank 0 floods rank 1, which takes part in a sum before it receives them."""
    total, one = torch.ones(elements), torch.zeros(1)
    dist.all_reduce(total)  # so that memory is there, and known to the peers
    if rank == 0:
        sends = [dist.isend(torch.full((SMALL,), float(number)), 1) for number in range(messages)]
        dist.send(one, 2)
    elif rank == 1:
        dist.recv(one, 2)
    elif rank == 2:
        dist.recv(one, 0)
        dist.send(one, 1)
    dist.all_reduce(total)
    assert torch.equal(total, torch.full((elements,), float(world) ** 2))
    if rank == 0:
        for send in sends:
            send.wait()
    elif rank == 1:
        received = torch.zeros(SMALL)
        for number in range(messages):
            dist.recv(received, 0)
            assert received[0].item() == received[-1].item() == number


def behind_others(rank: int, world: int, messages: int) -> None:
    """Rank 1 needs the last message first."""
    data, last = torch.ones(SMALL), torch.zeros(1)
    if rank == 0:
        sends = [dist.isend(data, 1, tag=2) for _ in range(messages)]
        dist.send(torch.ones(1), 1, tag=1)
        for send in sends:
            send.wait()
    else:
        dist.recv(last, 0, tag=1)
        assert last.item() == 1
        # Many at once: for each message that has to be asked for, a receive alone would wait for its peer's turn.
        for _ in range(messages // AT_ONCE):
            for work in [dist.irecv(torch.empty(SMALL), 0, tag=2) for _ in range(AT_ONCE)]:
                work.wait()


def before_a_sum(rank: int, world: int, messages: int) -> None:
    """Rank 0 has begun a sum and receives what rank 1 sends before it begins the sum."""
    total, large = torch.ones(1 << 15), torch.zeros(2_000)
    if rank == 0:
        work = dist.all_reduce(total, async_op=True)
        for number in range(messages):
            dist.recv(large, 1)
            assert large[0].item() == large[-1].item() == number
        work.wait()
    else:
        for number in range(messages):
            dist.send(large.fill_(number), 0)
        dist.all_reduce(total)
    assert torch.equal(total, torch.full_like(total, 2.0))


def not_taken(rank: int, world: int, what: str, ends: str) -> tuple[int, int] | None:
    """Rank 1 takes nothing, and aborts or leaves. Returns how many works of rank 0 were done before, and in the end."""
    tensors = [torch.zeros(SMALL) for _ in range(3_000)]
    mine = dist.new_group()
    dist.barrier(group=mine)
    store: Any = dist.distributed_c10d._get_default_store()
    backend = mine._get_backend(torch.device("cpu"))
    if rank != 0:
        store.wait(["posted"])
        backend.abort() if ends == "abort" else dist.destroy_process_group(mine)
        store.set("ended", "1")
        return None
    if what == "send":
        works = [dist.isend(tensor, 1, group=mine) for tensor in tensors]
    else:
        works = [dist.broadcast(tensor, 0, group=mine, async_op=True) for tensor in tensors]
    before = sum(work.is_completed() for work in works)
    store.set("posted", "1")
    store.wait(["ended"])
    texts = [raised(work.wait) for work in works]
    assert all("rank 1" in text for text in texts if text), texts
    return before, texts.count("")


# 1,300 messages are more than a rank of three keeps unasked. Sums of 32 KiB to 1 MiB make round trips.
@pytest.mark.parametrize("elements", [1 << 13, 1 << 16, 1 << 18])
@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_early_messages_beside_a_sum(kept_world: WorldFactory, transport: str, elements: int) -> None:
    kept_world(3, transport).run(beside_a_sum, messages=1_300, elements=elements)


# A lane over a network numbers what may come, and has 256 numbers open.
@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_messages_before_a_sum_that_waits_for_them(new_world: WorldFactory, transport: str) -> None:
    new_world(2, environment={"SENNIT_TRANSPORT": transport}).run(before_a_sum, messages=700)


@pytest.mark.parametrize("transport", ["shm", "udp"])
@pytest.mark.parametrize(
    ("messages", "limit_s"),
    [
        pytest.param(3_000, 100, id="3000"),
        pytest.param(36_000, LONG_S, marks=[pytest.mark.long, pytest.mark.timeout(LONG_S + 60)], id="36000"),
    ],
)
def test_a_message_behind_early_ones(new_world: WorldFactory, transport: str, messages: int, limit_s: float) -> None:
    world = new_world(2, environment={"SENNIT_TRANSPORT": transport}, timeout_s=limit_s)
    world.run_within(limit_s, behind_others, messages=messages)


@pytest.mark.parametrize(
    ("transport", "what", "ends"),
    briefly(
        [
            ("shm", "send", "abort"),
            ("shm", "send", "leave"),
            ("shm", "broadcast", "abort"),
            ("shm", "broadcast", "leave"),
            ("udp", "send", "abort"),
        ],
        [("shm", "send", "leave"), ("shm", "broadcast", "abort"), ("udp", "send", "abort")],
    ),
)
def test_what_nobody_took_is_not_sent(new_world: WorldFactory, transport: str, what: str, ends: str) -> None:
    world = new_world(2, environment={"SENNIT_TRANSPORT": transport})
    answer, _ = world.run(not_taken, what=what, ends=ends)
    assert answer is not None
    done_before, done = answer
    assert done_before <= done < 3_000
