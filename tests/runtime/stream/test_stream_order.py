# SPDX-License-Identifier: Apache-2.0
"""The order of a stream: which rows are in which batch of which rank, for any blocks, split and world."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.order import OrderSettings
from sennit.runtime.sharded.slices import Slices
from sennit.runtime.stream.order import ORDERS, Evaluation, StreamOrder
from sennit.runtime.stream.split import Last, OneInEach, Places, Split, split
from tests.extent import examples


@st.composite
def splits(draw: st.DrawFn, count: int) -> Split:
    if draw(st.booleans()):
        picked = draw(st.integers(0, count // 3))
        return Last(rest=count - picked, picked=picked)
    return OneInEach(count=count, picked=draw(st.integers(1, max(1, count // 2))), key=f"{draw(st.integers(0, 9))}")


@st.composite
def orders(draw: st.DrawFn) -> StreamOrder:
    sizes = draw(st.lists(st.integers(0, 90), min_size=1, max_size=9).filter(lambda found: sum(found) >= 60))
    held = draw(splits(sum(sizes)))
    validation = draw(st.one_of(st.none(), splits(held.rest)))
    order = draw(st.sampled_from(ORDERS))
    slices = draw(st.sampled_from([1, 2, 8]))
    return StreamOrder(
        name="small",
        block_ends=np.cumsum(np.array(sizes)),
        order=order,
        seed=draw(st.integers(0, 9)),
        held=held,
        validation=validation,
        batch_size=draw(st.integers(slices, 19)),
        epochs=1 if order == "time" else draw(st.integers(1, 3)),
        max_steps=draw(st.one_of(st.none(), st.integers(1, 20))),
        eval_every=draw(st.one_of(st.none(), st.integers(1, 9))),
        slices=slices,
        shuffle_rows=draw(st.integers(1, 300)),
    )


def rows_of(order: StreamOrder, number: int, rank: int = 0, world_size: int = 1) -> Places:
    """The rows of a rank's part of a batch, as a source would read them."""
    chunk = order.chunk(number, rank, world_size)
    read: list[Places] = [np.empty(0, np.int64)]
    for interval in chunk.intervals:
        rows = np.arange(*chunk.part.rows(interval))
        rows = rows[chunk.part.has(rows)]
        assert len(rows) == interval[1] - interval[0]
        read.append(rows)
    found: Places = np.concatenate(read)[chunk.places(number)]
    return found


@examples(3)
@given(order=orders())
def test_a_run_has_each_row_where_it_belongs(order: StreamOrder) -> None:
    rows = np.arange(order.sample_count)
    is_eval = order.held.is_picked(rows)
    is_validation = np.zeros_like(is_eval)
    if order.validation is not None:
        is_validation[~is_eval] = order.validation.is_picked(np.arange(order.held.rest))
    training = rows[~is_eval & ~is_validation]
    assert order.train_count == len(training)
    seen: list[int] = []
    for number in range(order.batch_count):
        found = rows_of(order, number)
        assert len(found) == order.size(number)
        step, behind = order.place(number)
        if not behind:
            assert order.training_batch(step) == number
            if step % order.steps_per_epoch == 0:
                seen = []
            seen += found.tolist()
            assert len(set(seen)) == len(seen)
            assert set(seen) <= set(training.tolist())
            if order.order != "shuffled":
                assert seen == training[: len(seen)].tolist()
        elif behind == order.eval_batches:
            begin = number - behind + 1
            parts = [rows_of(order, one) for one in range(begin, number + 1)]
            cut = order.validation_batches
            for wanted, got in ((is_validation, parts[:cut]), (is_eval, parts[cut:])):
                assert sorted(np.concatenate([np.empty(0, np.int64), *got])) == rows[wanted].tolist()


@given(order=orders())
def test_batches_are_numbered_as_a_run_meets_them(order: StreamOrder) -> None:
    walked: list[int] = []
    for step in range(order.step_count):
        walked.append(order.training_batch(step))
        done = step + 1
        every = order.eval_every or order.steps_per_epoch
        if done % order.steps_per_epoch == 0 or done % every == 0 or done == order.step_count:
            assert order.next_evaluation(done) == done
            evaluation = order.evaluation_batches(done)
            assert order.next_batch(done, evaluates=True) == evaluation.start
            walked += evaluation
        else:
            assert order.next_evaluation(done) > done
    assert walked == list(range(order.batch_count))
    # A resumed run has done the evaluation of its first step, but does the one at the end again.
    assert [order.next_batch(step) for step in range(order.step_count)] == [
        order.training_batch(step) for step in range(order.step_count)
    ]
    assert order.next_batch(order.step_count) == order.batch_count - order.eval_batches


@examples(8)
@given(order=orders(), world_size=st.sampled_from([1, 2, 3, 5, 8]))
def test_ranks_together_have_the_batches_of_one(order: StreamOrder, world_size: int) -> None:
    if world_size > order.slices:
        with pytest.raises(DataError, match="at most"):
            order.chunk(0, 0, world_size)
        return
    for number in range(order.batch_count):
        parts = [rows_of(order, number, rank, world_size) for rank in range(world_size)]
        whole = rows_of(order, number)
        assert [len(part) for part in parts] == order.counts(number, world_size)
        for rank, part in enumerate(parts):
            # As the library cuts a batch.
            slices = Slices(count=order.slices, rank=rank, world_size=world_size)
            assert np.array_equal(part, whole[slices.own_samples(len(whole))])


@given(order=orders())
def test_a_chunk_names_the_one_that_follows(order: StreamOrder) -> None:
    for number in range(order.batch_count):
        chunk = order.chunk(number, 0, 1)
        if chunk.following is not None:
            assert order.chunk(chunk.following, 0, 1).key != chunk.key
            assert chunk.following > number


