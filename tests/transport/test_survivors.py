# SPDX-License-Identifier: Apache-2.0
"""Ranks that die or fall silent: every survivor's error names them, and the survivors continue as a smaller group."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit.transport.communicator import Communicator
from sennit.transport.errors import PeerError, SennitError
from sennit.transport.meeting import rendezvous
from sennit.transport.meeting.membership import Terms
from tests.extent import briefly
from tests.transport.processes import START_S, Group, Rank, Scenario

pytestmark = pytest.mark.timeout(150)

Launch = Callable[..., Group]
LARGE_ELEMENTS = 8_000_000
# Pretended hosts: all ranks on one, each on its own, and pairs that mix shared memory with udp.
HOSTS = {"shm": "aaaa", "udp": "abcd", "mixed": "aabb"}


def check_sum(group: Communicator) -> None:
    """Checks that the group works: an AllReduce has the exact sum."""
    total = group.allreduce(np.full(1_000, group.rank + 1.0))
    assert (total == group.world * (group.world + 1) / 2).all()


def failed_call(group: Communicator, call: Callable[[], Any]) -> dict[str, Any]:
    """Returns the error of `call`, which must fail, and its time."""
    try:
        call()
    except SennitError as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "lost": list(group.lost_ranks),
            "when_s": time.monotonic(),
        }
    raise AssertionError("the call did not fail")


def killed(me: Rank, *, victims: list[int], when: str) -> None:
    """Some ranks die at the moment `when`. Every other rank reports the error of its call."""
    group = me.make()
    check_sum(group)
    mine = me.rank in victims
    # No rank dies before all have finished the first call.
    me.say(f"ready-{me.rank}")
    me.wait_for(*[f"ready-{rank}" for rank in range(me.world)])
    if when == "others compute":
        if mine:
            me.die()
        # Computes until the victims are certainly dead.
        me.wait_for(*[f"died-{rank}" for rank in victims])
        me.report(**failed_call(group, lambda: group.allreduce(np.ones(10))))
    elif when == "in a call":
        if mine:
            me.wait_for(*[f"entering-{rank}" for rank in range(me.world) if rank not in victims])
            me.die()
        me.say(f"entering-{me.rank}")
        me.report(**failed_call(group, lambda: group.allreduce(np.ones(10))))
    elif when == "in a transfer":
        if mine:
            # Another thread kills this process, at any moment within the calls.
            signal.signal(signal.SIGALRM, lambda *_: me.die())
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        array = np.ones(LARGE_ELEMENTS, np.float32)

        def forever() -> None:
            while True:
                group.allreduce(array)

        me.report(**failed_call(group, forever))
    elif when == "behind others":
        # A chain: each rank waits for the rank before it, so only rank 1 waits for the dead rank itself.
        if mine:
            me.wait_for(*[f"entering-{rank}" for rank in range(1, me.world)])
            me.die()
        me.say(f"entering-{me.rank}")
        me.report(**failed_call(group, lambda: group.recv(np.zeros(3), me.rank - 1)))
    else:
        raise AssertionError(when)
    go_on(me, group)


def go_on(me: Rank, group: Communicator) -> None:
    """Reconfigures, runs a collective, and reports its new rank."""
    began_s = time.monotonic()
    successor = group.reconfigure(Terms(timeout_s=START_S))
    check_sum(successor)
    me.report(rank=successor.rank, world=successor.world, epoch=successor.epoch, elapsed_s=time.monotonic() - began_s)
    successor.shutdown()


def stopped(me: Rank, *, victim: int, timeout_s: float) -> None:
    """The test stops the victim. The call of the others ends at its deadline. The victim resumes too late."""
    group = me.make()
    check_sum(group)
    if me.rank == victim:
        array = np.ones(LARGE_ELEMENTS, np.float32)
        me.report(pid=os.getpid())
        me.say("stop me")
        failure = failed_call(group, lambda: [group.allreduce(array) for _ in range(1_000_000)])
        untouched = array.tobytes() == np.ones(LARGE_ELEMENTS, np.float32).tobytes()
        try:
            group.reconfigure(Terms(timeout_s=START_S))
        except PeerError as error:
            me.report(**failure, untouched=untouched, refused=str(error))
        return
    array = np.ones(LARGE_ELEMENTS, np.float32)
    group._core.set_timeout(timeout_s)

    def forever() -> None:
        while True:
            group.allreduce(array)

    me.report(**failed_call(group, forever))
    go_on(me, group)
    me.say(f"done-{me.rank}")


def dies_while_reconfiguring(me: Rank) -> None:
    """Rank 0 dies in a call. Rank 1 dies after the others have agreed on the next epoch with it."""
    group = me.make()
    check_sum(group)
    me.say(f"ready-{me.rank}")
    me.wait_for(*[f"ready-{rank}" for rank in range(me.world)])
    if me.rank == 0:
        me.die()
    failed_call(group, lambda: group.allreduce(np.ones(10)))
    if me.rank == 1:
        # The next communicator connects once the decision is made.
        rendezvous.connect = lambda *_, **__: me.die()  # type: ignore[assignment]
    go_on(me, group)


def slow_survivor(me: Rank) -> None:
    """The last rank notices the death late. The others wait for it, because its process lives."""
    group = me.make()
    check_sum(group)
    me.say(f"ready-{me.rank}")
    me.wait_for(*[f"ready-{rank}" for rank in range(me.world)])
    if me.rank == 0:
        me.die()
    if me.rank == me.world - 1:
        # Far longer than the others wait for a silent rank.
        time.sleep(2.0)
    failed_call(group, lambda: group.allreduce(np.ones(10)))
    go_on(me, group)


def grows(me: Rank) -> None:
    """A newcomer joins a working group. Then it alone dies, and the group continues as before."""
    if me.rank < 0:
        group = Communicator.join(store=me.store, timeout_s=START_S)
    else:
        group = me.make().reconfigure(Terms(timeout_s=START_S, wait_s=START_S, expect=me.world + 1))
    check_sum(group)
    me.report(rank=group.rank, world=group.world, epoch=group.epoch)
    me.say(f"grown-{me.rank}")
    me.wait_for(*[f"grown-{rank}" for rank in range(-1, me.world)])
    if me.rank < 0:
        me.die()
    failure = failed_call(group, lambda: group.allreduce(np.ones(10)))
    me.report(lost=failure["lost"])
    go_on(me, group)


def launched(launch: Launch, scenario: Scenario, hosts: str, **options: Any) -> Group:
    return launch(scenario, hosts, transport="udp" if len(set(hosts)) == len(hosts) else "auto", **options)


@pytest.mark.parametrize(
    ("hosts", "when"),
    briefly(
        product(HOSTS, ("in a call", "others compute", "in a transfer", "behind others")),
        [("shm", "in a call"), ("shm", "others compute"), ("udp", "in a transfer"), ("mixed", "behind others")],
    ),
)
def test_every_survivor_names_the_dead_rank_and_goes_on(launch: Launch, hosts: str, when: str) -> None:
    victim = 0 if when == "behind others" else 2
    group = launched(launch, partial(killed, victims=[victim], when=when), HOSTS[hosts])
    reports = group.finish(dead=[victim])
    died_s = float(group.store.get(f"test/died-{victim}"))
    survivors = [rank for rank in range(4) if rank != victim]
    # A busy machine may not connect the first epoch in its time, so that another follows: the same one for all.
    epoch = reports[survivors[0]][1]["epoch"]
    assert epoch >= 1
    for new_rank, rank in enumerate(survivors):
        failure, after = reports[rank]
        assert failure["lost"] == [victim], failure
        assert f"rank {victim} " in failure["text"].split(" (reported by")[0], failure["text"]
        assert failure["error"] == "PeerError"
        assert {name: after[name] for name in ("rank", "world", "epoch")} == {
            "rank": new_rank,
            "world": 3,
            "epoch": epoch,
        }
        # Printed, not asserted, because a busy machine is no failure.
        print(f"rank {rank} noticed after {failure['when_s'] - died_s:.3f} s, went on after {after['elapsed_s']:.3f} s")


@pytest.mark.parametrize("hosts", ["shm", "udp"])
def test_two_deaths_at_once(launch: Launch, hosts: str) -> None:
    reports = launched(launch, partial(killed, victims=[0, 2], when="in a call"), HOSTS[hosts]).finish(dead=[0, 2])
    for new_rank, rank in enumerate([1, 3]):
        failure, after = reports[rank]
        assert set(failure["lost"]) <= {0, 2}
        assert failure["lost"]
        assert (after["rank"], after["world"]) == (new_rank, 2)


@pytest.mark.parametrize("hosts", ["shm", "udp"])
def test_one_rank_is_left(launch: Launch, hosts: str) -> None:
    reports = launched(launch, partial(killed, victims=[0, 1, 2], when="in a call"), HOSTS[hosts]).finish(
        dead=[0, 1, 2]
    )
    assert (reports[3][1]["rank"], reports[3][1]["world"]) == (0, 1)


@pytest.mark.parametrize("hosts", ["shm", "udp"])
def test_death_while_the_next_epoch_is_connected(launch: Launch, hosts: str) -> None:
    reports = launched(launch, dies_while_reconfiguring, HOSTS[hosts]).finish(dead=[0, 1])
    for new_rank, rank in enumerate([2, 3]):
        (after,) = reports[rank]
        assert (after["rank"], after["world"], after["epoch"]) == (new_rank, 2, 2)


@pytest.mark.parametrize("hosts", ["shm", "udp"])
def test_slow_survivor_is_waited_for(launch: Launch, hosts: str) -> None:
    reports = launched(launch, slow_survivor, HOSTS[hosts][:3]).finish(dead=[0])
    assert [reports[rank][0]["world"] for rank in (1, 2)] == [2, 2]


@pytest.mark.parametrize("hosts", ["shm", "udp"])
def test_newcomer_joins_and_dies(launch: Launch, hosts: str) -> None:
    reports = launched(launch, grows, HOSTS[hosts][:2], newcomers=[-1]).finish(dead=[-1])
    assert reports[-1] == [{"rank": 2, "world": 3, "epoch": 1}]
    for rank in (0, 1):
        grown, failure, after = reports[rank]
        assert grown == {"rank": rank, "world": 3, "epoch": 1}
        assert failure["lost"] == [2]
        assert (after["rank"], after["world"], after["epoch"]) == (rank, 2, 2)


@pytest.mark.parametrize("hosts", briefly(["shm", "udp", "mixed"], ["shm", "mixed"]))
def test_stopped_rank_is_named_at_the_deadline_and_fails_by_itself_later(launch: Launch, hosts: str) -> None:
    victim = 1
    group = launched(launch, partial(stopped, victim=victim, timeout_s=1.5), HOSTS[hosts])
    group.wait_for("stop me")
    group.stop(victim)
    survivors = [0, 2, 3]
    for rank in survivors:
        group.wait_for(f"done-{rank}")
    group.stop(victim, signal.SIGCONT)
    reports = group.finish()
    for new_rank, rank in enumerate(survivors):
        failure, after = reports[rank]
        assert failure["lost"] == [victim], failure
        assert f"rank {victim}" in failure["text"]
        assert "no sign of life" in failure["text"]
        assert (after["rank"], after["world"]) == (new_rank, 3)
    late = reports[victim][1]
    assert late["untouched"]
    assert "rank" in late["text"]
    assert "the others went on without this rank (1 of 4)" in late["refused"]
