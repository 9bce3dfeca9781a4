# SPDX-License-Identifier: Apache-2.0
"""The library over gloo, for comparisons: it has the bits of sennit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.runtime.conftest import World

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", params=[2, 3])
def gloo(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param, backend="gloo")
    yield world
    world.close()


def test_leaves_are_folded_as_defined(gloo: World) -> None:
    gloo.run("collective_cases.py", "leaves", seed=5)


@pytest.mark.parametrize("kind", ["bags", "weighted", "sequences"])
@pytest.mark.parametrize("placement", ["table_wise", "grid", "data_parallel"])
def test_tables_have_the_same_bits(gloo: World, kept_world: Callable[..., Any], placement: str, kind: str) -> None:
    expected = kept_world(1).run("sharded_cases.py", "trained", placement=placement, kind=kind)[0][0]
    found = gloo.run("sharded_cases.py", "trained", placement=placement, kind=kind)
    assert [digest for digest, _ in found] == [expected] * gloo.size


@pytest.mark.parametrize("autocast", ["", "bfloat16"])
def test_replicas_have_the_same_bits(gloo: World, kept_world: Callable[..., Any], autocast: str) -> None:
    expected = kept_world(1).run("replica_cases.py", "train", autocast=autocast, no_sync=not autocast)
    assert gloo.run("replica_cases.py", "train", autocast=autocast, no_sync=not autocast) == expected * gloo.size


def test_codecs_are_refused_by_name(gloo: World) -> None:
    gloo.run("sharded_codec_cases.py", "refuses_gloo")
