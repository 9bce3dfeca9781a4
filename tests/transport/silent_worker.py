# SPDX-License-Identifier: Apache-2.0
"""One rank of the tests in test_silence.py: `python FILE WHAT RANK WORLD STORE REPORT`. The last rank is the victim.

WHAT happens to the victim instead of the second barrier: the test stops it (`frozen`) or kills it (`killed`), it
computes in Python (`busy`), or it holds the GIL in one C call after the other (`holding`). Every rank writes its
outcome to REPORT, as JSON.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from sennit.transport.communicator import Communicator
from sennit.transport.errors import SennitError
from sennit.transport.meeting.store import FileStore

# A C call on so many elements holds the GIL for some tenths of a second, without a bytecode in between.
RANGE_ELEMENTS: Final = 20_000_000
START_S: Final = 60.0


def main() -> None:
    what, rank, world, store, report = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
    said = FileStore(store)
    group = Communicator(rank=rank, world=world, store=said, timeout_s=START_S)
    group.barrier()
    outcome: dict[str, Any] = {}
    said.set(f"test/past-{rank}", "1")
    if rank == world - 1:
        # Now no rank waits for the first barrier any more.
        said.wait([f"test/past-{other}" for other in range(world)], timedelta(seconds=START_S))
        said.set("test/ready", "1")
        VICTIMS[what](3 * group.config.peer_timeout_s)
    try:
        group.barrier()
        outcome["passed"] = True
    except SennitError as error:
        outcome = {"kind": type(error).__name__, "text": str(error), "lost": list(group.lost_ranks)}
    report.write_text(json.dumps(outcome))
    said.set(f"test/done-{rank}", "1")
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


VICTIMS: Final[dict[str, Callable[[float], None]]] = {
    "frozen": wait_for_the_end,
    "killed": wait_for_the_end,
    "busy": compute_in_python,
    "holding": hold_the_gil,
}

if __name__ == "__main__":
    main()