def test_a_rank_reads_the_blocks_of_its_slices_alone() -> None:
    blocks = 64
    order = StreamOrder(
        name="large",
        block_ends=np.arange(1, blocks + 1) * 1000,
        order="shuffled",
        seed=3,
        held=Last(rest=64_000, picked=0),
        batch_size=80,
        slices=8,
        shuffle_rows=4000,
    )
    read: list[set[int]] = []
    for rank in range(8):
        rows = np.concatenate([rows_of(order, step, rank, 8) for step in range(order.steps_per_epoch)])
        read.append(set((rows // 1000).tolist()))
    assert all(len(found) <= blocks // 8 + 1 for found in read)
    # Rows of a window are mixed: a batch of one slice has rows of far apart.
    first = rows_of(order, 0, 0, 8)
    assert np.ptp(first) > 100
    # Another epoch mixes the blocks anew.
    assert (
        order.chunk(0, 0, 8).intervals
        != StreamOrder(
            **{name: getattr(order, name) for name in ("name", "block_ends", "order", "held", "batch_size", "slices")},
            seed=4,
            shuffle_rows=4000,
        )
        .chunk(0, 0, 8)
        .intervals
    )


@given(
    count=st.integers(2, 300), fraction=st.floats(0.01, 0.99), first=st.one_of(st.just(0), st.integers(0, 2 * 10**10))
)
def test_a_random_split_has_the_share_that_is_asked_for(count: int, fraction: float, first: int) -> None:
    """Also where products of places and counts have more than 64 bits. `first`: places that are not looked at."""
    whole = count + first
    if not 0 < round(whole * fraction) < whole or round(whole * fraction) > 3 * 10**9:
        return
    made = split("random", "evaluation", whole, fraction, f"{count}")
    assert isinstance(made, OneInEach)
    assert made.picked == round(whole * fraction)
    places = np.arange(first, whole)
    is_picked = made.is_picked(places)
    before = made.before(np.arange(first, whole + 1))
    assert np.array_equal(np.diff(before), ~is_picked)
    assert before[-1] == made.rest
    for number in (int(before[0]), made.rest - 1):
        place = made.place_of_rest(number)
        if place >= first:
            assert not is_picked[place - first]
            assert before[place - first] == number
    last = made.place_of_picked(made.picked - 1)
    if last >= first:
        assert is_picked[last - first]
        assert not is_picked[last - first + 1 :].any()
    # No stretch of places has all that are picked, or none of them.
    assert abs(int(is_picked.sum()) - count * fraction) < 3


def test_windows_of_an_epoch_have_one_size() -> None:
    """The last of 10 batches would else be a window of its own, whose rows are those of few blocks."""
    order = StreamOrder(
        name="short",
        block_ends=np.arange(1, 11) * 100,
        order="shuffled",
        seed=3,
        held=Last(rest=1000, picked=0),
        batch_size=100,
        shuffle_rows=900,
    )
    windows = [order.chunk(number, 0, 1).key for number in range(10)]
    assert [windows.count(window) for window in dict.fromkeys(windows)] == [5, 5]


def test_a_window_is_evaluated_before_it_is_trained_on() -> None:
    """Windows of 25, 30 and 45 rows: each step has 10 rows, and an evaluation begins where training has ended."""
    evaluations = (
        Evaluation(steps=3, numbers=(30, 55), name="second"),
        Evaluation(steps=6, numbers=(60, 100), name="third"),
    )
    order = StreamOrder(
        name="days",
        block_ends=np.array([40, 100]),
        order="time",
        seed=1,
        held=Last(rest=100, picked=0),
        batch_size=10,
        slices=2,
        rolling=evaluations,
    )
    assert order.step_count == 6
    assert order.next_evaluation(1) == order.next_evaluation(3) == 3
    assert order.next_evaluation(4) == 6
    assert order.evaluated(3) == "second"
    found = [rows_of(order, number) for number in range(order.batch_count)]
    assert [len(rows) for rows in found] == [10] * 3 + [10, 10, 5] + [10] * 3 + [10] * 4
    assert np.concatenate([*found[:3], *found[6:9]]).tolist() == list(range(60))
    assert sorted(np.concatenate(found[3:6])) == list(range(30, 55))
    assert sorted(np.concatenate(found[9:])) == list(range(60, 100))
    assert order.next_batch(3, evaluates=True) == 3
    assert order.next_batch(3) == 6


def test_what_cannot_be_ordered_is_refused() -> None:
    run = OrderSettings(seed=1, split="last", eval_fraction=0.1, batch_size=6, epochs=1, max_steps=None)
    for changed, message in (
        ({"slices": 0}, "0 slices; allowed: a power of two, 1 to 32,768"),
        ({"split": "first"}, "split 'first'; allowed: random, last"),
        ({"eval_every": 0}, "evaluation every 0 steps; allowed: 1 or more"),
    ):
        with pytest.raises(DataError, match=message):
            replace(run, **changed)
    with pytest.raises(DataError, match="leaves 0 for evaluation"):
        split("last", "evaluation", 10, 0.01, "key")
    with pytest.raises(DataError, match=r"part 0\.99 of 10 samples leaves 10 for evaluation"):
        split("random", "evaluation", 10, 0.99, "key")
    with pytest.raises(DataError, match="2 epochs in order of time; allowed: 1"):
        StreamOrder(
            name="x",
            block_ends=np.array([9]),
            order="time",
            seed=1,
            held=Last(rest=9, picked=0),
            batch_size=3,
            epochs=2,
        )
