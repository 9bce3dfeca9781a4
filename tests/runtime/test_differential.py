# SPDX-License-Identifier: Apache-2.0
"""Random calls have the same outcome over gloo and over sennit (testbed/differential)."""

from __future__ import annotations

from collections import Counter

import pytest

from sennit.testbed.differential import __main__ as program
from sennit.testbed.differential import callbacks, outcomes
from sennit.testbed.differential import calls as drawn
from tests.runtime.world import WorldFactory

# pytest takes a test's own timeout before that of one of its cases.
pytestmark = pytest.mark.timeout(120)
LONG = [pytest.mark.long, pytest.mark.timeout(3_600)]


@pytest.mark.parametrize(("transport", "calls"), [("shm", 200), ("udp", 200), pytest.param("shm", 100_000, marks=LONG)])
def test_random_calls_end_as_over_gloo(kept_world: WorldFactory, transport: str, calls: int, seed: int) -> None:
    world = kept_world(3, transport)
    found = world.run_within(3_500.0, outcomes.compare, calls=calls, seed=seed)
    seen: Counter[str] = sum(map(Counter, found), Counter())
    assert seen["same"] > calls
    if calls > 10_000:
        assert {f"refused by sennit alone, {name}" for name in drawn.DIFFERENCES} < seen.keys()


@pytest.mark.parametrize(
    ("transport", "size", "calls"),
    [
        ("shm", 2, 1_000),
        ("udp", 3, 1_000),
        *(
            pytest.param(transport, size, 125_000, marks=LONG, id=f"{transport}-{size}-long")
            for transport in ("shm", "udp")
            for size in (2, 3, 4, 5)
        ),
    ],
)
def test_random_programs_of_callbacks(
    new_world: WorldFactory, transport: str, size: int, calls: int, seed: int
) -> None:
    world = new_world(size, environment={"SENNIT_TRANSPORT": transport})
    found = world.run_within(3_500.0 if calls > 10_000 else 100.0, callbacks.stress, calls=calls, seed=seed)
    seen: Counter[str] = sum(map(Counter, found), Counter())
    assert seen["right"] > calls / 4
    assert calls < 10_000 or seen["failed after an abort"] > 0


@pytest.mark.parametrize("what", [[], ["--callbacks"]])
def test_the_program_starts_its_ranks(what: list[str]) -> None:
    assert program.main(["--calls", "20", "--ranks", "2", *what]) == 0
