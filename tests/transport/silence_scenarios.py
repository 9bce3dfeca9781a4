# SPDX-License-Identifier: Apache-2.0
"""A scenario of two barriers. The last rank, the victim, comes to the second one late or never."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Final

from sennit.transport.errors import SennitError
from tests.transport.processes import Rank

# A C call on so many elements holds the GIL for some tenths of a second, without a bytecode in between.
RANGE_ELEMENTS: Final = 20_000_000


def two_barriers(me: Rank, *, victim: Callable[[float], None]) -> None:
    """Each rank reports how its second barrier ended. The last one first does what `victim` says, for some seconds."""
    group = me.make()
    group.barrier()
    me.say(f"past-{me.rank}")
    if me.rank == me.world - 1:
        # Now no rank waits for the first barrier any more.
        me.wait_for(*[f"past-{other}" for other in range(me.world)])
        me.say("ready")
        victim(3 * group.config.peer_timeout_s)
    try:
        group.barrier()
        me.report(passed=True)
    except SennitError as error:
        me.report(kind=type(error).__name__, text=str(error), lost=list(group.lost_ranks))
    me.say(f"done-{me.rank}")
    group.shutdown()


def wait_for_the_end(_: float) -> None:
    """Waits until the test stops or kills this process."""
    while True:
        signal.pause()


def compute_in_python(duration_s: float) -> None:
    end_s = time.monotonic() + duration_s
    count = 0
    while time.monotonic() < end_s:
        count += 1


def hold_the_gil(duration_s: float) -> None:
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        sum(range(RANGE_ELEMENTS))
