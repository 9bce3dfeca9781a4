# SPDX-License-Identifier: Apache-2.0
"""How the slices of a global batch lie on ranks."""

import itertools

import pytest
import torch

from sennit.runtime.replicas.cutting import CutArguments
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


def test_a_rank_cuts_its_samples_by_the_global_batch_or_evenly() -> None:
    three = Slices(count=8, rank=2, world_size=3)  # Slices 5, 6, 7.
    assert three.own == Span(5, 8)
    assert three.own_sizes(30) == three.own_sizes(30, 80) == [10, 10, 10]
    assert three.own_sizes(31) == three.own_sizes(31, 93) == [10, 10, 11]
    assert three.own_sizes(2) == [0, 1, 1]
    assert three.own_sizes(3, 7) == [1, 1, 1]
    with pytest.raises(ArgumentError, match=r"31 samples on rank 2; of a global batch of 80 .* 50 to 79, 30 samples"):
        three.own_sizes(31, 80)
    assert three.parts([2, 0, 3]) == [slice(0, 2), slice(2, 2), slice(2, 5)]


def test_ranks_have_the_samples_of_their_slices_or_equally_many() -> None:
    three = Slices(count=8, rank=0, world_size=3)
    by_slice = three.batch_of([16, 24, 24])
    assert (by_slice.size, by_slice.is_by_slice) == (64, True)
    assert [by_slice.sizes(rank) for rank in range(3)] == [[8, 8], [8, 8, 8], [8, 8, 8]]
    equal = three.batch_of([32, 32, 32], 96)
    assert (equal.size, equal.is_by_slice) == (96, False)
    assert [equal.sizes(rank) for rank in range(3)] == [[16, 16], [10, 11, 11], [10, 11, 11]]
    assert three.batch_of([4, 7, 8], 19).is_by_slice
    with pytest.raises(
        ArgumentError, match=r"slices of 2 and 3 samples without a global_batch; .* with global_batch 19"
    ):
        three.batch_of([4, 7, 8])
    with pytest.raises(ArgumentError, match=r"16 samples on rank 0, 24 on rank 1; .* of 63 samples are 15 and 24"):
        three.batch_of([16, 24, 23])
    with pytest.raises(ArgumentError, match="a global batch of 90 samples, but all ranks together give 96"):
        three.batch_of([32, 32, 32], 90)


@pytest.mark.parametrize("world_size", [3, 5, 6, 7, 8])
@pytest.mark.parametrize("global_batch", range(1, 8))
@pytest.mark.parametrize("is_by_slice", [True, False])
def test_all_ranks_refuse_a_batch_that_leaves_one_without_samples(
    world_size: int, global_batch: int, is_by_slice: bool
) -> None:
    ranks = [Slices(count=8, rank=rank, world_size=world_size) for rank in range(world_size)]
    samples = [one.own_samples(global_batch) for one in ranks]
    counts = [one.stop - one.start for one in samples]
    if not is_by_slice:
        counts = [global_batch // world_size] * world_size
        if global_batch % world_size:
            return

    def outcome(own: Slices, count: int) -> str:
        try:
            CutArguments((torch.ones(count, 1),), own, global_batch)
        except ArgumentError as error:
            return str(error)
        return "taken"

    outcomes = [outcome(own, count) for own, count in zip(ranks, counts, strict=True)]
    is_good = all(one.stop > one.start for one in samples)
    assert all(("without a sample, but each rank needs one" in one) != is_good for one in outcomes)
    assert all((one == "taken") == is_good for one in outcomes)
    if not is_by_slice:
        assert all(CutArguments((torch.ones(count, 1),), own, None) for own, count in zip(ranks, counts, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("local_batch", [1, 5, 8, 37])
def test_both_rules_are_one_where_ranks_have_equally_many_slices(world_size: int, local_batch: int) -> None:
    for rank in range(world_size):
        one = Slices(count=8, rank=rank, world_size=world_size)
        total = local_batch * world_size
        assert one.batch_of([local_batch] * world_size).is_by_slice
        assert one.own_sizes(local_batch) == one.own_sizes(local_batch, total) == one.sizes(one.own, total)


@pytest.mark.parametrize("count", [0, 3, 1 << 16])
def test_slices_are_a_power_of_two(count: int) -> None:
    with pytest.raises(ConfigError, match="a power of two"):
        Slices(count=count, rank=0, world_size=1)


def test_too_few_slices_name_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"8 slices .* for 9 ranks.*16 slices.*at most 8 ranks"):
        Slices(count=8, rank=0, world_size=9)
