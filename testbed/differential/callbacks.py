# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr,type-arg,func-returns-value"
"""Random programs whose callbacks wait, post, lock, sleep and throw, over several groups, some of which are aborted.

`python -m sennit.testbed.differential --callbacks --calls 100000`. All ranks draw the same programs from the seed, and
each dawdles at places of its own. Values are such that the result of each call is known. A call that ends well must
have this result, also after an abort, and no barrier may end well that a rank never called. Without an abort, every
call must end well.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from sennit.errors import SennitError
from sennit.runtime.backend.torch_versions import backend_of
from sennit.testbed.differential.outcomes import Differs

LIMIT: Final = timedelta(seconds=60)
SIZES: Final = (1, 7, 1_000, 1_000, 20_000)
COLLECTIVES: Final = (
    "all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "barrier",
)  # fmt: skip
ACTIONS: Final = ("", "", "", "post", "post", "wait", "wait", "lock", "sleep", "throw")


class Thrown(SennitError):
    """What a throwing callback throws."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A call, and what its callback does."""

    number: int
    kind: str
    size: int
    root: int
    action: str
    children: Sequence[Node]


def drawn(rng: random.Random, ranks: int, numbers: list[int], depth: int, in_message: bool = False) -> Node:
    """Callbacks of messages post messages only: collectives would have no order."""
    kind = "message" if in_message or rng.random() < 0.25 else rng.choice(COLLECTIVES)
    action = rng.choice(ACTIONS)
    numbers[0] += 1
    node = {"number": numbers[0], "kind": kind, "size": rng.choice(SIZES), "root": rng.randrange(ranks)}
    count = rng.randrange(1, 4) if depth and action in ("post", "wait") else 0
    below = tuple(drawn(rng, ranks, numbers, depth - 1, kind == "message") for _ in range(count))
    return Node(**node, action=action, children=below)


class Run:
    """One rank's run of a program on a group."""

    def __init__(self, group: Any, rank: int, size: int, own: random.Random) -> None:
        self.group, self.rank, self.size, self.own = group, rank, size, own
        self.lock = threading.Lock()
        self.made: list[tuple[Node, torch.Tensor, torch.Tensor, list[Any], Any]] = []
        """Node, output, the output as it must be, works, and the future of its callback or None."""
        self.passed: set[int] = set()
        """Numbers of the barriers that ended well."""

    def post(self, node: Node) -> list[Any]:
        """Posts the call of `node`, and asks for its callback."""
        value, size, n = float(node.number), node.size, self.size
        given = torch.full((size,), value * (self.rank + 1))
        out, expected = given, torch.full((size,), value * n * (n + 1) / 2)
        works: list[Any] = []
        with self.lock:  # callbacks take it, too
            if node.kind == "message":
                out, expected = torch.zeros(size), torch.full((size,), value * ((self.rank - 1) % n + 1))
                right, left = (self.rank + 1) % n, (self.rank - 1) % n
                works.append(dist.isend(given, group=self.group, group_dst=right, tag=node.number))
                works.append(dist.irecv(out, group=self.group, group_src=left, tag=node.number))
            elif node.kind == "all_reduce":
                works.append(dist.all_reduce(out, group=self.group, async_op=True))
            elif node.kind == "broadcast":
                expected = torch.full((size,), value * (node.root + 1))
                works.append(dist.broadcast(out, group=self.group, group_src=node.root, async_op=True))
            elif node.kind == "all_gather_single":
                out = torch.zeros(size * n)
                expected = value * torch.arange(1.0, n + 1).repeat_interleave(size)
                works.append(dist.all_gather_single(out, given, group=self.group, async_op=True))
            elif node.kind == "reduce_scatter_single":
                out, expected = torch.zeros(size), expected * (self.rank + 1)
                parts = given * torch.arange(1.0, n + 1).unsqueeze(1)
                works.append(dist.reduce_scatter_single(out, parts.flatten(), group=self.group, async_op=True))
            elif node.kind == "all_to_all_single":
                out = torch.zeros(size * n)
                expected = value * (self.rank + 1) * torch.arange(1.0, n + 1).repeat_interleave(size)
                parts = given * torch.arange(1.0, n + 1).unsqueeze(1)
                works.append(dist.all_to_all_single(out, parts.flatten(), group=self.group, async_op=True))
            else:
                out = expected = torch.zeros(0)
                works.append(dist.barrier(group=self.group, async_op=True))
        future = works[-1].get_future().then(lambda done: self.called(node, done)) if node.action else None
        self.made.append((node, out, expected, works, future))
        return works

    def called(self, node: Node, done: Any) -> None:
        self.dawdle()
        done.value()
        if node.action == "lock":
            with self.lock:
                return
        if node.action == "sleep":
            time.sleep(self.own.random() * 0.001)
        if node.action == "throw":
            raise Thrown
        for child in node.children:
            works = self.post(child)
            if node.action == "wait":
                for work in works:
                    work.get_future().wait() if node.number % 2 and not child.action else work.wait()

    def dawdle(self) -> None:
        if self.own.random() < 0.02:
            time.sleep(self.own.random() * 0.002)

    def finish(self, is_aborted: bool) -> Counter[str]:
        """Waits for all calls and callbacks. Returns how often each outcome was. Raises Differs."""
        seen: Counter[str] = Counter()
        # A callback has added its calls when its future is complete.
        for node, out, expected, works, future in self.made:
            errors = []
            for wait in (*([future.wait] if future is not None else ()), *(work.wait for work in works)):
                try:
                    wait()
                except Exception as error:
                    if not (node.action == "throw" and "Thrown" in repr(error)):
                        errors.append(f"{type(error).__name__}: {error}")
            if errors and not is_aborted:
                raise Differs(f"{node.kind} {node.number} ended with {errors[0]}")
            if not errors and not torch.equal(out, expected):
                raise Differs(f"{node.kind} {node.number} gave {out[:4].tolist()}; expected {expected[:4].tolist()}")
            if node.kind == "barrier" and not errors:
                self.passed.add(node.number)
            seen["failed after an abort" if errors else "right"] += 1
        return seen


