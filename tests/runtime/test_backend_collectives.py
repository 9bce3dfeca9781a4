# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="assignment"
"""Every collective with every type and operation, over every local transport, in worlds of 2 to 4."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sennit.runtime.backend.process_group import Options, PlanCompiler
from sennit.runtime.sharded.module import ShardedEmbeddingBags
from sennit.runtime.sharded.placement import placed
from sennit.runtime.sharded.tables import Table
from sennit.transport.plans.signature import Kind
from tests.extent import briefly
from tests.runtime.collective_checks import (
    coalesced,
    groups_with_few_descriptors,
    groups_without_records,
    in_place,
    leaves,
    many_in_flight,
    movements,
    objects,
    point_to_point,
    reductions,
    sparse,
    synchronous,
    uneven_allgather,
    uneven_alltoall,
    uneven_reduce_scatter,
)
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)


def numbers_of_all(world: int, elements: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-9_000, 9_000, (elements,), dtype=torch.int16, generator=generator) for _ in range(world)]


@contextlib.contextmanager
def compilations() -> Iterator[list[Any]]:
    """The shapes of plans that C++ asks Python for."""
    compiled: list[Any] = []
    compile_plan = PlanCompiler.__call__

    def counting(self: PlanCompiler, *shape: Any) -> bytes:
        compiled.append(shape)
        return compile_plan(self, *shape)

    PlanCompiler.__call__ = counting
    try:
        yield compiled
    finally:
        PlanCompiler.__call__ = compile_plan


def new_counts(rank: int, world: int, seed: int) -> None:
    """Calls with counts never seen before do not enter Python: the plan of the first call serves all. Of a
    reduce_scatter it serves shares of as many pieces."""

    def call_all(rows: int) -> None:
        table = [[rows + 3 * source + target for target in range(world)] for source in range(world)]
        given = torch.cat([torch.full((table[rank][other],), 10.0 * rank + other) for other in range(world)])
        received = [torch.full((table[other][rank],), 10.0 * other + rank) for other in range(world)]
        output = torch.empty(sum(part.numel() for part in received))
        dist.all_to_all_single(output, given, [part.numel() for part in received], table[rank])
        assert torch.equal(output, torch.cat(received))
        parts = [torch.empty(table[other][0]) for other in range(world)]
        dist.all_gather(parts, torch.full((table[rank][0],), float(rank)))
        assert all(torch.equal(part, torch.full_like(part, other)) for other, part in enumerate(parts))
        shares = [rows + 3 * target for target in range(world)]
        mine = torch.empty(shares[rank])
        dist.reduce_scatter(mine, [torch.full((share,), float(rank + 1)) for share in shares])
        assert torch.equal(mine, torch.full_like(mine, world * (world + 1) / 2))
        if rank == 0:
            dist.send(torch.full((rows,), 5.0), 1)
        elif rank == 1:
            landed = torch.empty(rows)
            dist.recv(landed, 0)
            assert torch.equal(landed, torch.full((rows,), 5.0))

    with compilations() as compiled:
        # Of shares up to 128 KiB, and up to 256 KiB. An allgather may be direct or not.
        for rows in (5, 40_100):
            call_all(rows)
        # A world that is kept may know the plans already.
        assert len(compiled) <= 6
        compiled.clear()
        for rows in (1, 977, 40_013, 0):
            call_all(rows)
        assert not compiled


def new_sizes(rank: int, world: int, seed: int) -> None:
    """Vectors of a size never seen before do not enter Python, if one of their grade has been here."""

    def call_all(elements: int) -> None:
        parts = numbers_of_all(world, elements, seed)
        for root in (None, 0, world - 1):
            tensor = parts[rank].clone()
            dist.all_reduce(tensor) if root is None else dist.reduce(tensor, root)
            if root in (None, rank):
                assert torch.equal(tensor, torch.stack(parts).sum(0, dtype=torch.int16))
        moved = parts[rank].clone()
        dist.broadcast(moved, world - 1)
        assert torch.equal(moved, parts[-1])

    largest = (0, 1, 5 * 2**8, 5 * 2**15, 7 * 2**18)
    with compilations() as compiled:
        for elements in largest:
            call_all(elements)
        assert len(compiled) <= 4 * len(largest)
        compiled.clear()
        for elements in (*(5 * 2**8 - less for less in (1, 2, 77, 255)), 5 * 2**15 - 8_000, 7 * 2**18 - 123_457, 0):
            call_all(elements)
        assert not compiled


def forgotten_plans(rank: int, world: int, seed: int) -> None:
    """A group keeps the plans of the last calls, as many as fit into `plan_cache_bytes`, and one in any case."""
    for cache_bytes, expected in ((1 << 20, [1, 1, 0, 0, 0]), (1, [1, 1, 1, 0, 1])):
        few = dist.new_group(pg_options=Options(plan_cache_bytes=cache_bytes))
        found = []
        with compilations() as compiled:
            for elements in (5, 6, 5, 5, 6):
                tensor = torch.ones(elements)
                dist.all_reduce(tensor, group=few)
                assert torch.equal(tensor, torch.full((elements,), float(world)))
                found.append(len(compiled))
                compiled.clear()
        assert found == expected
        dist.destroy_process_group(few)


def chosen_ways(rank: int, world: int, seed: int) -> None:
    """Equal parts take the algorithm that the model or SENNIT_ALGORITHM names, and one plan serves sizes up to it."""
    for algorithm, hosts in (("bruck", "same"), ("hierarchical", f"host {rank // 2}"), ("ring", "same")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SENNIT_ALGORITHM", algorithm)
            patch.setenv("SENNIT_HOST_ID", hosts)
            patch.setenv("SENNIT_TRANSPORT", "auto")
            group = dist.new_group()
        is_staged = algorithm == "bruck" or (algorithm == "hierarchical" and world > 2)
        with compilations() as compiled:
            for elements in (0, 1, 600, 1_000, 513):
                parts = numbers_of_all(world, elements * world, seed)
                output = torch.empty(elements * world, dtype=torch.int16)
                dist.all_to_all_single(output, parts[rank], group=group)
                assert torch.equal(output, torch.cat([part.view(world, elements)[rank] for part in parts]))
                gathered = torch.empty(world, elements * world, dtype=torch.int16)
                dist.all_gather_single(gathered.view(-1), parts[rank], group=group)
                assert torch.equal(gathered, torch.stack(parts))
            # Sizes of nothing, of one element, and two that round up to one power of two, or three.
            by_kind = Counter((shape[0], shape[-2] != 0) for shape in compiled)
            assert by_kind[Kind.ALLTOALL, True] == (0 if not is_staged else 2 + (world == 3))
            assert by_kind[Kind.ALLGATHER, True] == (is_staged if algorithm == "hierarchical" else algorithm == "ring")
        # Equal parts with splits on all ranks: nobody can know that they are equal everywhere.
        with compilations() as compiled:
            equal = [2] * world
            dist.all_to_all_single(output[: 2 * world], parts[rank][: 2 * world].clone(), equal, equal, group=group)
            assert not [shape for shape in compiled if shape[-2]]
        dist.destroy_process_group(group)


def even_exchange(rank: int, world: int, seed: int) -> None:
    """The exchange of embeddings names no sizes where all ranks know that all are equal."""
    calls: list[bool] = []
    exchanged = dist.all_to_all_single

    def recording(output: Any, given: Any, *sizes: Any, **options: Any) -> Any:
        calls.append(not any(sizes))
        return exchanged(output, given, *sizes, **options)

    tables = [Table(name=f"t{number}", rows=5, dim=2) for number in range(world)]
    for owners, batch in ((range(world), 16), ([0] * world, 16), (range(world), 17)):
        placement = placed(tables, world, {f"t{number}/0.0": owner for number, owner in enumerate(owners)})
        bags = ShardedEmbeddingBags(tables, lr=1.0, placement=placement, gradients="sum")
        samples = bags.slices.own_samples(batch)
        ids = torch.arange(batch)[samples] % 5
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_to_all_single", recording)
            sum(
                vectors.sum() for vectors in bags({f"t{n}": ids for n in range(world)}, global_batch=batch).values()
            ).backward()
        sizes, lengths, given_ids, sums, gradients = calls
        assert sizes
        assert not given_ids
        # Three ranks have 2, 3 and 3 of the 8 slices.
        is_even = list(owners) == list(range(world)) and batch == 16 and world in (2, 4)
        assert (lengths, sums, gradients) == (is_even,) * 3


TRANSPORTS = ("shm", "udp")
WORLDS = (2, 3, 4)
GROUPS = briefly(product(TRANSPORTS, WORLDS), [("udp", 2), ("shm", 3)])


@pytest.mark.parametrize(("transport", "size"), GROUPS)
@pytest.mark.parametrize(
    "case",
    [
        reductions,
        uneven_reduce_scatter,
        movements,
        uneven_alltoall,
        uneven_allgather,
        in_place,
        synchronous,
        coalesced,
        point_to_point,
        sparse,
        objects,
        leaves,
        many_in_flight,
        groups_without_records,
        groups_with_few_descriptors,
    ],
)
def test_collective(kept_world: WorldFactory, transport: str, size: int, case: Callable[..., Any], seed: int) -> None:
    kept_world(size, transport).run(case, seed=seed)


@pytest.mark.parametrize(("transport", "size"), GROUPS)
@pytest.mark.parametrize("case", [chosen_ways, even_exchange, new_counts, new_sizes, forgotten_plans])
def test_plans(kept_world: WorldFactory, transport: str, size: int, case: Callable[..., Any], seed: int) -> None:
    kept_world(size, transport).run(case, seed=seed)
