# SPDX-License-Identifier: Apache-2.0
# Torch types some functions thinly:
# mypy: disable-error-code="no-untyped-call"
"""The directory of a dynamic table: which id has which row, beside a model in plain Python."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from sennit.runtime.kernels.id_directory import (
    Eviction,
    IdDirectory,
    counted,
    initial_rows,
    split_ids,
)
from sennit.transport.errors import ArgumentError

EDGES = (0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32))


class Model:
    """What a directory does, said plainly."""

    def __init__(self, row_count: int) -> None:
        self.entries: dict[int, tuple[int, int, int]] = {}
        """By id: row, last step, count."""

        self.row_count = row_count

    @property
    def free(self) -> list[int]:
        used = {row for row, _, _ in self.entries.values()}
        return [row for row in range(self.row_count) if row not in used]

    def find(self, ids: list[int], step: int) -> list[int]:
        found = []
        for one in ids:
            row, _, count = self.entries.get(one, (-1, 0, 0))
            if row >= 0 and step:
                self.entries[one] = row, step, count + 1
            found.append(row)
        return found

    def admit(self, ids: list[int], counts: list[int], step: int) -> list[int]:
        rows = self.free[: len(ids)]
        for one, row, count in zip(ids, rows, counts, strict=True):
            self.entries[one] = row, step, count
        return rows

    def victims(self, count: int, policy: Eviction, step: int) -> list[int]:
        order = sorted(
            (entry[2] if policy is Eviction.LFU else 0, entry[1], one, entry[0])
            for one, entry in self.entries.items()
            if entry[1] != step
        )
        return sorted(row for *_, row in order[:count])

    def evict(self, rows: list[int]) -> None:
        self.entries = {one: entry for one, entry in self.entries.items() if entry[0] not in rows}


@pytest.mark.parametrize("policy", Eviction)
@pytest.mark.parametrize("row_count", [1, 7, 16, 100])
def test_rows_are_those_of_the_model_whatever_is_admitted_and_evicted(row_count: int, policy: Eviction) -> None:
    draw = random.Random(f"{row_count} {policy}")
    entries = torch.zeros(row_count, 2, dtype=torch.int64)
    directory, model = IdDirectory(entries), Model(row_count)
    pool = [*EDGES, *(draw.randrange(-(2**63), 2**63) for _ in range(2 * row_count))]
    for step in range(1, 120):
        ids = draw.choices(pool, k=draw.randrange(1, row_count + 2))
        directory.begin()
        before, known = entries.clone(), dict(model.entries)
        rows, missing = directory.find(torch.tensor(ids), step)
        assert rows.tolist() == model.find(ids, step)
        assert missing == rows.tolist().count(-1)
        new, counts = counted(torch.tensor(ids)[rows < 0])
        if len(new) > directory.free:
            victims = directory.victims(len(new) - directory.free, policy, step)
            assert victims.tolist() == model.victims(len(new) - len(model.free), policy, step)
            directory.evict(victims)
            model.evict(victims.tolist())
        if len(new) > directory.free:
            with pytest.raises(ArgumentError, match=r"new ids; allowed: \d+"):
                directory.admit(new, counts, step)
            continue
        assert directory.admit(new, counts, step).tolist() == model.admit(new.tolist(), counts.tolist(), step)
        assert directory.used == len(model.entries)
        if draw.random() < 0.3:
            directory.undo()
            model.entries = known
            assert entries.equal(before)
            continue
        directory.keep()
        if step % 20 == 0:
            # It is made anew from its entries, as from a checkpoint.
            entries = entries.clone()
            directory = IdDirectory(entries)
    found, missing = directory.find(torch.tensor(list(model.entries)))
    assert missing == 0
    assert found.tolist() == [row for row, _, _ in model.entries.values()]
    assert directory.last[found].tolist() == [last for _, last, _ in model.entries.values()]
    assert directory.counts[found].tolist() == [count for _, _, count in model.entries.values()]


def test_a_full_directory_of_many_ids_finds_all_of_them() -> None:
    """Long clusters, places that wrap, and searches for ids that are not there."""
    count = 20_000
    ids = torch.from_numpy(np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 2 * count))
    directory = IdDirectory(torch.zeros(count, 2, dtype=torch.int64))
    rows = directory.admit(ids[:count], torch.ones(count), 1)
    assert rows.tolist() == list(range(count))
    found, missing = directory.find(ids)
    assert missing == count
    assert found[:count].equal(rows)
    odd = rows[rows % 2 == 1]
    directory.evict(odd)
    found, missing = directory.find(ids[:count])
    assert missing == len(odd)
    assert found.tolist() == [row if row % 2 == 0 else -1 for row in range(count)]
    assert directory.admit(ids[count:][: len(odd)], torch.ones(len(odd)), 2).equal(odd)
    assert directory.find(ids[count:][: len(odd)])[0].equal(odd)


def test_memory_beside_the_entries_is_within_eight_bytes_a_row() -> None:
    assert IdDirectory(torch.zeros(100_000, 2, dtype=torch.int64)).size_bytes <= 8 * 100_000


def test_a_directory_without_rows_finds_nothing() -> None:
    """With fewer rows than row shards some shards have none."""
    rows, missing = IdDirectory(torch.zeros(0, 2, dtype=torch.int64)).find(torch.arange(-50, 50), 1)
    assert (set(rows.tolist()), missing) == ({-1}, 100)


def test_an_id_with_two_rows_is_refused() -> None:
    with pytest.raises(ArgumentError, match="id 5 has two rows"):
        IdDirectory(torch.tensor([[5, 1], [6, 1], [5, 1]]))


def test_scores_decide_who_goes() -> None:
    directory = IdDirectory(torch.zeros(4, 2, dtype=torch.int64))
    directory.admit(torch.tensor([10, 11, 12, 13]), torch.ones(4), 1)
    scores = torch.tensor([0.5, math.inf, -1.0, 0.5], dtype=torch.float64)
    assert directory.victims(2, Eviction.LRU, 2, scores).tolist() == [0, 2]


def test_counts_do_not_wrap() -> None:
    entries = torch.tensor([[9, 1 | (-1 << 32)]])
    directory = IdDirectory(entries)
    directory.find(torch.tensor([9, 9]), 2)
    assert (directory.counts.tolist(), directory.last.tolist()) == ([2**32 - 1], [2])


def test_ids_are_dealt_to_shards_evenly_and_each_id_to_one() -> None:
    ids = torch.arange(-4000, 4000) * 1024
    lengths, dealt = split_ids(torch.full((80,), 100), ids, 8)
    assert lengths.sum(0).tolist() == [100] * 80
    sizes = lengths.sum(1)
    assert sizes.min() > 900
    assert sizes.max() < 1100
    again, other = split_ids(torch.full((80,), 100, dtype=torch.int32), ids.flip(0), 8)
    assert again.sum(1).equal(sizes)
    for one, two in zip(dealt.split(sizes.tolist()), other.split(sizes.tolist()), strict=True):
        assert one.flip(0).equal(two)
    with pytest.raises(ArgumentError, match="lengths of 99"):
        split_ids(torch.tensor([99]), ids[:100], 8)


def test_initial_rows_depend_on_id_and_column_alone() -> None:
    ids = torch.tensor([*EDGES, 12345])
    whole = initial_rows(ids, first_column=0, columns=37, seed=2**64 - 1, stream=7, bound=0.25)
    assert whole.abs().max() <= 0.25
    for first, columns in ((0, 5), (5, 1), (6, 31), (3, 34)):
        part = initial_rows(ids.flip(0), first_column=first, columns=columns, seed=2**64 - 1, stream=7, bound=0.25)
        assert part.flip(0).equal(whole[:, first : first + columns])
    assert len(whole.unique()) > 0.99 * whole.numel()
    many = initial_rows(torch.arange(4000), first_column=0, columns=8, seed=1, stream=7, bound=1.0)
    assert abs(float(many.mean())) < 0.02
    assert abs(float(many.std()) - 3**-0.5) < 0.01
    assert not many.equal(initial_rows(torch.arange(4000), first_column=0, columns=8, seed=1, stream=8, bound=1.0))


def test_initial_rows_are_philox() -> None:
    """The known answer of Random123 (Salmon et al. 2011) for counter and key of zeros: its first word is 6627e8d5."""
    row = initial_rows(torch.tensor([0]), first_column=0, columns=1, seed=0, stream=0, bound=1.0)
    assert float(row) == (0x6627E8D5 >> 8) * 2.0**-23 - 1
