# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,union-attr,no-untyped-call"
"""Functions of torch that ask for gloo or NCCL by name, and serve groups over sennit all the same."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sennit.runtime.backend import all_reduce_coded, all_reduce_leaves
from sennit.runtime.backend.process_group import communicator, failure_of, local_ranks
from sennit.runtime.backend.torch_versions import HashStore, PrefixStore, Store
from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.communicator import Communicator
from sennit.transport.config import Config
from sennit.transport.errors import ArgumentError, Unsupported
from sennit.transport.meeting.store import CheckedStore
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


def extreme_deadlines(rank: int, world: int) -> str:
    """Times of thousands of years do not overflow. Returns the error of a negative one."""
    forever = timedelta(days=100_000_000)
    group = dist.new_group(timeout=forever)
    number = torch.ones(1)
    work = dist.all_reduce(number, group=group, async_op=True) if rank == 0 else None
    dist.barrier()
    assert (work or dist.all_reduce(number, group=group, async_op=True)).wait(forever)
    assert number.item() == world
    assert "up to 100000000 days" in raised(dist.new_group, timeout=timedelta.max)
    return raised(dist.new_group, timeout=timedelta(seconds=-1))


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


def test_deadlines_of_a_century_and_below_nothing(new_world: WorldFactory) -> None:
    for text in new_world(2).run(extreme_deadlines):
        assert "ValueError: timeout is -1 s; allowed: more than 0" in text


def test_a_rank_outside_of_a_group_is_told_so() -> None:
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    for call in (communicator, failure_of, local_ranks):
        with pytest.raises(ValueError, match="this rank is not in the group"):
            call(outside)
    with pytest.raises(ValueError, match="this rank is not in the group"):
        all_reduce_leaves(torch.ones(2, 2), 4, group=outside)


def test_names_in_place_of_objects_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"reduce op 'sum'; allowed: torch\.distributed\.ReduceOp\. SUM, AVG"):
        all_reduce_coded(torch.ones(2), Codec(kind=CodecKind.INT8), op="sum")
    wrong: Any = "int8"
    with pytest.raises(ArgumentError, match=r"codec 'int8'; allowed: a sennit\.transport\.codecs\.Codec"):
        all_reduce_coded(torch.ones(2), wrong)


class PlainStore(Store):
    """A store that a program has written: what gloo needs, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.held = HashStore()

    def set(self, key: str, value: str) -> None:
        self.held.set(key, value)

    def get(self, key: str) -> bytes:
        return self.held.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.held.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.held.check(keys)

    def wait(self, keys: list[str], *limit: timedelta) -> None:
        self.held.wait(keys, *limit)


def test_a_store_written_in_python_serves_a_group() -> None:
    written = PlainStore()  # torch's store does not keep it
    store = PrefixStore("of torch", written)

    def met(rank: int) -> list[float]:
        with Communicator(rank=rank, world=2, store=store, config=Config(), name="plain") as group:
            found: list[float] = group.allreduce(np.full(3, rank + 1.0)).tolist()
            return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(met, range(2))) == [[3.0] * 3] * 2
    strict = CheckedStore(store, purpose="membership of default", advice="; ask its process")
    with pytest.raises(Unsupported, match=r"membership of default: the store has no compare_set; allowed: stores that"):
        strict.compare_set("epoch", "", "1")
    assert strict.compare_or_set("epoch", "", "1") == b"1"
    assert strict.compare_or_set("epoch", "", "2") == b"1"
    assert strict.compare_or_set("epoch", "1", "2") == b"2"


def test_groups_of_gloo(kept_world: WorldFactory) -> None:
    kept_world(2).run(other_groups)


def test_independent_groups(kept_world: WorldFactory, port: int) -> None:
    kept_world(2).run(independent_groups, port=port)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs a torch without CUDA")
def test_sharded_tensor(kept_world: WorldFactory) -> None:
    kept_world(2).run(sharded_tensor)
