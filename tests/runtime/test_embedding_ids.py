# SPDX-License-Identifier: Apache-2.0
"""Ids dealt to row shards, and distinct ids: native code and torch agree with what Python does one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels import distinct, split_rows
from sennit.runtime.kernels.checks import IdError
from sennit.runtime.kernels.ids import distinct_in_torch, split_rows_in_torch
from sennit.transport.errors import ArgumentError

Split = Callable[[Tensor, Tensor, list[int]], tuple[Tensor, Tensor]]
Distinct = Callable[[Tensor], tuple[Tensor, Tensor]]
BOTH_SPLITS = pytest.mark.parametrize("split", [split_rows, split_rows_in_torch], ids=["native", "torch"])
BOTH_DISTINCTS = pytest.mark.parametrize("find", [distinct, distinct_in_torch], ids=["native", "torch"])
DTYPES = st.sampled_from((torch.int32, torch.int64))


@st.composite
def bags(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Bags, and the borders of shards, of which some may be empty."""
    most = draw(st.sampled_from((1, 20, 1000, (1 << 31) - 1)))
    shards = draw(st.sampled_from((1, 2, 5, 64, 65, 66, 67, 90)))
    inner = sorted(draw(st.lists(st.integers(0, most), min_size=shards - 1, max_size=shards - 1)))
    ids = st.integers(0, most - 1)
    return draw(st.lists(st.lists(ids, max_size=6), max_size=20)), [0, *inner, most]


@given(case=bags(), of_lengths=DTYPES, of_values=DTYPES)
def test_ids_are_dealt_in_the_order_of_their_bags(
    case: tuple[list[list[int]], list[int]], of_lengths: torch.dtype, of_values: torch.dtype
) -> None:
    given_bags, borders = case
    lengths = torch.tensor([len(bag) for bag in given_bags], dtype=of_lengths)
    values = torch.tensor([id_ for bag in given_bags for id_ in bag], dtype=of_values)
    shards = [
        [[id_ - low for id_ in bag if low <= id_ < high] for bag in given_bags]
        for low, high in itertools.pairwise(borders)
    ]
    for split in (split_rows, split_rows_in_torch):
        found_lengths, found = split(lengths, values, borders)
        assert (found_lengths.dtype, found.dtype) == (torch.int32, of_values)
        assert found_lengths.shape == (len(shards), len(given_bags))
        assert found_lengths.tolist() == [[len(bag) for bag in shard] for shard in shards]
        assert found.tolist() == [id_ for shard in shards for bag in shard for id_ in bag]


@BOTH_SPLITS
@pytest.mark.parametrize("wrong", [-1, 4, 30, 1 << 40])
def test_an_id_in_no_shard_is_named(split: Split, wrong: int) -> None:
    with pytest.raises(IdError, match=rf"id {wrong} at position 2; allowed: \[5, 30\)"):
        split(torch.tensor([1, 3]), torch.tensor([5, 29, wrong, 40]), [5, 6, 30])


@BOTH_SPLITS
@pytest.mark.parametrize(
    ("lengths", "text"), [([1, 1], "lengths of 2"), ([2, 2], "lengths of 4"), ([4, -1], "bag 1 has length -1")]
)
def test_lengths_that_do_not_count_the_ids_are_refused(split: Split, lengths: list[int], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        split(torch.tensor(lengths), torch.tensor([1, 2, 3]), [0, 2, 9])


@pytest.mark.parametrize("borders", [[], [0], [0, 5, 4]])
def test_borders_that_fall_are_refused(borders: list[int]) -> None:
    with pytest.raises(ArgumentError, match="borders"):
        split_rows(torch.tensor([1]), torch.tensor([0]), borders)


@pytest.mark.parametrize("ids", [torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([1, 2, 3])[::2]])
def test_other_tensors_are_refused(ids: Tensor) -> None:
    with pytest.raises(ArgumentError, match="values are"):
        distinct(ids)
    with pytest.raises(ArgumentError, match="values are"):
        split_rows(torch.tensor([1]), ids, [0, 9])


@BOTH_DISTINCTS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 500])
# Few ids, a table of bits, a sort, and ids that only torch takes.
@pytest.mark.parametrize(("low", "high"), [(0, 3), (0, 9000), (0, 1 << 31), (0, 1 << 45), (-40, 40)])
def test_distinct_ids_are_those_of_torch(
    find: Distinct, low: int, high: int, count: int, dtype: torch.dtype, seed: int
) -> None:
    if dtype is torch.int32:
        high = min(high, (1 << 31) - 1)
    values = torch.randint(low, high, (count,), generator=torch_stream(seed, "distinct")).to(dtype)
    values[-1:] = high - 1
    ids, places = find(values)
    wanted, wanted_places = torch.unique(values, return_inverse=True)
    assert (ids.dtype, places.dtype) == (torch.int64, torch.int64)
    assert torch.equal(ids, wanted.to(torch.int64))
    assert torch.equal(places, wanted_places)
    assert torch.equal(ids[places], values.to(torch.int64))


def test_the_limits_of_32_bits_are_ids_like_others() -> None:
    values = torch.tensor([(1 << 32) - 2, 0, (1 << 32) - 1, 1 << 32, (1 << 31), (1 << 32) - 2])
    for part in (values, values[[0, 1, 4, 5]]):
        ids, places = distinct(part)
        assert ids.tolist() == sorted(set(part.tolist()))
        assert torch.equal(ids[places], part)
