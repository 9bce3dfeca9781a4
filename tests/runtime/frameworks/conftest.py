# SPDX-License-Identifier: Apache-2.0
"""Ranks for the code of others, which makes its groups itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.runtime.frameworks.rows import ROWS, need_package
from tests.runtime.world import World


@pytest.fixture(autouse=True)
def package(request: pytest.FixtureRequest) -> None:
    """Skips the test of a row without its package, or fails it where it must run."""
    test = request.function.__name__
    if any(row.test == test for row in ROWS):
        need_package(test, is_long=request.config.getoption("--long"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], World]]:
    """`ranks(size)`: processes without a group, which other tests of the module also use."""
    kept: dict[int, World] = {}

    def get(size: int) -> World:
        if size not in kept or not kept[size].alive:
            kept[size] = World(size, backend="")
        return kept[size]

    yield get
    for world in kept.values():
        world.close()
