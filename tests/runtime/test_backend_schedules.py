# SPDX-License-Identifier: Apache-2.0
"""The arguments alone determine which program a collective runs: host and device calls in random timing."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)


# Sockets are slower. There a receiver also grants memory to one message after the other.
@pytest.mark.parametrize(("transport", "schedules"), [("shm", 150), ("udp", 50)])
def test_mixed_schedules(kept_world: Callable[..., Any], transport: str, schedules: int) -> None:
    seed = int(os.environ.get("SCHEDULE_SEED", random.SystemRandom().randrange(2**32)))
    print(f"SCHEDULE_SEED={seed}")
    kept_world(3, transport).run("schedule_cases.py", "mixed_schedules", timeout_s=170.0, seed=seed, count=schedules)
