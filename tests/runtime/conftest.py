# SPDX-License-Identifier: Apache-2.0
"""Worlds and ports for the tests of the runtime."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.free_ports import free_ports
from tests.runtime.world import World, WorldFactory


@pytest.fixture(scope="module")
def kept_world() -> Iterator[WorldFactory]:
    """`kept_world(size, transport)`: a world that other tests of the module also use."""
    kept: dict[tuple[int, str], World] = {}

    def get(size: int, transport: str = "shm") -> World:
        world = kept.get((size, transport))
        if world is None or not world.alive:
            world = kept[size, transport] = World(size, environment={"SENNIT_TRANSPORT": transport})
        return world

    yield get
    for world in kept.values():
        world.close()


@pytest.fixture
def new_world() -> Iterator[WorldFactory]:
    """`new_world(size, ...)`: a world for this test alone, which may break it."""
    made: list[World] = []

    def make(size: int, **options: Any) -> World:
        made.append(World(size, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def port() -> int:
    """Returns the first of four free ports."""
    return free_ports(4)[0]
