# SPDX-License-Identifier: Apache-2.0
"""The path of accelerator tensors: staging buffers, rounds, lanes.

Where there is no GPU the same lanes serve host tensors (`stage_host_tensors`), which leaves out only streams and
pinned memory; the tests marked `gpu` run both ranks on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)

World = Callable[..., Any]
CASES = "staging_cases.py"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", ["every_collective", "several_rounds", "order_with_host_tensors", "futures"])
def test_staged_on_the_host(kept_world: World, size: int, case: str) -> None:
    kept_world(size).run(CASES, case, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", ["every_collective", "several_rounds", "order_with_host_tensors", "futures", "streams"]
)
def test_staged_on_a_gpu(new_world: World, case: str) -> None:
    new_world(2).run(CASES, case, device="cuda:0")


def test_failure_in_a_lane(new_world: World) -> None:
    texts = new_world(2).run(CASES, "failure", device="cpu")
    assert all("all_reduce" in text for text in texts)
