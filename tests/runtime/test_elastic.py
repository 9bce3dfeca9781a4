# SPDX-License-Identifier: Apache-2.0
"""The default process group after deaths, with newcomers, and shrunk by torch's own interface."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)

CASES = "elastic_cases.py"
World = Callable[..., Any]


@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_survivors_go_on_and_on(new_world: World, transport: str) -> None:
    world = new_world(4, environment={"SENNIT_TRANSPORT": transport})
    answers = world.run(CASES, "survive", victims=[0, 2])
    assert answers == [
        None,
        {"rank": 0, "world": 2, "epoch": 2},
        None,
        {"rank": 1, "world": 2, "epoch": 2},
    ]


@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_newcomers_join(new_world: World, transport: str) -> None:
    environment = {"SENNIT_TRANSPORT": transport}
    members = new_world(2, environment=environment)
    newcomers = new_world(2, environment=environment, backend="")
    with ThreadPoolExecutor(2) as pool:
        come = pool.submit(newcomers.run, CASES, "come", store=members.store)
        grown = members.run(CASES, "grow", newcomers=2)
        came = come.result()
    assert grown == [{"rank": rank, "world": 4, "previous": [0, 1, None, None]} for rank in (0, 1)]
    assert sorted(answer["rank"] for answer in came) == [2, 3]
    assert all(answer["previous"] == [None] * 4 for answer in came)


@pytest.mark.parametrize(("die", "abort"), [(True, False), (False, False), (False, True)])
def test_torch_shrinks_the_group(new_world: World, die: bool, abort: bool) -> None:
    world = new_world(3, environment={"SENNIT_TRANSPORT": "shm"})
    answers = world.run(CASES, "shrink", excluded=[1], die=die, abort=abort)
    assert answers == [
        {"rank": 0, "world": 2, "routes": ["self", "shm"]},
        None,
        {"rank": 1, "world": 2, "routes": ["shm", "self"]},
    ]


def test_too_few_survivors(new_world: World) -> None:
    texts = new_world(3).run(CASES, "too_few")
    for text in texts[1:]:
        assert "TimeoutError: default: epoch 1 was not agreed upon within 4 s: 2 ranks are here" in text
        assert "at least 3 are wanted" in text
