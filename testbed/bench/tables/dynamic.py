# SPDX-License-Identifier: Apache-2.0
# Torch types some functions thinly:
# mypy: disable-error-code="no-untyped-call"
"""`sennit bench dynamic`: steps of a dynamic table on one core, beside a fixed table and what people write by hand.

A step looks up bags of ids and updates their rows. The fixed table gets the numbers of rows where the dynamic one gets
ids of 64 bits. By hand means a dict from ids to rows, `nn.EmbeddingBag(sparse=True)` and `torch.optim.SparseAdam`. With
TorchRec, its managed collisions are in place of the dict.
Growth means steps that fill an empty table: all of their ids are new.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table as Lines
from torch import Tensor, nn

from sennit.runtime.backend.torch_versions import HashStore
from sennit.runtime.calibrate.machine import describe, one_core
from sennit.runtime.data.packages import require
from sennit.runtime.sharded import ShardedEmbeddingBags, Table

RATE: Final = 0.01
FIXED, BY_HAND = "fixed table", "dict, EmbeddingBag, SparseAdam"
TORCHREC = "TorchRec's managed collisions, EmbeddingBag, SparseAdam"
EVICTION_STEPS: Final = 16
"""After so many steps TorchRec gives rows to the ids that came in them. It sorts all ids then: that is in no median."""

BATCHES: Final = 8
"""Different batches, which come in turns."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One table and its batches."""

    rows: int
    dim: int
    bags: int
    length: int
    load: float
    """Of the rows, the share that ids have."""

    new: float = 0.0
    """Of the ids of a batch, the share that has never come before."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A shape beside one peer."""

    shape: Shape
    optimizer: str
    peer: str
    step_s: dict[str, list[float]]
    """Processor seconds of each step, ours and the peer's."""

    @property
    def ratio(self) -> float:
        """The median over turns of the peer's time / ours. Above 1 sennit is faster."""
        pairs = zip(self.step_s[self.peer], self.step_s["sennit"], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


@dataclass(frozen=True, kw_only=True)
class Growth:
    """An empty table that fills."""

    shape: Shape
    step_s: list[float]
    """Processor seconds of each step."""

    @property
    def longest(self) -> float:
        """The longest step against the median."""
        return max(self.step_s) / statistics.median(self.step_s)


class Ids:
    """Batches of ids, [bags, length], and the row that each has in a fixed table."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape, self._draw = shape, torch.Generator().manual_seed(seed)
        count = int(shape.rows * shape.load)
        self.known = torch.randint(-(2**62), 2**62, (count,), generator=self._draw)
        size = (shape.bags, shape.length)
        self._places = [torch.randint(count, size, generator=self._draw) for _ in range(BATCHES)]

    def of(self, number: int) -> tuple[Tensor, Tensor]:
        """The ids of a batch, and their rows in a fixed table."""
        places = self._places[number % BATCHES]
        ids = self.known[places]
        if self._shape.new:
            is_new = torch.rand(ids.shape, generator=self._draw) < self._shape.new
            ids = torch.where(is_new, torch.randint(-(2**62), 2**62, ids.shape, generator=self._draw), ids)
        return ids, places


def run(
    *, rows: int, dim: int, bags: int, length: int, rounds: int, seed: int, torchrec: bool = False
) -> tuple[list[Result], Growth]:
    """`torchrec`: beside its managed collisions, too. Raises `MissingPackage` if it is not there."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    size: dict[str, Any] = {"rows": rows, "dim": dim, "bags": bags, "length": length}
    try:
        with one_core():
            found = [
                _beside(Shape(**size, load=load, new=new), "row_wise_adagrad", FIXED, rounds, seed)
                for load, new in ((0.8, 0.0), (0.95, 0.0), (0.95, 0.02))
            ]
            for peer in (BY_HAND, TORCHREC) if torchrec else (BY_HAND,):
                found.append(_beside(Shape(**size, load=0.8), "adam", peer, rounds, seed))
            return found, _growth(Shape(**size, load=0.95, new=1.0), seed)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def _beside(shape: Shape, optimizer: str, peer: str, rounds: int, seed: int) -> Result:
    ids = Ids(shape, seed)
    ours = _module(shape, optimizer, ids="dynamic")
    # All known ids have rows, in the order in which they come.
    for part in ids.known.split(shape.bags * shape.length):
        step_of(ours, part.view(-1, 1))
    steps: dict[str, Callable[[Tensor], None]] = {"sennit": lambda given: step_of(ours, given)}
    if peer == FIXED:
        fixed = _module(shape, optimizer)
        steps[peer] = lambda rows: step_of(fixed, rows)
    else:
        steps[peer] = _with_torch(shape, _dict(ids) if peer == BY_HAND else managed(shape, ids))
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + BATCHES):
        names = list(steps)[:: 1 if number % 2 else -1]
        for name in names:
            # Drawing ids is not a part of a step.
            drawn, rows = ids.of(number)
            given = rows if name == FIXED else drawn
            # Of the processor: a busy machine then adds little. One thread does all the work.
            began_s = time.process_time()
            steps[name](given)
            if number >= BATCHES:
                taken[name].append(time.process_time() - began_s)
    return Result(shape=shape, optimizer=optimizer, peer=peer, step_s=taken)


