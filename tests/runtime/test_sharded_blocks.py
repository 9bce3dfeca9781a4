# SPDX-License-Identifier: Apache-2.0
# Torch types its dispatch thinly:
# mypy: disable-error-code="no-untyped-call"
"""Blocks of a batch in another order: the same numbers, by few operations of torch."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sennit.runtime.kernels.batch import Batch, sums_of_runs
from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.sharded.batch_parts import chosen_blocks, joined

DIMS = (3, 5)


class Counted(TorchDispatchMode):
    """Counts operations. On a GPU, each that is not a view costs a launch."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def blocks_of(count: int, pooling: Pooling) -> tuple[Batch, Any]:
    """Two bags in each block, with (number + bag) % 3 ids."""
    bags = torch.arange(2 * count)
    lengths = ((bags // 2 + bags % 2) % 3).to(torch.int32)
    batch = Batch(
        table_of_block=tuple(number % 2 for number in range(count)),
        bags_of_block=(2,) * count,
        lengths=lengths,
        values=torch.arange(int(lengths.sum())),
        pooling=pooling,
    )
    vectors = sums_of_runs(lengths, batch.bags_of_block) if pooling is Pooling.NONE else batch.bags_of_block
    size = sum(vector * DIMS[table] for vector, table in zip(vectors, batch.table_of_block, strict=True))
    return batch, torch.arange(size, dtype=torch.float32)


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.NONE])
def test_blocks_are_chosen_with_their_gradients(pooling: Pooling) -> None:
    batch, gradient = blocks_of(4, pooling)  # lengths 0 1, 1 2, 2 0, 0 1
    part, of_part = chosen_blocks(batch, gradient, [3, 1], DIMS)
    assert part.table_of_block == (1, 1)
    assert part.bags_of_block == (2, 2)
    assert part.lengths.tolist() == [0, 1, 1, 2]
    assert part.lengths.dtype == torch.int32
    assert part.values.tolist() == [6, 1, 2, 3]
    # Floats of the blocks before: of bags 6 10 6, of ids 3 15 6.
    expected = [*range(22, 32), *range(6, 16)] if pooling is Pooling.SUM else [*range(24, 29), *range(3, 18)]
    assert of_part.tolist() == expected


def test_more_blocks_take_no_more_operations() -> None:
    counts = []
    for blocks in (4, 400):
        batch, gradient = blocks_of(blocks, Pooling.SUM)
        with Counted() as counted:
            chosen_blocks(batch, gradient, range(blocks - 1, -1, -1), DIMS)
        counts.append(counted.operations)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("sizes", [[2, 0, 3], [0, 0, 5], [5], [5, 0]])
def test_sums_of_runs(sizes: list[int]) -> None:
    numbers = torch.tensor([1, 2, 4, 8, 16], dtype=torch.int32)
    assert sums_of_runs(numbers, sizes) == [int(part.sum()) for part in torch.split(numbers, sizes)]


def test_nothing_has_no_sums() -> None:
    assert sums_of_runs(torch.empty(0, dtype=torch.int32), []) == []


def test_parts_of_any_shape_and_type_are_joined() -> None:
    matrix = torch.arange(6).view(2, 3)
    assert joined([], torch.int32).tolist() == []
    assert joined([matrix, torch.tensor([9])], torch.int64).tolist() == [0, 1, 2, 3, 4, 5, 9]
    assert joined([matrix[:, :2], torch.tensor([9])], torch.int64).tolist() == [0, 1, 3, 4, 9]
    changed = joined([matrix, torch.tensor([1.5])], torch.float32)
    assert (changed.tolist(), changed.dtype) == ([0, 1, 2, 3, 4, 5, 1.5], torch.float32)
