# SPDX-License-Identifier: Apache-2.0
"""How the slices of a global batch lie on ranks."""

import itertools

import pytest

from sennit.runtime.sharded import Slices
from sennit.transport.errors import ArgumentError, ConfigError
from sennit.transport.plans.tree import Span


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("global_batch", [8, 1000, 3])
def test_ranks_share_all_slices_and_samples(world_size: int, global_batch: int) -> None:
    ranks = [Slices(count=8, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert ranks[0].own.low == 0
    assert ranks[-1].own.high == 8
    assert all(one.own.high == other.own.low for one, other in itertools.pairwise(ranks))
    sizes = [size for one in ranks for size in one.sizes(one.own, global_batch)]
    assert sum(sizes) == global_batch
    assert max(sizes) - min(sizes) <= 1
    for one in ranks:
        samples = one.samples(one.rank, global_batch)
        assert samples.high - samples.low == sum(one.sizes(one.own, global_batch))
        assert next(node.low for node in one.nodes_of(one.rank)) == one.own.low


def test_slices_of_one_size_say_how_large_the_global_batch_is() -> None:
    three = Slices(count=8, rank=2, world_size=3)  # Slices 5, 6, 7.
    assert three.own == Span(5, 8)
    assert three.global_batch(30) == 80
    with pytest.raises(ArgumentError, match="31 samples on rank 2, which has 3 of the 8 slices"):
        three.global_batch(31)
    assert three.global_batch(3, given=7) == 7
    with pytest.raises(ArgumentError, match=r"31 samples on rank 2; of a global batch of 80 .* 50 to 79, 30 samples"):
        three.global_batch(31, given=80)
    assert three.parts([2, 0, 3]) == [slice(0, 2), slice(2, 2), slice(2, 5)]


@pytest.mark.parametrize("count", [0, 3, 1 << 16])
def test_slices_are_a_power_of_two(count: int) -> None:
    with pytest.raises(ConfigError, match="a power of two"):
        Slices(count=count, rank=0, world_size=1)


def test_too_few_slices_name_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"8 slices .* for 9 ranks.*16 slices.*at most 8 ranks"):
        Slices(count=8, rank=0, world_size=9)
