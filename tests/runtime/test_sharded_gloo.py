# SPDX-License-Identifier: Apache-2.0
"""The library over gloo, for comparisons: it has the bits of sennit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

pytest.importorskip("torch")

import torch

from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import ShardedEmbeddingBags, Table
from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.errors import ConfigError
from tests.extent import briefly
from tests.runtime.collective_checks import leaves
from tests.runtime.replica_training import train
from tests.runtime.sharded_training import trained
from tests.runtime.world import World, WorldFactory

pytestmark = pytest.mark.timeout(180)


def refuses_gloo(rank: int, world: int) -> None:
    with pytest.raises(ConfigError, match="a codec over gloo; allowed: backend sennit"):
        ShardedEmbeddingBags([Table(name="user", rows=10, dim=4)], lr=1, codec=Codec(kind=CodecKind.BF16))
    with pytest.raises(ConfigError, match="a codec over gloo; allowed: backend sennit"):
        SlicedReplicas(torch.nn.Linear(2, 2), codec=Codec(kind=CodecKind.BF16))


@pytest.fixture(scope="module", params=briefly([2, 3], [3]))
def gloo(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param, backend="gloo")
    yield world
    world.close()


def test_leaves_are_folded_as_defined(gloo: World) -> None:
    gloo.run(leaves, seed=5)


@pytest.mark.parametrize(
    ("placement", "kind"),
    briefly(
        product(("table_wise", "grid", "data_parallel"), ("bags", "weighted", "sequences")),
        [("table_wise", "bags"), ("grid", "sequences"), ("data_parallel", "weighted")],
    ),
)
def test_tables_have_the_same_bits(gloo: World, kept_world: WorldFactory, placement: str, kind: str) -> None:
    expected = kept_world(1).run(trained, placement=placement, kind=kind)[0][0]
    found = gloo.run(trained, placement=placement, kind=kind)
    assert [digest for digest, _ in found] == [expected] * gloo.size


@pytest.mark.parametrize("autocast", ["", "bfloat16"])
def test_replicas_have_the_same_bits(gloo: World, kept_world: WorldFactory, autocast: str) -> None:
    expected = kept_world(1).run(train, autocast=autocast, no_sync=not autocast)
    assert gloo.run(train, autocast=autocast, no_sync=not autocast) == expected * gloo.size


def test_codecs_are_refused_by_name(gloo: World) -> None:
    gloo.run(refuses_gloo)
