# SPDX-License-Identifier: Apache-2.0
"""Collectives on accelerator tensors.

Without a GPU, host tensors take their place (device_stand_in.py), which leaves out only streams and pinned memory.
The tests marked `gpu` run both ranks on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)

World = Callable[..., Any]
CASES = "device_cases.py"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "case", ["every_collective", "large_tensors", "order_with_host_tensors", "futures", "dropped_work"]
)
def test_on_the_stand_in(kept_world: World, size: int, case: str) -> None:
    kept_world(size).run(CASES, case, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", ["every_collective", "large_tensors", "order_with_host_tensors", "futures", "dropped_work", "streams"]
)
def test_on_a_gpu(new_world: World, case: str) -> None:
    new_world(2).run(CASES, case, device="cuda:0")


def test_ranks_that_disagree(new_world: World) -> None:
    texts = new_world(2).run(CASES, "failure", device="cpu")
    assert all("all_reduce" in text for text in texts)


def test_deadline_of_a_device_operation(new_world: World) -> None:
    text, _ = new_world(2).run(CASES, "deadline", device="cpu")
    assert "timed out on rank 0: not finished within its timeout of 1 s" in text


def test_abort_with_copies_queued(new_world: World) -> None:
    text, _ = new_world(2).run(CASES, "aborted", device="cpu")
    assert "abort was called" in text


def test_device_and_host_memory_in_one_collective(new_world: World) -> None:
    texts = new_world(2).run(CASES, "unlike_memory")
    assert all("on a device" in text for text in texts), texts


def test_a_message_between_device_and_host(kept_world: World) -> None:
    kept_world(2).run(CASES, "message_between_memories")
