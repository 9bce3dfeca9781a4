# SPDX-License-Identifier: Apache-2.0
"""Samples of a batch that are dealt to its slices by what their histories cost."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("pyarrow")

import torch

from sennit.runtime.data.order import OrderSettings
from sennit.runtime.data.source import Source
from sennit.runtime.stream.balance import ROW_COST, dealt, even_neighbours
from sennit.runtime.stream.settings import StreamSettings, open_source
from sennit.runtime.stream.source import StreamSource
from sennit.transport.errors import ConfigError
from tests.extent import examples


def costs(lengths: Any) -> Any:
    return lengths * (lengths + ROW_COST)


@examples(100)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=70),
    slices=st.integers(1, 9),
)
def test_each_sample_is_dealt_once_and_slices_keep_their_sizes(lengths: list[int], slices: int) -> None:
    count = len(lengths)
    sizes = [(one + 1) * count // slices - one * count // slices for one in range(slices)]
    found = dealt(np.array(lengths), sizes)
    assert sorted(found.tolist()) == list(range(count))
    for part in np.split(found, np.cumsum(sizes)[:-1]):
        assert (np.diff(part) > 0).all()


def test_slices_cost_alike() -> None:
    lengths = np.random.default_rng(3).lognormal(3, 1.1, 512).astype(np.int64).clip(max=200)
    before, after = (
        costs(lengths)[order].reshape(8, 64).sum(1) for order in (np.arange(512), dealt(lengths, [64] * 8))
    )
    assert before.max() > 1.1 * before.mean()
    assert after.max() < 1.01 * after.mean()


def test_ranks_of_several_slices_cost_alike_where_one_sample_costs_more_than_a_slice_should() -> None:
    lengths = np.array([90, 80, 70, 60, *range(1, 13)])
    assert even_neighbours([9, 8, 7, 6, 3, 2, 1, 0]) == [0, 7, 3, 4, 1, 6, 2, 5]
    for ranks in (2, 4):
        of_rank = costs(lengths)[dealt(lengths, [2] * 8)].reshape(ranks, -1).sum(1)
        assert of_rank.max() < 1.25 * of_rank.mean()


def sources(worlds: int, *, histories: bool = True, **changed: Any) -> list[StreamSource]:
    data = Source(data="synthetic-yambda?rows=1000&users=20&items=50&last=40")
    run = OrderSettings(seed=1, split="last", eval_fraction=0.1, batch_size=96, epochs=1, max_steps=None, slices=8)
    found = open_source(data, StreamSettings(**{"balance": True, **changed}), run, seed=1, histories=histories)
    fitted = found.fit()
    return [StreamSource(found.stream, found.order, fitted, rank=rank, world_size=worlds) for rank in range(worlds)]


def lengths_of(batch: Any, source: StreamSource) -> torch.Tensor:
    names = [table.name for table in source.tables]
    found: torch.Tensor = batch.lengths[names.index("item_id")]
    return found


def test_lengths_to_plan_by_are_spread_over_the_stream() -> None:
    """Those of the first rows are short: nobody has a history yet."""
    (source,) = sources(1)
    with contextlib.closing(source):
        every = source.history_lengths(1_000)
        assert every is not None
        assert source.history_lengths(100) == every[::10]
        read = torch.cat([lengths_of(source.take(number), source) for number in range(9)])
        assert sorted(read.tolist()) == sorted(every[: len(read)])
        assert every[0] == 1
        assert sum(every) / 1_000 > 1.5 * sum(every[:100]) / 100
    plain = sources(1, balance=False, histories=False)
    with contextlib.closing(plain[0]) as source:
        assert source.history_lengths(5) is None


@pytest.mark.parametrize("order", ["time", "shuffled"])
def test_ranks_have_the_samples_of_a_rank_alone_slice_by_slice(order: str) -> None:
    (alone,) = sources(1, order=order)
    (plain,) = sources(1, order=order, balance=False)
    several = sources(3, order=order)
    try:
        for step in range(4):
            number = alone.order.training_batch(step)
            whole, unbalanced = alone.take(number), plain.take(number)
            parts = [source.take(number) for source in several]
            assert torch.equal(torch.cat([part.dense for part in parts]), whole.dense)
            assert torch.equal(torch.cat([lengths_of(part, alone) for part in parts]), lengths_of(whole, alone))
            assert sorted(lengths_of(whole, alone).tolist()) == sorted(lengths_of(unbalanced, plain).tolist())
            balanced, before = (
                costs(lengths_of(batch, alone).numpy().astype(np.int64)).reshape(8, 12).sum(1)
                for batch in (whole, unbalanced)
            )
            assert balanced.max() - balanced.min() <= before.max() - before.min()
        for number in alone.order.evaluation_batches(alone.order.step_count):
            assert torch.equal(alone.take(number).dense, plain.take(number).dense)
    finally:
        for source in (alone, plain, *several):
            source.close()


def test_it_needs_histories() -> None:
    run = OrderSettings(seed=1, split="last", eval_fraction=0.1, batch_size=64, epochs=1, max_steps=None, slices=8)
    with pytest.raises(ConfigError, match="--balance for synthetic-yambda without histories; allowed: with a model"):
        open_source(
            Source(data="synthetic-yambda?rows=1000&users=20&items=50"), StreamSettings(balance=True), run, seed=1
        )
