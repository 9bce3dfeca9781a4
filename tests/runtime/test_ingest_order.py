# SPDX-License-Identifier: Apache-2.0
"""The order of samples: one numbering of all batches of a run, a function of the settings alone."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sennit.offload.permutation import KeyedPermutation
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.order import Order
from sennit.runtime.sharded.slices import Slices

orders = st.builds(
    Order,
    name=st.just("small"),
    sample_count=st.integers(40, 300),
    seed=st.integers(0, 9),
    split=st.sampled_from(["random", "last"]),
    eval_fraction=st.sampled_from([0.1, 0.3]),
    batch_size=st.integers(1, 28),
    epochs=st.integers(1, 3),
    max_steps=st.one_of(st.none(), st.integers(1, 40)),
    slices=st.sampled_from([1, 2, 8, 32]),
    eval_every=st.one_of(st.none(), st.integers(1, 9)),
    validation_fraction=st.sampled_from([0.0, 0.2]),
    eval_rows=st.one_of(st.none(), st.integers(1, 9)),
)


def expected_run(order: Order) -> list[torch.Tensor]:
    """Returns the same order in the way a run goes: epoch by epoch, step by step."""
    rows = np.arange(order.sample_count)
    if order.split == "random":
        mixed = order.sample_count - (order.eval_rows or 0)
        rows[:mixed] = rows[KeyedPermutation(mixed, f"{order.seed}/split")(rows[:mixed])]
    cuts = [order.train_count, order.train_count + order.validation_count]
    train_rows, validation_rows, eval_rows = map(torch.from_numpy, np.split(rows, cuts))
    parts = [torch.split(rows, order.batch_size) for rows in (validation_rows, eval_rows)]
    evaluation = [part for of_rows in parts for part in of_rows if len(part)]
    batches, steps = [], 0
    for epoch in range(order.epochs):
        shuffle = KeyedPermutation(order.train_count, f"{order.seed}/order/{epoch}")(np.arange(order.train_count))
        shuffled = train_rows[torch.from_numpy(shuffle)]
        for begin in range(0, len(shuffled) - order.batch_size + 1, order.batch_size):
            batches.append(shuffled[begin : begin + order.batch_size])
            steps += 1
            if steps == order.max_steps:
                break
            is_last = begin + 2 * order.batch_size > len(shuffled)
            if order.eval_every is not None and steps % order.eval_every == 0 and not is_last:
                batches += evaluation
        batches += evaluation
        if steps == order.max_steps:
            break
    return batches


@given(order=orders)
def test_what_is_held_back_is_never_trained_on(order: Order) -> None:
    """This holds for any batch size, number of epochs and number of steps."""
    mask = order.is_training()
    assert int(mask.sum()) == order.train_count
    held_back = order.eval_rows or round(order.sample_count * order.eval_fraction)
    validation = round((order.sample_count - held_back) * order.validation_fraction)
    assert (order.eval_count, order.validation_count) == (held_back, validation)
    assert order.sample_count - order.train_count == held_back + validation
    if order.eval_rows:
        assert not mask[-order.eval_rows :].any()
    for step in range(order.step_count):
        assert bool(mask[order.rows(order.training_batch(step))].all())
    evaluated = torch.cat([order.rows(number) for number in order.evaluation_batches(order.step_count)])
    assert sorted(evaluated.tolist()) == (~mask).nonzero().squeeze(1).tolist()
    numbers = order.evaluation_batches(order.step_count)[order.validation_batches :]
    reported = torch.cat([order.rows(number) for number in numbers])
    assert len(reported) == order.eval_count
    if order.eval_rows:
        assert reported.tolist() == list(range(order.sample_count - order.eval_rows, order.sample_count))
    if order.split == "last":
        assert bool(mask[: order.train_count].all())


def test_each_epoch_has_each_training_row_once_in_another_order() -> None:
    order = Order(name="x", sample_count=1000, seed=3, split="random", eval_fraction=0.1, batch_size=100, epochs=2)
    epochs = [
        torch.cat([order.rows(order.training_batch(step)) for step in range(first, first + 9)]) for first in (0, 9)
    ]
    assert all(sorted(rows.tolist()) == order.is_training().nonzero().squeeze(1).tolist() for rows in epochs)
    assert not torch.equal(*epochs)


def test_an_order_of_billions_of_samples_takes_no_memory() -> None:
    """Lists of all rows would take 32 GB each."""
    order = Order(name="x", sample_count=4 * 10**9, seed=1, split="random", eval_fraction=0.1, batch_size=64, epochs=1)
    tracemalloc.start()
    rows = torch.cat([order.rows(number) for number in (0, 1, order.batch_count - 1)])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
    assert len(set(rows.tolist())) == len(rows)
    assert int(rows.max()) < order.sample_count
    assert int(rows.max()) > order.sample_count // 2


@given(order=orders)
def test_batches_are_numbered_as_a_run_meets_them(order: Order) -> None:
    expected = expected_run(order)
    assert order.batch_count == len(expected)
    for number, rows in enumerate(expected):
        assert torch.equal(order.rows(number), rows)
        assert order.size(number) == len(rows)
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


@given(order=orders, world_size=st.integers(1, 5), number=st.integers(0, 500))
def test_ranks_have_the_samples_of_their_slices(order: Order, world_size: int, number: int) -> None:
    """As the library cuts a batch, and slice by slice the same at any world size."""
    number %= order.batch_count
    world_size = min(world_size, order.slices)
    rows = order.rows(number)
    by_slice = [order.part(number, one, order.slices) for one in range(order.slices)]
    for rank in range(world_size):
        slices = Slices(count=order.slices, rank=rank, world_size=world_size)
        part = order.part(number, rank, world_size)
        assert torch.equal(part, rows[slices.own_samples(len(rows))])
        assert torch.equal(part, torch.cat(by_slice[slices.own.low : slices.own.high]))
        assert order.counts(number, world_size)[rank] == len(part)
    assert sum(order.counts(number, world_size)) == len(rows)


def test_any_order_of_asking_gives_the_same(seed: int) -> None:
    settings = {"split": "random", "eval_fraction": 0.2, "batch_size": 7, "epochs": 4}
    order, other = (Order(name="small", sample_count=100, seed=seed, **settings) for _ in range(2))  # type: ignore[arg-type]
    forwards = [order.rows(number) for number in range(order.batch_count)]
    for number in reversed(range(order.batch_count)):
        assert torch.equal(other.rows(number), forwards[number])


def test_what_is_in_no_run_is_named() -> None:
    order = Order(name="small", sample_count=20, seed=1, split="last", eval_fraction=0.1, batch_size=6, epochs=1)
    with pytest.raises(DataError, match="batch 4; allowed: 0 to 3"):
        order.rows(4)
    with pytest.raises(DataError, match="9 ranks; allowed: at most 8, the slices of a global batch"):
        order.part(0, 0, 9)
    with pytest.raises(DataError, match="0 slices; allowed: a power of two, 1 to 32,768"):
        replace(order, slices=0)
    with pytest.raises(DataError, match="small: 18 training samples do not fill one batch of 19"):
        Order(name="small", sample_count=20, seed=1, split="last", eval_fraction=0.1, batch_size=19, epochs=1)
    with pytest.raises(DataError, match="split 'first'; allowed: random, last"):
        Order(name="small", sample_count=20, seed=1, split="first", eval_fraction=0.1, batch_size=6, epochs=1)
    for changed, message in (
        ({"eval_rows": 20}, "small: 20 evaluation rows of 20; allowed: a part"),
        ({"eval_every": 0}, "evaluation every 0 steps; allowed: 1 or more"),
        ({"validation_fraction": 0.01}, "validation part 0.01 of 18 samples leaves 0 for validation"),
    ):
        with pytest.raises(DataError, match=message):
            replace(order, **changed)
    with pytest.raises(DataError, match="leaves 0 for evaluation"):
        Order(name="small", sample_count=3, seed=1, split="last", eval_fraction=0.1, batch_size=1, epochs=1)
