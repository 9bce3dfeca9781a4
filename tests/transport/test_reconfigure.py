# SPDX-License-Identifier: Apache-2.0
"""A group that makes its successor: two ranks as threads of this process, over sockets and over shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from sennit.transport import errors
from sennit.transport.config import Config, TransportKind
from sennit.transport.errors import ConfigError, PeerError, SennitError
from sennit.transport.meeting import rendezvous
from sennit.transport.meeting.membership import Terms
from sennit.transport.meeting.store import FileStore

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit.transport.communicator import Communicator

START_S = 60.0
Result = TypeVar("Result")
Pair = tuple[Communicator, Communicator]


def on_both(call: Callable[[int], Result]) -> list[Result]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(call, range(2)))


@pytest.fixture(params=["shm", "udp"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    config = Config(transport=TransportKind(request.param), interfaces=("lo",))

    def make(rank: int) -> Communicator:
        return Communicator(rank=rank, world=2, store=FileStore(tmp_path), config=config, timeout_s=START_S)

    first, second = on_both(make)
    yield first, second
    on_both(lambda rank: (first, second)[rank].shutdown())


def reconfigure(pair: Pair) -> Pair:
    first, second = on_both(lambda rank: pair[rank].reconfigure(Terms(timeout_s=START_S)))
    return first, second


def works(pair: Pair) -> bool:
    sums = on_both(lambda rank: pair[rank].allreduce(np.array([rank + 1.0])).item())
    return sums == [3.0, 3.0]


def test_the_successor_works_and_the_old_group_has_ended(pair: Pair) -> None:
    successor = reconfigure(pair)
    assert works(successor)
    assert [group.epoch for group in (*pair, *successor)] == [0, 0, 1, 1]
    for group in pair:
        with pytest.raises(SennitError, match="shut"):
            group.barrier()
    # The successor can make a successor too.
    third = reconfigure(successor)
    assert works(third)
    assert third[0].epoch == 2
    on_both(lambda rank: third[rank].shutdown())


def test_operations_keep_the_deadline_of_the_old_group(pair: Pair) -> None:
    """The deadline for connecting an epoch is another one."""
    for group in pair:
        group.timeout_s = 0.25
    successor = reconfigure(pair)
    with pytest.raises(errors.TimeoutError, match=r"0\.25 s") as caught:
        successor[0].allreduce(np.ones(3))
    # Once, and not for the operation and the reason. Operation 1 was the new group's barrier.
    assert str(caught.value).count("(operation 2 of the group)") == 1
    assert str(caught.value).count("of the group)") == 1
    on_both(lambda rank: successor[rank].shutdown(0.0))


def test_an_epoch_that_one_rank_could_not_connect_is_nobodys(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other rank would continue in a group that fails in its first call."""
    original = rendezvous.connect

    def connect(make: Any, *, rank: int, name: str, **rest: Any) -> Any:
        connection = original(make, rank=rank, name=name, **rest)
        if rank == 1 and name.endswith("epoch-1"):
            connection.endpoint.shutdown(0.0)
            raise PeerError("rank 1 fails after it has told everybody how to reach it")
        return connection

    monkeypatch.setattr(rendezvous, "connect", connect)
    successor = reconfigure(pair)
    assert [group.epoch for group in successor] == [2, 2]
    assert works(successor)
    on_both(lambda rank: successor[rank].shutdown())


def test_a_group_that_gets_no_successor_is_still_there(pair: Pair) -> None:
    def refused(rank: int) -> str:
        with pytest.raises(errors.TimeoutError) as caught:
            pair[rank].reconfigure(Terms(timeout_s=2, min_world=3))
        return str(caught.value)

    assert all("2 ranks are here, at least 3 are wanted" in text for text in on_both(refused))
    assert works(pair)


def test_nobody_joins_a_group_without_a_store() -> None:
    with Communicator(rank=0, world=1, config=Config()) as alone, pytest.raises(ConfigError, match="without a store"):
        alone.reconfigure()
