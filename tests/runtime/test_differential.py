# SPDX-License-Identifier: Apache-2.0
"""Random calls have the same outcome over gloo and over sennit (testbed/differential)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sennit.testbed.differential import __main__ as program
from sennit.testbed.differential import calls as drawn
from sennit.testbed.differential import comparison

LONG = [pytest.mark.long, pytest.mark.timeout(3_600)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("transport", "calls"), [("shm", 400), ("udp", 400), pytest.param("shm", 100_000, marks=LONG)])
def test_random_calls_end_as_over_gloo(kept_world: Callable[..., Any], transport: str, calls: int, seed: int) -> None:
    world = kept_world(3, transport)
    found = world.run(comparison.__file__, "compare", calls=calls, seed=seed, timeout_s=3_500.0)
    seen: Counter[str] = sum(map(Counter, found), Counter())
    assert seen["same"] > calls
    if calls > 10_000:
        assert {f"refused by sennit alone, {name}" for name in drawn.DIFFERENCES} < seen.keys()


def test_the_program_starts_its_ranks() -> None:
    assert program.main(["--calls", "20", "--ranks", "2"]) == 0
