# SPDX-License-Identifier: Apache-2.0
"""Every collective with every type and operation, over every local transport, in worlds of 2 to 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)

TRANSPORTS = ("shm", "udp")
WORLDS = (2, 3, 4)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize(
    "case",
    [
        "reductions",
        "uneven_reduce_scatter",
        "movements",
        "uneven_alltoall",
        "uneven_allgather",
        "in_place",
        "coalesced",
        "point_to_point",
        "sparse",
        "objects",
        "leaves",
        "many_in_flight",
        "groups_without_records",
        "groups_with_few_descriptors",
    ],
)
def test_collective(kept_world: Callable[..., Any], transport: str, size: int, case: str, seed: int) -> None:
    kept_world(size, transport).run("collective_cases.py", case, seed=seed)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("case", ["chosen_ways", "even_exchange", "new_counts", "new_sizes", "forgotten_plans"])
def test_plans(kept_world: Callable[..., Any], transport: str, size: int, case: str, seed: int) -> None:
    kept_world(size, transport).run("plan_cases.py", case, seed=seed)