def _growth(shape: Shape, seed: int) -> Growth:
    module, taken = _module(shape, "row_wise_adagrad", ids="dynamic"), []
    # The first steps of a module make things that stay.
    warm = _module(shape, "row_wise_adagrad", ids="dynamic")
    batches = Ids(shape, seed).known.split(shape.bags * shape.length)
    for part in batches[:2]:
        step_of(warm, part.view(-1, 1))
    for part in batches[:-1] if len(batches) > 1 else batches:
        began_s = time.process_time()
        step_of(module, part.view(-1, 1))
        taken.append(time.process_time() - began_s)
    return Growth(shape=shape, step_s=taken)


def _module(shape: Shape, optimizer: str, **options: Any) -> ShardedEmbeddingBags:
    table = Table(name="id", rows=shape.rows, dim=shape.dim, optimizer=optimizer, **options)
    return ShardedEmbeddingBags([table], lr=RATE, gradients="sum")


def step_of(module: ShardedEmbeddingBags, ids: Tensor) -> None:
    """Looks up bags of ids, int64 [bags, length], and updates their rows."""
    module({"id": ids})["id"].sum().backward()


def _dict(ids: Ids) -> Callable[[Tensor], Tensor]:
    """The rows of ids, int64 [n] both."""
    row_of = {one: row for row, one in enumerate(ids.known.tolist())}
    return lambda given: torch.tensor([row_of[one] for one in given.tolist()])


def managed(shape: Shape, ids: Ids) -> Callable[[Tensor], Tensor]:
    """The same by TorchRec, after the steps in which it has given rows to all ids."""
    require("torchrec", package="torchrec", purpose="its managed collisions")
    from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule
    from torchrec.sparse.jagged_tensor import JaggedTensor

    module = MCHManagedCollisionModule(
        zch_size=shape.rows,
        device=torch.device("cpu"),
        eviction_policy=LRU_EvictionPolicy(),
        eviction_interval=EVICTION_STEPS,
    )

    def rows_of(given: Tensor) -> Tensor:
        one_each = JaggedTensor(values=given, lengths=torch.ones(len(given), dtype=torch.int64))
        rows: Tensor = module({"id": one_each})["id"].values()
        return rows

    for part in ids.known.split(-(-len(ids.known) // EVICTION_STEPS)):
        rows_of(part)
    found = rows_of(ids.known)
    assert len(found.unique()) == len(ids.known.unique()), "some known ids share rows"
    return rows_of


def _with_torch(shape: Shape, rows_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    bag = nn.EmbeddingBag(shape.rows, shape.dim, mode="sum", sparse=True)
    optimizer = torch.optim.SparseAdam(list(bag.parameters()), lr=RATE)

    def step(given: Tensor) -> None:
        rows = rows_of(given.flatten()).view(given.shape)
        optimizer.zero_grad()
        bag(rows).sum().backward()
        optimizer.step()

    return step


def render(found: list[Result], growth: Growth, console: Console) -> None:
    lines = Lines(box=None, pad_edge=False)
    for name in ("rows in use", "new ids", "optimizer", "peer"):
        lines.add_column(name, no_wrap=True)
    for name in ("peer / sennit", "sennit, ms", "peer, ms"):
        lines.add_column(name, justify="right")
    for one in found:
        ours, theirs = (statistics.median(one.step_s[name]) for name in ("sennit", one.peer))
        lines.add_row(
            f"{one.shape.load:.0%}",
            f"{one.shape.new:.0%}",
            one.optimizer,
            one.peer,
            f"{one.ratio:.2f}×",
            f"{ours * 1e3:.3g}",
            f"{theirs * 1e3:.3g}",
        )
    console.print(lines)
    steps = f"{len(growth.step_s)} steps of new ids alone, until {growth.shape.load:.0%} of rows are in use"
    console.print(f"growth: {steps}; longest / median {growth.longest:.2f}×", soft_wrap=True)


def as_json(found: list[Result], growth: Growth, **settings: int) -> dict[str, Any]:
    return {
        "machine": describe(),
        "settings": settings,
        "results": [
            {
                "load": one.shape.load,
                "new_ids": one.shape.new,
                "optimizer": one.optimizer,
                "peer": one.peer,
                "peer_over_sennit": one.ratio,
                "step_s": one.step_s,
            }
            for one in found
        ],
        "growth": {"load": growth.shape.load, "longest_over_median": growth.longest, "step_s": growth.step_s},
    }
