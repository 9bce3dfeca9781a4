# SPDX-License-Identifier: Apache-2.0
"""torch.distributed backends in a benchmark worker: sennit and gloo, two groups over the same ranks."""

import datetime
import functools
import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist

import sennit  # noqa: F401  (registers the backend also where torch's autoload is switched off)
from sennit.runtime.backend import symmetric_empty
from sennit.testbed.bench.cases import Case, Collective
from sennit.testbed.bench.transport.library import mean_seconds

TIMEOUT = datetime.timedelta(seconds=60)
# The peer that is sennit with symmetric tensors.
SYMMETRIC = "symmetric"
# The peer that is sennit with another size in each call. So many sizes follow one another, each smaller by an element.
NEW_SIZES = "new-sizes"
SIZES_MAX = 1024


def _backend_of(peer: str) -> str:
    return "sennit" if peer in (SYMMETRIC, NEW_SIZES) else peer


class TorchLibrary:
    """One rank with a process group for each requested backend."""

    def __init__(self, rank: str, world: str, store_path: str) -> None:
        torch.set_num_threads(1)
        self.rank = int(rank)
        self.world = int(world)
        self._store_path = store_path
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._tensors: dict[Case, tuple[torch.Tensor, torch.Tensor]] = {}
        self._symmetric: dict[Case, tuple[torch.Tensor, torch.Tensor]] = {}
        self._views: dict[Case, list[torch.Tensor]] = {}

    def join(self, peer: str) -> None:
        peer = _backend_of(peer)
        if peer in self._groups:
            return
        if not dist.is_initialized():
            url = f"file://{self._store_path}"
            dist.init_process_group(peer, init_method=url, rank=self.rank, world_size=self.world, timeout=TIMEOUT)
            group = dist.group.WORLD
        else:
            group = dist.new_group(backend=peer, timeout=TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        self._groups[peer] = group

    def allocate(self, case: Case) -> None:
        if case not in self._tensors:
            # One case at a time, so that the benchmark itself holds two buffers only.
            self._tensors.clear()
            self._symmetric.clear()
            self._views.clear()
            given, got = case.elements(self.world)
            # Zeros stay zeros however often they are summed. `fill_` touches every page.
            self._tensors[case] = torch.empty(given).fill_(0.0), torch.empty(got).fill_(0.0)

    def run(self, peer: str, case: Case, iterations: int) -> float:
        self.allocate(case)
        if peer == NEW_SIZES:
            return mean_seconds(self._of_new_sizes(case), iterations)
        if peer == SYMMETRIC and case not in self._symmetric:
            given, got = (symmetric_empty(count).fill_(0.0) for count in case.elements(self.world))
            self._symmetric[case] = given, got
        tensors = self._symmetric if peer == SYMMETRIC else self._tensors
        return mean_seconds(self._operation(peer, case, *tensors[case]), iterations)

    def _operation(self, peer: str, case: Case, given: torch.Tensor, got: torch.Tensor) -> Callable[[], None]:
        group = self._groups[_backend_of(peer)]
        match case.collective:
            case Collective.ALLREDUCE:
                return functools.partial(dist.all_reduce, given, group=group)
            case Collective.ALLTOALL:
                return functools.partial(dist.all_to_all_single, got, given, group=group)
            case Collective.REDUCE_SCATTER:
                return functools.partial(dist.reduce_scatter_tensor, got, given, group=group)
            case Collective.ALL_GATHER:
                return functools.partial(dist.all_gather_into_tensor, got, given, group=group)

    def _of_new_sizes(self, case: Case) -> Callable[[], None]:
        """An allreduce of the whole vector first, then of ever shorter ones, at most by a 64th."""
        vector, _ = self._tensors[case]
        if case not in self._views:
            # To make a view takes torch as long as a small message takes.
            fewer = range(min(SIZES_MAX, vector.numel() // 64 + 1))
            self._views[case] = [vector[: vector.numel() - number] for number in fewer]
        views, group = itertools.cycle(self._views[case]), self._groups[_backend_of(NEW_SIZES)]

        def call() -> None:
            dist.all_reduce(next(views), group=group)

        return call

    def verify(self, peer: str, case: Case) -> None:
        given_count, got_count = case.elements(self.world)
        # Small whole numbers: float32 sums them exactly, in any order.
        position = torch.arange(given_count) % 1024
        empty = symmetric_empty if peer == SYMMETRIC else torch.empty
        given = empty(given_count).copy_(position + self.rank)
        got = empty(got_count).fill_(-1.0)
        self._operation(peer, case, given, got)()
        part = got_count // self.world
        ranks = range(self.world)
        match case.collective:
            case Collective.ALLREDUCE:
                got, expected = given, (position * self.world + sum(ranks)).float()
            case Collective.ALLTOALL:
                mine = position[self.rank * part : (self.rank + 1) * part]
                expected = torch.cat([(mine + rank).float() for rank in ranks])
            case Collective.REDUCE_SCATTER:
                mine = position[self.rank * got_count : (self.rank + 1) * got_count]
                expected = (mine * self.world + sum(ranks)).float()
            case Collective.ALL_GATHER:
                expected = torch.cat([(position + rank).float() for rank in ranks])
        if not torch.equal(got, expected):
            wrong = int((got != expected).sum())
            raise RuntimeError(f"{peer} {case.collective} of {case.size_bytes} bytes: {wrong} wrong elements")

    def stop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
