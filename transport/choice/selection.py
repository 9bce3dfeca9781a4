# SPDX-License-Identifier: Apache-2.0
"""Which algorithm a collective runs: that of the cost model (cost_model.py), or the one that `SENNIT_ALGORITHM` names.

All algorithms of a reduction compute the same tree (tree.py), so a choice never changes a bit of a result. It depends
on the call and the group alone. So all ranks make the same one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sennit.transport import algorithms
from sennit.transport.algorithms.leaves import Leaves
from sennit.transport.choice.cost_model import Work, stream_count, work_of
from sennit.transport.choice.costs import NETWORK, SHARED_MEMORY, Collective, Costs
from sennit.transport.config import Algorithm
from sennit.transport.light_tuple import LightTuple
from sennit.transport.plans.elements import Dtype, ReduceOp, accumulator
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Plan

# Algorithms whose plans can be on device (device_plan.py).
ON_DEVICE: Final = (Algorithm.ONE_SHOT, Algorithm.DIRECT)
# Collectives whose algorithm depends on their size rounded up to a power of two.
OF_PARTS: Final = (Collective.ALLGATHER, Collective.GATHER, Collective.ALLTOALL)
# All classes below the largest size that a tensor can have.
SIZE_CLASSES: Final = 63


def size_class(size_bytes: int) -> int:
    """Returns the number of a size, rounded up to a power of two."""
    return max(size_bytes - 1, 0).bit_length()


def grade(size_bytes: int) -> int:
    """Returns the number of a size, rounded up to one of four sizes between two powers of two."""
    shift = max((size_bytes - 1).bit_length() - 3, 0) if size_bytes else 0
    return 4 * shift + (-(-size_bytes >> shift) if shift else size_bytes)


def grade_bytes(number: int) -> int:
    """Returns the largest size of a grade."""
    shift = max((number - 5) // 4, 0)
    return number - 4 * shift << shift


class Selection(LightTuple):
    """Which algorithm each collective of a group runs, and the plans of reductions."""

    hosts: Hosts
    """The ranks of the group. Those of a host use shared memory with each other, others the network."""
    forced: Algorithm | None = None
    """Runs wherever it can. Elsewhere the direct algorithm runs."""
    near: Costs = SHARED_MEMORY
    far: Costs = NETWORK
    has_aggregator: bool = False

    def rate(
        self,
        collective: Collective,
        *,
        size_bytes: int,
        partial_ratio: float = 1,
        leaves: Leaves | None = None,
        candidates: Sequence[Algorithm] = tuple(Algorithm),
    ) -> dict[Algorithm, Work]:
        """Returns the work of each algorithm that runs for this vector, in their order."""
        rated = {}
        for algorithm in candidates:
            if algorithm is Algorithm.AGGREGATE and not self.has_aggregator:
                continue
            work = work_of(
                algorithm,
                collective,
                hosts=self.hosts,
                size_bytes=size_bytes,
                partial_ratio=partial_ratio,
                leaves=leaves,
            )
            if work is not None:
                rated[algorithm] = work
        return rated

    def choose(self, rated: Mapping[Algorithm, Work]) -> Algorithm:
        """Returns the algorithm to run."""
        if self.forced is not None:
            return self.forced if self.forced in rated else Algorithm.DIRECT
        return min(rated, key=lambda algorithm: rated[algorithm].seconds(self.near, self.far))

    def allreduce(
        self,
        *,
        world: int,
        rank: int,
        elements: int,
        dtype: Dtype,
        op: ReduceOp,
        in_place: bool = True,
        leaves: int | None = None,
        partial: bool = False,
        on_device: bool = False,
        counted: bool = False,
    ) -> Plan:
        """Returns a plan with the buffers and the result of `algorithms.allreduce`, and its `counted`."""
        compile_plan: Callable[..., Plan]
        candidates = ON_DEVICE if on_device else tuple(Algorithm)
        if not in_place:
            # To lend, a rank would have to copy its vector first. That costs more than the round trips save.
            candidates = tuple(each for each in candidates if each is not Algorithm.ROUND_TRIP)
        if self.has_aggregator and not algorithms.is_summed(world, dtype, op, leaves, partial=partial):
            candidates = tuple(each for each in candidates if each is not Algorithm.AGGREGATE)
        given = None if leaves is None else Leaves(world, leaves, partial=partial)
        match self._choose(Collective.ALLREDUCE, elements, dtype, candidates, given):
            case Algorithm.ONE_SHOT:
                compile_plan = functools.partial(algorithms.allreduce, one_shot=True)
            case Algorithm.ROUND_TRIP:
                return algorithms.allreduce_round_trip(
                    world=world, rank=rank, elements=elements, dtype=dtype, op=op, counted=counted
                )
            case Algorithm.AGGREGATE:
                compile_plan = algorithms.allreduce_aggregated
            case Algorithm.DISSEMINATION:
                compile_plan = algorithms.allreduce_dissemination
            case Algorithm.HALVING:
                compile_plan = algorithms.allreduce_halving
            case Algorithm.HIERARCHICAL:
                compile_plan = functools.partial(algorithms.allreduce, hosts=self.hosts)
            case _:
                compile_plan = algorithms.allreduce
        return compile_plan(
            world=world,
            rank=rank,
            elements=elements,
            dtype=dtype,
            op=op,
            in_place=in_place,
            leaves=leaves,
            partial=partial,
            counted=counted,
        )

    def reduce_scatter(
        self,
        *,
        world: int,
        rank: int,
        counts: Sequence[int],
        dtype: Dtype,
        op: ReduceOp,
        list_input: bool = False,
        on_device: bool = False,
    ) -> Plan:
        """Returns a plan with the buffers and the result of `algorithms.reduce_scatter`."""
        compile_plan: Callable[..., Plan] = algorithms.reduce_scatter
        candidates = ON_DEVICE if on_device else tuple(Algorithm)
        match self._choose(Collective.REDUCE_SCATTER, sum(counts), dtype, candidates):
            case Algorithm.HALVING:
                compile_plan = algorithms.reduce_scatter_halving
            case Algorithm.HIERARCHICAL:
                compile_plan = functools.partial(algorithms.reduce_scatter, hosts=self.hosts)
        return compile_plan(world=world, rank=rank, counts=counts, dtype=dtype, op=op, list_input=list_input)

    def reduce(
        self,
        *,
        world: int,
        rank: int,
        elements: int,
        dtype: Dtype,
        op: ReduceOp,
        root: int,
        in_place: bool = True,
        on_device: bool = False,
        counted: bool = False,
    ) -> Plan:
        """Returns a plan with the buffers and the result of `algorithms.reduce`, and its `counted`."""
        candidates = ON_DEVICE if on_device else tuple(Algorithm)
        in_tree = self._choose(Collective.REDUCE, elements, dtype, candidates) is Algorithm.TREE
        compile_plan: Callable[..., Plan] = algorithms.reduce_tree if in_tree else algorithms.reduce
        return compile_plan(
            world=world,
            rank=rank,
            elements=elements,
            dtype=dtype,
            op=op,
            root=root,
            in_place=in_place,
            counted=counted,
        )

    def broadcast(self, **call: Any) -> Plan:
        """Returns a plan with the arguments of `algorithms.broadcast`."""
        return algorithms.broadcast(hosts=self.hosts, **call)

    def of_parts(self, collective: Collective, size_bytes: int) -> Algorithm:
        """Returns the algorithm of an allgather, of a gather or alltoall of equal parts, or of a reduce_scatter of
        uneven shares, for `size_bytes` in all.

        It is the same for all sizes that round up to one power of two.
        """
        return self.choose(self.rate(collective, size_bytes=1 << size_class(size_bytes)))

    def staged_classes(self, collective: Collective) -> int:
        """Returns a bit for each size class in which `of_parts` is not the direct algorithm."""
        return sum(
            1 << number
            for number in range(1, SIZE_CLASSES)
            if self.of_parts(collective, 1 << number) is not Algorithm.DIRECT
        )

    def allgather(self, *, staged: bool, **call: Any) -> Plan:
        """Returns a plan with the arguments of `algorithms.allgather`; with `staged` one that is not direct.

        Such a plan serves all sizes. A group has only one: where hosts have several ranks, a ring sends as many bytes
        between them as by host, in more rounds.
        """
        if staged and self.hosts.are_shared:
            return algorithms.allgather_by_host(hosts=self.hosts, **call)
        return algorithms.allgather(ring=staged, **call)

    def alltoall(self, *, world: int, rank: int, size_class: int, item_bytes: int, type_code: int) -> Plan:
        """Returns a plan that is not direct, for equal parts of `1 << size_class` bytes in all, or less.

        Count: the elements of a part. Buffers: `[input, output]`.
        """
        compile_plan: Callable[..., Plan] = algorithms.alltoall_bruck
        part_bytes_max = (1 << size_class) // world
        if self.of_parts(Collective.ALLTOALL, 1 << size_class) is Algorithm.HIERARCHICAL:
            streams = stream_count(self.hosts, part_bytes_max)
            compile_plan = functools.partial(algorithms.alltoall_by_host, hosts=self.hosts, streams=streams)
        return compile_plan(
            world=world, rank=rank, part_bytes_max=part_bytes_max, item_bytes=item_bytes, type_code=type_code
        )

    def _choose(
        self,
        collective: Collective,
        elements: int,
        dtype: Dtype,
        candidates: Sequence[Algorithm],
        leaves: Leaves | None = None,
    ) -> Algorithm:
        # The algorithms refuse a negative number, with the reason.
        if elements < 0:
            return Algorithm.DIRECT
        rated = self.rate(
            collective,
            size_bytes=grade_bytes(grade(elements * dtype.item_bytes)),
            partial_ratio=accumulator(dtype).item_bytes / dtype.item_bytes,
            leaves=leaves,
            candidates=candidates,
        )
        return self.choose(rated)
