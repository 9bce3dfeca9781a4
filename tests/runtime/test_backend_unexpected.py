# SPDX-License-Identifier: Apache-2.0
"""Messages that come too early hold up nothing that is needed, and what nobody took never counts as sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)

CASES = "unexpected_cases.py"
World = Callable[..., Any]


# 1,300 messages are more than a rank of three keeps unasked. Sums of 32 KiB to 1 MiB make round trips.
@pytest.mark.parametrize("elements", [1 << 13, 1 << 16, 1 << 18])
@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_early_messages_beside_a_sum(kept_world: World, transport: str, elements: int) -> None:
    kept_world(3, transport).run(CASES, "beside_a_sum", messages=1_300, elements=elements)


@pytest.mark.parametrize("transport", ["shm", "udp"])
@pytest.mark.parametrize("messages", [3_000, pytest.param(36_000, marks=pytest.mark.long)])
def test_a_message_behind_early_ones(new_world: World, transport: str, messages: int) -> None:
    world = new_world(2, environment={"SENNIT_TRANSPORT": transport}, timeout_s=100)
    world.run(CASES, "behind_others", timeout_s=100, messages=messages)


@pytest.mark.parametrize(
    ("transport", "what", "ends"),
    [
        ("shm", "send", "abort"),
        ("shm", "send", "leave"),
        ("shm", "broadcast", "abort"),
        ("shm", "broadcast", "leave"),
        ("udp", "send", "abort"),
    ],
)
def test_what_nobody_took_is_not_sent(new_world: World, transport: str, what: str, ends: str) -> None:
    world = new_world(2, environment={"SENNIT_TRANSPORT": transport})
    done_before, done = world.run(CASES, "not_taken", what=what, ends=ends)[0]
    assert done_before <= done < 3_000
