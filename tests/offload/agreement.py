# SPDX-License-Identifier: Apache-2.0
"""Compares the results of two targets bit for bit: NaN equals NaN, and -0 differs from 0."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sennit.offload.batches import Batch
from sennit.offload.columns import ColumnValues, Ragged


def assert_same_bits(found: NDArray[Any], expected: NDArray[Any], what: str) -> None:
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}, {expected.dtype} expected"
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, {expected.shape} expected"
    raw = [np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}") for array in (found, expected)]
    wrong = np.argwhere(raw[0] != raw[1])
    assert not len(wrong), (
        f"{what}: first at {wrong[0]}: {found[tuple(wrong[0])]}, {expected[tuple(wrong[0])]} expected"
    )


def assert_same_column(found: ColumnValues, expected: ColumnValues, what: str) -> None:
    if isinstance(expected, Ragged):
        assert isinstance(found, Ragged), what
        assert_same_bits(found.lengths, expected.lengths, f"lengths of {what}")
        assert_same_bits(found.values, expected.values, f"values of {what}")
    else:
        assert isinstance(found, np.ndarray), what
        assert_same_bits(found, expected, what)


def assert_same_batch(found: Batch, expected: Batch) -> None:
    assert_same_bits(found.labels, expected.labels, "labels")
    assert_same_bits(found.dense, expected.dense, "dense")
    assert_same_bits(found.lengths, expected.lengths, "lengths")
    for table, (left, right) in enumerate(zip(found.values, expected.values, strict=True)):
        assert_same_bits(left, right, f"values of table {table}")
