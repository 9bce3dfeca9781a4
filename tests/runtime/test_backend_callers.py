# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,union-attr,no-untyped-call"
"""Functions of torch that ask for gloo or NCCL by name, and serve groups over sennit all the same."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.runtime.world import WorldFactory, raised

pytestmark = pytest.mark.timeout(120)


def monitored(rank: int, world: int) -> str:
    """All ranks come to the first two barriers, and all but the last to the third."""
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=True)
    return raised(dist.monitored_barrier, timeout=timedelta(seconds=1)) if rank != world - 1 else ""


def shorter_deadline(rank: int, world: int) -> str:
    group = dist.new_group()
    with warnings.catch_warnings(action="error"):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    return raised(dist.all_reduce, torch.ones(1), group=group) if rank == 0 else ""


def other_groups(rank: int, world: int) -> None:
    """Groups of gloo get what they got before."""
    group = dist.new_group(backend="gloo")
    dist.monitored_barrier(group)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7), group)
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)


def independent_groups(rank: int, world: int, port: int) -> None:
    """Groups of torch's new interface, which know nothing of a default group."""
    from torch.distributed import _dist2

    variables = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        groups = [_dist2.new_group("sennit", timedelta(seconds=30), "cpu", plan_cache_bytes=1 << 20) for _ in range(2)]
        with pytest.raises(TypeError, match="threads"):
            _dist2.new_group("sennit", timedelta(seconds=30), "cpu", threads=2)
    for group in groups:
        tensor = torch.full((3,), float(rank))
        group.allreduce(tensor).wait()
        assert tensor.tolist() == [sum(range(world))] * 3
    with _dist2.process_group(groups[0]):
        assert _dist2.current_process_group().size() == world
    for group in groups:
        group.shutdown()


def sharded_tensor(rank: int, world: int) -> None:
    """Its collectives run on the device that the backend names: on a torch without CUDA, the host's."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    placements = [f"rank:{one}/cpu" for one in range(world)]
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        tensor = sharded_tensor.empty(ChunkShardingSpec(0, placements), world, 2)
    tensor.local_shards()[0].tensor.fill_(1.0)
    whole = torch.zeros(world, 2) if rank == 0 else None
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        tensor.gather(0, whole)
    assert whole is None or whole.eq(1).all()


def test_monitored_barrier(new_world: WorldFactory) -> None:
    texts = new_world(3).run(monitored)
    assert "monitored_barrier: rank 2 did not come within 1000 ms" in texts[0]
    assert "rank 1 was not released by rank 0" in texts[1]


def test_the_deadline_of_a_group(new_world: WorldFactory) -> None:
    assert "its timeout of 1 s" in new_world(2).run(shorter_deadline)[0]


def test_groups_of_gloo(kept_world: WorldFactory) -> None:
    kept_world(2).run(other_groups)


def test_independent_groups(kept_world: WorldFactory, port: int) -> None:
    kept_world(2).run(independent_groups, port=port)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs a torch without CUDA")
def test_sharded_tensor(kept_world: WorldFactory) -> None:
    kept_world(2).run(sharded_tensor)
