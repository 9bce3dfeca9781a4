# SPDX-License-Identifier: Apache-2.0
"""Estimated counts of ids, beside exact ones."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from sennit.runtime.kernels.id_directory import counted
from sennit.runtime.kernels.id_sketch import CELLS_PER_ROW, LINES, IdSketch
from sennit.transport.errors import ArgumentError


def test_counts_are_never_too_low_and_seldom_too_high(seed: int) -> None:
    """The bound of the paper: too high by e·N/width or more with a probability of at most e^-lines."""
    rows, draw = 2_000, torch.Generator().manual_seed(seed)
    entries = torch.zeros(rows + 1, 2, dtype=torch.int64)
    sketch, exact = IdSketch(entries, 20), Counter[int]()
    for _ in range(30):
        ids = torch.cat([torch.randint(-100, 100, (50,), generator=draw), torch.randint(2**62, (450,), generator=draw)])
        distinct, counts = counted(ids)
        exact.update(ids.tolist())
        totals = sketch.add(distinct, counts)
        assert all(found >= exact[one] for one, found in zip(distinct.tolist(), totals.tolist(), strict=True))
    every = torch.tensor(list(exact))
    found = sketch.add(every, torch.zeros(len(every), dtype=torch.int64))
    excess = found - torch.tensor(list(exact.values()))
    assert excess.min() >= 0
    assert float((excess >= 2.718 * exact.total() / (CELLS_PER_ROW * rows)).double().mean()) <= 2.718**-LINES


def test_the_order_of_ids_in_a_batch_does_not_count_and_a_batch_can_be_taken_back(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    entries, others = (torch.zeros(40, 2, dtype=torch.int64) for _ in range(2))
    sketch, other = IdSketch(entries, 2), IdSketch(others, 2)
    for step in range(16):
        ids = torch.arange(60 * step, 60 * step + 60)
        counts = torch.randint(1, 4, (60,), generator=draw, dtype=torch.int32)
        order = torch.randperm(60, generator=draw)
        before = entries.clone()
        sketch.begin()
        sketch.add(ids + 7, counts)
        sketch.add(ids, counts)
        sketch.undo()
        assert entries.equal(before)
        sketch.begin()
        totals = sketch.add(ids, counts)
        sketch.keep()
        assert other.add(ids[order], counts[order]).equal(totals[order])
        assert entries.equal(others)


def test_counts_are_halved_when_many_ids_have_come() -> None:
    sketch = IdSketch(torch.zeros(101, 2, dtype=torch.int64), 2)
    one = torch.tensor([5])
    assert sketch.most == 100
    assert [sketch.add(one, torch.tensor([count])).tolist() for count in (99, 1, 1)] == [[99], [100], [51]]


def test_a_count_ends_at_255() -> None:
    sketch = IdSketch(torch.zeros(101, 2, dtype=torch.int64), 255)
    assert [sketch.add(torch.tensor([-1]), torch.tensor([200])).tolist() for _ in range(3)] == [[200], [255], [255]]


def test_memory_that_is_no_sketch_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"entries are torch.int64 of \(4, 3\); allowed: int64 of \(rows, 2\)"):
        IdSketch(torch.zeros(4, 3, dtype=torch.int64), 2)
