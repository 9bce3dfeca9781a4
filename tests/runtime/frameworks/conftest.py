# SPDX-License-Identifier: Apache-2.0
"""Ranks for the code of others, which makes its groups itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.runtime.conftest import World


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
        if world.alive:
            world.close()
