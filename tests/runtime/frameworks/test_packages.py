# SPDX-License-Identifier: Apache-2.0
"""Packages that build on torch.distributed run their own tests and models over sennit (extra `frameworks`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runtime.conftest import World

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[], World]]:
    """Two ranks without a group: the packages make theirs."""
    kept: list[World] = []

    def get() -> World:
        if not kept or not kept[-1].alive:
            kept.append(World(2, backend=""))
        return kept[-1]

    yield get
    for world in kept:
        if world.alive:
            world.close()


@pytest.mark.parametrize("name", ["test_ops", "test_sync", "test_script"])
def test_accelerate(ranks: Callable[[], World], tmp_path: Path, port: int, name: str) -> None:
    pytest.importorskip("accelerate")
    ranks().run("frameworks/accelerate_cases.py", "script", folder=str(tmp_path), port=port, name=name)


def test_accelerate_data_loop(ranks: Callable[[], World], tmp_path: Path, port: int) -> None:
    pytest.importorskip("accelerate")
    ranks().run("frameworks/accelerate_cases.py", "data_loop", folder=str(tmp_path), port=port)


@pytest.mark.parametrize("model", ["BoringModel", "ManualOptimBoringModel"])
def test_lightning(ranks: Callable[[], World], port: int, model: str) -> None:
    pytest.importorskip("lightning")
    ranks().run("frameworks/lightning_cases.py", "fit", port=port, model=model)
