# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr,assignment,type-arg,func-returns-value"
"""The arguments alone determine which program a collective runs: host and device calls in random timing.

All ranks draw the calls from one shared seed. Each rank draws its own times of calls and durations of copies.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sennit.transport.plans.arithmetic import fold
from sennit.transport.plans.elements import Dtype, ReduceOp
from tests import extent
from tests.runtime.device_stand_in import delayed_copies, on_device
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)
# Elements of fp32: more than a staging buffer of device memory holds (2 MiB).
LARGE = (600_000, 900_000)
SMALL = (0, 2_000)
POOL = 1_000_003
# Sleeps, not yields: beside a busy process each yield costs a time slice.
COPY_DELAY_US = 60
CALL_DELAYS_US = (0, 0, 10, 100)
Check = Callable[[], bool]


@dataclass(frozen=True)
class Posted:
    name: str
    work: dist.Work
    check: Check


class Data:
    """The inputs of every rank, made from one seed, so that each rank can compute the expected result."""

    def __init__(self, world: int) -> None:
        generator = np.random.default_rng(1)
        self._pools = [generator.standard_normal(POOL).astype(np.float32) for _ in range(world)]

    def of(self, peer: int, first: int, elements: int) -> torch.Tensor:
        return torch.from_numpy(self._pools[peer][first : first + elements])

    def sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
        operands = [part.numpy().view(np.uint8) for part in parts]
        folded = fold(operands, Dtype.F32, ReduceOp.SUM)
        return torch.from_numpy(folded.view(np.float32))


def post(draw: random.Random, data: Data, rank: int, world: int, is_large: bool, is_device: bool) -> Posted:
    """Posts one collective, drawn from `draw`. Every rank calls it with the same state of `draw`."""
    kind = draw.choice(("all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all"))
    elements = draw.randint(*(LARGE if is_large else SMALL))
    first = draw.randint(0, POOL - LARGE[1])
    name = f"{kind} of {elements} elements on the {'device' if is_device else 'host'}"
    own = data.of(rank, first, elements)
    with on_device(is_device):
        if kind == "all_reduce":
            tensor = own.clone()
            work = dist.all_reduce(tensor, async_op=True)
            return Posted(name, work, lambda: same(tensor, data.sum(contributions(data, world, first, elements))))
        if kind == "broadcast":
            root = draw.randrange(world)
            tensor = own.clone()
            work = dist.broadcast(tensor, root, async_op=True)
            return Posted(name, work, lambda: same(tensor, data.of(root, first, elements)))
        share = elements // world
        if kind == "all_gather":
            output = torch.empty(share * world)
            work = dist.all_gather_single(output, own[:share].clone(), async_op=True)
            return Posted(name, work, lambda: same(output, torch.cat(contributions(data, world, first, share))))
        if kind == "reduce_scatter":
            output = torch.empty(share)
            work = dist.reduce_scatter_single(output, own[: share * world].clone(), async_op=True)
            begin = first + rank * share
            return Posted(name, work, lambda: same(output, data.sum(contributions(data, world, begin, share))))
        splits = [cut(draw, elements, world) for _ in range(world)]
        received = [splits[peer][rank] for peer in range(world)]
        output = torch.empty(sum(received))
        work = dist.all_to_all_single(output, own.clone(), received, splits[rank], async_op=True)
        offsets = [first + sum(splits[peer][:rank]) for peer in range(world)]
        parts = [data.of(peer, offsets[peer], received[peer]) for peer in range(world)]
        return Posted(name, work, lambda: same(output, torch.cat(parts)))


def contributions(data: Data, world: int, first: int, elements: int) -> list[torch.Tensor]:
    return [data.of(peer, first, elements) for peer in range(world)]


def cut(draw: random.Random, elements: int, world: int) -> list[int]:
    """Returns splits that add up to `elements`. Some are empty, and some have nearly everything."""
    bounds = sorted(draw.choice((0, elements, draw.randint(0, elements))) for _ in range(world - 1))
    return [high - low for low, high in zip([0, *bounds], [*bounds, elements], strict=True)]


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.int32), expected.view(torch.int32))


def run_schedule(data: Data, rank: int, world: int, seed: int) -> None:
    draw = random.Random(seed)
    timing = random.Random(seed * world + rank)
    # A busy lane could make ranks run different programs for a large call, so each kind of memory has one.
    sizes = [(True, True), (True, False), *((False, draw.random() < 0.5) for _ in range(draw.randint(1, 4)))]
    draw.shuffle(sizes)
    posted = []
    with delayed_copies(timing.getrandbits(64), COPY_DELAY_US):
        for is_large, is_device in sizes:
            posted.append(post(draw, data, rank, world, is_large, is_device))
            if delay_us := timing.choice(CALL_DELAYS_US):
                time.sleep(delay_us * 1e-6)
        timing.shuffle(posted)
        for call in posted:
            call.work.wait()
    for call in posted:
        assert call.check(), f"{call.name} has a wrong result"


def mixed_schedules(rank: int, world: int, seed: int, count: int) -> None:
    data = Data(world)
    for number in range(seed, seed + count):
        try:
            run_schedule(data, rank, world, number)
        except BaseException as error:
            error.add_note(f"seed {number}")
            raise


# Sockets are slower. There a receiver also grants memory to one message after the other.
@pytest.mark.parametrize(("transport", "schedules"), [("shm", extent.number(25)), ("udp", extent.number(8))])
def test_mixed_schedules(kept_world: WorldFactory, transport: str, schedules: int, seed: int) -> None:
    kept_world(3, transport).run_within(170.0, mixed_schedules, seed=seed, count=schedules)
