# SPDX-License-Identifier: Apache-2.0
"""What operators compute: TorchArrow's own examples, and cases with known results."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sennit.offload.columns import Ragged
from sennit.offload.operators import (
    BoxCox,
    Bucketize,
    Clamp,
    ClampList,
    Cross,
    Enumerate,
    FirstX,
    Log1p,
    Logit,
    MapId,
    NGram,
    Operator,
    PositiveModulus,
    SigridHash,
)
from sennit.offload.reference import apply
from sennit.offload.tables import id_table


def ids(*rows: list[int]) -> Ragged:
    return Ragged(
        np.array([len(row) for row in rows], np.int32), np.array([value for row in rows for value in row], np.int64)
    )


def rows(column: object) -> list[list[int]]:
    assert isinstance(column, Ragged)
    return [part.tolist() for part in np.split(column.values, np.cumsum(column.lengths)[:-1])]


def floats(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, np.float32)


def test_sigrid_hash_is_torcharrows() -> None:
    """The values of TorchArrow's own test, SigridHashTest.cpp: ids 1 to 16, salt 0, max_value 100."""
    expected = [60, 54, 54, 9, 4, 91, 11, 67, 79, 2, 25, 92, 98, 83, 66, 2]
    hashed = apply(SigridHash(column="x", salt=0, max_value=100), ids(list(range(1, 17))))
    assert rows(hashed) == [expected]
    assert rows(apply(SigridHash(column="x", salt=0, max_value=100), ids([1], [14, 15, 16]))) == [[60], [83, 66, 2]]


def test_bucketize_is_torcharrows() -> None:
    """TorchArrow's documentation: bucketize([1, 2, 3, 5, 8, 10, 11], borders 2, 5, 10) is [0, 0, 1, 1, 2, 2, 3]."""
    found = apply(Bucketize(column="x", borders=(2.0, 5.0, 10.0)), floats(1, 2, 3, 5, 8, 10, 11, math.nan))
    assert rows(found) == [[0], [0], [1], [1], [2], [2], [3], [3]]


@pytest.mark.parametrize(
    ("operator", "given", "expected"),
    [
        (FirstX(column="x", count=2), [[1, 2, 3], [], [4]], [[1, 2], [], [4]]),
        (PositiveModulus(column="x", divisor=5), [[7, -1, -5]], [[2, 4, 0]]),
        (ClampList(column="x", low=-1, high=2), [[-9, 0, 9]], [[-1, 0, 2]]),
        (Enumerate(column="x"), [[5, 5], [], [5]], [[0, 1], [], [0]]),
        (MapId(column="x", mapping={3: 30, -1: 7}, default=-2), [[3, 4], [-1]], [[30, -2], [7]]),
        (NGram(column="x", count=2), [[1], []], [[], []]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Operator) else "",
)
def test_operators_on_ids(operator: Operator, given: list[list[int]], expected: list[list[int]]) -> None:
    assert rows(apply(operator, ids(*given))) == expected


def test_grams_and_crosses_hash_the_same_pairs() -> None:
    """The 2-grams of (a, b) and the product of (a) with (b) are both hash_combine(a, b)."""
    gram = rows(apply(NGram(column="x", count=2), ids([11, 22, 33])))
    product = rows(apply(Cross(left="x", right="y"), ids([11, 22]), ids([22, 33])))
    assert gram == [[product[0][0], product[0][3]]]
    assert len(set(product[0])) == 4


def test_operators_on_dense_numbers() -> None:
    x = floats(-2.0, -0.0, 0.5, 3.0, math.nan)
    clamped = apply(Clamp(column="x", low=0.0, high=1.0), x)
    assert isinstance(clamped, np.ndarray)
    assert str(clamped.tolist()) == "[0.0, -0.0, 0.5, 1.0, nan]"
    # Numbers of eight significant bits need no rounding before the table is used.
    log = apply(Log1p(column="x"), floats(0.0, 1.0, 255.0, -2.0, math.inf))
    assert isinstance(log, np.ndarray)
    np.testing.assert_array_equal(log, floats(0.0, math.log(2), math.log(256), math.nan, math.inf))
    logit = apply(Logit(column="x", eps=0.25), floats(0.5, 0.0, 9.0))
    assert isinstance(logit, np.ndarray)
    np.testing.assert_array_equal(logit, floats(0.0, -math.log(3), math.log(3)))
    power = apply(BoxCox(column="x", power=2.0), floats(3.0, 1.0, 0.0, -1.0))
    assert isinstance(power, np.ndarray)
    np.testing.assert_array_equal(power, floats(4.0, 0.0, math.nan, math.nan))


def test_tables_are_as_near_as_their_bits(rng: np.random.Generator) -> None:
    x = np.exp(rng.uniform(-10, 10, 10_000)).astype(np.float32)
    for bits in (12, 16, 20):
        found = apply(Log1p(column="x", bits=bits), x)
        assert isinstance(found, np.ndarray)
        # 9 of the bits are sign and exponent. The error of x is half a unit in the last of the others.
        np.testing.assert_allclose(found, np.log1p(x), rtol=2.0 ** -(bits - 9))


@pytest.mark.parametrize("count", [1, 2, 1000, 40_000])
def test_tables_of_ids_have_every_key_once(count: int, rng: np.random.Generator) -> None:
    keys = np.unique(np.concatenate([rng.integers(-(1 << 63), 1 << 63, count), np.arange(count)]))
    table = id_table(MapId(column="x", mapping={int(key): int(key) ^ 1 for key in keys}, default=5))
    homes = (keys.view(np.uint64) * np.uint64(table.multiplier) >> np.uint64(table.shift)).astype(np.int64)
    found = np.full(len(keys), 5, np.int64)
    for probe in reversed(range(table.probes)):
        hit = table.keys[homes + probe] == keys
        found[hit] = table.values[homes + probe][hit]
    np.testing.assert_array_equal(found, keys ^ 1)
