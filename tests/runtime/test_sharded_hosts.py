# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type"
"""Sharded tables over several hosts: placements know them, and what is even goes by host.

SENNIT_HOST_ID imitates the hosts.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from sennit.runtime.backend.process_group import local_ranks
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import ShardedEmbeddingBags, Table, place
from sennit.transport import algorithms
from sennit.transport.plans.elements import Dtype
from tests.runtime.world import World, WorldFactory

pytestmark = pytest.mark.timeout(180)
BATCH = 32
# The last one is for data-parallel runs, where an AllGather carries its gradients.
TABLES = [Table(name=f"t{number}", rows=60, dim=8, row_shards=4, column_shards=2) for number in range(5)]


@contextlib.contextmanager
def on_hosts(rank: int, hosts: str, some: list[int] | None = None, **settings: str) -> Iterator[dist.ProcessGroup]:
    """A group of all or `some` ranks, rank r on the host `hosts[r]`. `settings`: its SENNIT_*, without the prefix."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HOST_ID": hosts[rank], "TRANSPORT": "auto", **settings}.items():
            patch.setenv(f"SENNIT_{name}", value)
        group = dist.new_group(some)
        yield group
    if some is None or rank in some:
        dist.destroy_process_group(group)


def trained(placement: Any, group: dist.ProcessGroup | None = None) -> tuple[str, ShardedEmbeddingBags]:
    """Two steps of tables and a dense layer. Returns one digest of both."""
    bags = ShardedEmbeddingBags(TABLES, lr=0.1, placement=placement, gradients="sum", group=group)
    torch.manual_seed(3)
    replicas = SlicedReplicas(torch.nn.Linear(len(TABLES) * TABLES[0].dim, 1), group=group)
    optimizer = torch.optim.SGD(replicas.parameters(), lr=0.1)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 60, (len(TABLES), BATCH, 3), generator=generator)[:, bags.slices.own_samples(BATCH)]
        vectors = bags({table.name: ids[number] for number, table in enumerate(TABLES)})
        replicas(torch.cat(list(vectors.values()), 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return hashlib.sha256(f"{bags.digest()} {replicas.digest()}".encode()).hexdigest(), bags


def alone(rank: int, world: int) -> str:
    return trained("table_wise")[0]


def knows_hosts(rank: int, world: int) -> None:
    """The same number on all ranks, also where hosts are not alike."""
    for hosts, expected in (("aabb", 2), ("aaab", None), ("abab", None)):
        with on_hosts(rank, hosts) as group:
            found: list[Any] = [None] * world
            dist.all_gather_object(found, local_ranks(group), group=group)
            assert found == [expected] * world, hosts


def knows_hosts_of_some(rank: int, world: int) -> None:
    """A group of some ranks has hosts of its own. That ranks of a host talk over UDP makes no difference."""
    with on_hosts(rank, "aabb", TRANSPORT="udp") as group:
        assert local_ranks(group) == 2
    with on_hosts(rank, "aabb", some=[1, 2]) as group:
        assert rank not in (1, 2) or local_ranks(group) == 1


def uses_hosts(rank: int, world: int, expected: str) -> None:
    """Names of shardings mean the group's hosts, and no bit changes."""
    with on_hosts(rank, "aabb") as group:
        for name in ("grid", "table_row_wise", "table_column_wise", {"t1": "grid", "t3": "table_row_wise"}):
            digest, bags = trained(name, group)
            assert digest == expected
            assert bags.placement == place(TABLES, world, name, local_ranks=2)
            assert bags.placement != place(TABLES, world, name) or name != "table_row_wise"
            for number, table in enumerate(TABLES):
                sharding = name if isinstance(name, str) else name.get(table.name, "table_wise")
                owners = {shard: rank for shard, rank in bags.placement.owner_of.items() if shard.table == number}
                used = {owner // 2 for owner in owners.values()}
                assert len(used) == (2 if sharding == "grid" else 1)
                # A column of a grid stays on one host.
                assert len({(shard.column, owner // 2) for shard, owner in owners.items()}) == 2
    with on_hosts(rank, "aaab") as group:
        assert ShardedEmbeddingBags(TABLES, lr=1, placement="table_row_wise", group=group).placement == place(
            TABLES, world, "table_row_wise"
        )


@contextlib.contextmanager
def compiled() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The algorithms whose plans this rank compiles, and what they are told."""
    found: list[tuple[str, dict[str, Any]]] = []

    def noted(name: str, compile_plan: Any, **options: Any) -> Any:
        found.append((name, options))
        return compile_plan(**options)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("alltoall", "alltoall_by_host", "allgather", "allgather_by_host", "allreduce"):
            patch.setattr(algorithms, name, partial(noted, name, getattr(algorithms, name)))
        yield found


def goes_by_host(rank: int, world: int, expected: str) -> None:
    """A step over two hosts takes the hierarchical collectives, wherever all ranks know that parts are equal."""
    mixed = {f"t{number}": "table_wise" for number in range(4)} | {"t4": "data_parallel"}
    with on_hosts(rank, "aabb", ALGORITHM="hierarchical") as group, compiled() as found:
        assert trained(mixed, group)[0] == expected
    by_host = {
        (options["type_code"], options["part_bytes_max"]) for name, options in found if name == "alltoall_by_host"
    }
    # Each rank has one table. Of 8 samples: lengths of four row shards, and sums and gradients of bags.
    assert {(Dtype.I32, 4 * 8 * 4), (Dtype.F32, 4 * 8 * TABLES[0].dim)} <= by_host
    # Ids are not as many for each rank, so they alone go directly.
    assert {options["type_code"] for name, options in found if name == "alltoall"} == {Dtype.I32}
    # Gradients of the table that all ranks have, and what ranks agree on before.
    gathers = [(name, options["type_code"]) for name, options in found if name.startswith("allgather")]
    assert {name for name, _ in gathers} == {"allgather_by_host"}
    assert Dtype.F32 in {code for _, code in gathers}
    # Gradients of the dense layer, and which tables the loss depends on.
    assert {options["hosts"].ranks_each for name, options in found if name == "allreduce"} == {2}


@pytest.fixture(scope="module")
def expected(kept_world: WorldFactory) -> str:
    """The digest of one rank."""
    return str(kept_world(1).run(alone)[0])


@pytest.mark.parametrize("case", [knows_hosts, knows_hosts_of_some])
def test_a_group_knows_its_hosts(kept_world: WorldFactory, case: Callable[..., Any]) -> None:
    kept_world(4).run(case)


def test_a_group_of_another_backend_knows_its_hosts() -> None:
    world = World(4, backend="gloo")
    world.run(knows_hosts)
    world.close()


@pytest.mark.parametrize("case", [uses_hosts, goes_by_host])
def test_a_step_over_two_hosts(kept_world: WorldFactory, expected: str, case: Callable[..., Any]) -> None:
    kept_world(4).run(case, expected=expected)