def check_barriers(run: Run | None, world: int) -> None:
    """Raises Differs if a barrier of an aborted group ended well on this rank, and another rank never called it.

    Every rank of the default group has to call this, with None if it is not in the aborted group.
    """
    called: list[set[int] | None] = [None] * world
    dist.all_gather_object(called, None if run is None else {made[0].number for made in run.made})
    for number in () if run is None else run.passed:
        if absent := [rank for rank, numbers in enumerate(called) if numbers is not None and number not in numbers]:
            raise Differs(f"barrier {number} ended well, but rank {absent[0]} never called it")


def stress(rank: int, world: int, *, calls: int, seed: int, first: int = 0) -> dict[str, int]:
    """Runs programs from number `first` until `calls` calls were made on all ranks together, as this rank counts them.

    Every rank of the default group has to call this. Returns how often this rank saw each outcome.
    """
    members = [list(range(world))] * 2 + ([[0, world - 1], list(range(1, world))] if world > 2 else [])
    groups = [dist.new_group(ranks, timeout=LIMIT) for ranks in members]
    outcomes: Counter[str] = Counter()
    number, made = first, 0
    while made < calls:
        rng = random.Random(f"{seed}/{number}")
        numbers = [0]
        # Programs of several groups run side by side; one of them may be aborted by one of its ranks.
        chosen = rng.sample(range(len(groups)), rng.choice((1, 1, 2)))
        programs = [[drawn(rng, len(members[i]), numbers, 2) for _ in range(rng.randrange(1, 12))] for i in chosen]
        aborted = chosen[0] if rng.random() < 0.03 else -1
        aborter, at = rng.choice(members[chosen[0]]), rng.randrange(len(programs[0]))
        if aborted >= 0:
            # A rank that has ended the program before must not abort what others still have in flight of it.
            dist.barrier()
        own = random.Random(f"{seed}/{number}/{rank}")
        runs = {i: Run(groups[i], members[i].index(rank), len(members[i]), own) for i in chosen if rank in members[i]}
        for place in range(max(map(len, programs))):
            for index, program in zip(chosen, programs, strict=True):
                if index not in runs or place >= len(program):
                    continue
                runs[index].dawdle()
                if index == aborted and rank == aborter and place == at:
                    backend_of(groups[index], torch.device("cpu")).abort()
                try:
                    runs[index].post(program[place])
                except RuntimeError:
                    if index != aborted:
                        raise
        try:
            for index, run in runs.items():
                outcomes += run.finish(index == aborted)
            if aborted >= 0:
                check_barriers(runs.get(aborted), world)
        except Differs as error:
            raise Differs(f"{error} (--callbacks --seed {seed} --first {number} --ranks {world})") from None
        if aborted >= 0:
            if aborted in runs:
                dist.destroy_process_group(groups[aborted])
            groups[aborted] = dist.new_group(members[aborted], timeout=LIMIT)
        made += numbers[0] * world
        number += 1
    for group, ranks in zip(groups, members, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)
    return dict(outcomes)
