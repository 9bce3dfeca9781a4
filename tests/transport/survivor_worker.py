# SPDX-License-Identifier: Apache-2.0
"""One rank of the tests in test_survivors.py: `python FILE SCENARIO RANK WORLD STORE OUTPUT ARGUMENTS`.

ARGUMENTS is JSON. The rank writes its results to OUTPUT as JSON lines. A rank that is to die kills itself. A rank that
is to be stopped waits until the test stops it. RANK -1 is a newcomer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sennit.transport.communicator import Communicator
from sennit.transport.errors import PeerError, SennitError
from sennit.transport.meeting import rendezvous
from sennit.transport.meeting.membership import Terms
from sennit.transport.meeting.store import FileStore

LARGE_ELEMENTS = 8_000_000
# Processes take longer than this to start and load only on a far too busy machine.
START_S = 60.0


class Rank:
    """This process and its report."""

    def __init__(self, rank: int, world: int, store: str, output: str, arguments: dict[str, Any]) -> None:
        self.rank, self.world = rank, world
        self.store = FileStore(store)
        self.arguments = arguments
        self._output = Path(output)

    def make(self) -> Communicator:
        return Communicator(rank=self.rank, world=self.world, store=self.store, timeout_s=START_S)

    def report(self, **values: Any) -> None:
        with self._output.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def say(self, word: str) -> None:
        self.store.set(f"test/{word}", "1")

    def wait_for(self, *words: str) -> None:
        deadline_s = time.monotonic() + START_S
        while not self.store.check([f"test/{word}" for word in words]):
            assert time.monotonic() < deadline_s, f"no {words}"
            time.sleep(0.002)

    def die(self) -> None:
        # The time of death, by the clock that all processes of this machine share.
        self.store.set(f"test/died-{self.rank}", f"{time.monotonic()}")
        os.kill(os.getpid(), signal.SIGKILL)


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


def killed(me: Rank) -> None:
    """Some ranks die at the moment `when`. Every other rank reports the error of its call."""
    victims, when = me.arguments["victims"], me.arguments["when"]
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
    successor = group.reconfigure(Terms(timeout_s=START_S, **me.arguments.get("terms", {})))
    check_sum(successor)
    me.report(rank=successor.rank, world=successor.world, epoch=successor.epoch, elapsed_s=time.monotonic() - began_s)
    successor.shutdown()


def stopped(me: Rank) -> None:
    """The test stops the victim. The call of the others ends at its deadline. The victim resumes too late."""
    victim = me.arguments["victim"]
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
    group._core.set_timeout(me.arguments["timeout_s"])

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


SCENARIOS: dict[str, Callable[[Rank], None]] = {
    scenario.__name__: scenario for scenario in (killed, stopped, dies_while_reconfiguring, slow_survivor, grows)
}


def main() -> None:
    scenario, rank, world, store, output, arguments = sys.argv[1:]
    me = Rank(int(rank), int(world), store, output, json.loads(arguments))
    SCENARIOS[scenario](me)


if __name__ == "__main__":
    main()
