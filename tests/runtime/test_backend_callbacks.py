# SPDX-License-Identifier: Apache-2.0
"""Callbacks of futures wait, lock, block, throw and destroy groups: everything else goes on, and nothing hangs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)

CASES = "callback_cases.py"
World = Callable[..., Any]


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("shm", 4), ("udp", 3)])
def test_callbacks_that_wait(kept_world: World, transport: str, size: int) -> None:
    kept_world(size, transport).run(CASES, "nested", depth=3, chains=3)


@pytest.mark.parametrize(
    "case",
    ["waits_for_a_future_from_outside", "locked", "blocked", "makes_and_destroys_groups", "done_after_wait"],
)
@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_callbacks(kept_world: World, transport: str, case: str) -> None:
    kept_world(2, transport).run(CASES, case)


@pytest.mark.parametrize("hook", ["fp16", "PowerSGD"])
@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("udp", 3)])
def test_hooks_of_many_buckets(kept_world: World, transport: str, size: int, hook: str) -> None:
    kept_world(size, transport).run(CASES, "many_buckets", hook=hook)


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("udp", 3)])
def test_callbacks_begin_in_order(kept_world: World, transport: str, size: int) -> None:
    kept_world(size, transport).run(CASES, "begun_in_order")


def test_a_callback_that_posts_after_it_has_blocked(kept_world: World) -> None:
    text, _ = kept_world(2, "shm").run(CASES, "refused_after_a_block")
    assert "ranks would number their collectives in different orders" in text


def test_a_callback_that_throws(kept_world: World) -> None:
    assert all("of the user's callback" in text for text in kept_world(2, "shm").run(CASES, "thrown"))


EXIT = """
import sys, threading, torch, torch.distributed as dist, sennit
dist.init_process_group("sennit", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
keep = [dist.all_reduce(torch.ones(1000), async_op=True).get_future() for _ in range(9)]
lock = threading.Lock()
lock.acquire()
for future in keep:
    future.then(lambda future: lock.acquire(timeout=1) and lock.release())
"""


def test_exit_with_callbacks_that_block(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", EXIT, str(rank), str(tmp_path / "store")], cwd="/") for rank in range(2)
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
