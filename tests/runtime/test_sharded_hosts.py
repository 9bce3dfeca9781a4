# SPDX-License-Identifier: Apache-2.0
"""Sharded tables over several hosts: placements know them, and what is even goes by host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.runtime.conftest import World

pytestmark = pytest.mark.timeout(180)

CASES = "host_cases.py"


@pytest.fixture(scope="module")
def expected(kept_world: Callable[..., Any]) -> str:
    """The digest of one rank."""
    return str(kept_world(1).run(CASES, "alone")[0])


@pytest.mark.parametrize("case", ["knows_hosts", "knows_hosts_of_some"])
def test_a_group_knows_its_hosts(kept_world: Callable[..., Any], case: str) -> None:
    kept_world(4).run(CASES, case)


def test_a_group_of_another_backend_knows_its_hosts() -> None:
    world = World(4, backend="gloo")
    world.run(CASES, "knows_hosts")
    world.close()


@pytest.mark.parametrize("case", ["uses_hosts", "goes_by_host"])
def test_a_step_over_two_hosts(kept_world: Callable[..., Any], expected: str, case: str) -> None:
    kept_world(4).run(CASES, case, expected=expected)
