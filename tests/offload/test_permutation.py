# SPDX-License-Identifier: Apache-2.0
"""Keyed bijections: against a second implementation, and against the statistics of a shuffle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.offload import _native
from sennit.offload.permutation import ROUNDS, KeyedPermutation

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """The finaliser of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def reference(size: int, keys: tuple[int, ...], place: int) -> int:
    """Follows the definition: a Feistel network, applied until the place is in the range again."""
    bits = max(2, (size - 1).bit_length())
    low_bits = bits // 2
    while True:
        low, high = place % (1 << low_bits), place >> low_bits
        for number, key in enumerate(keys):
            if number % 2 == 0:
                low ^= mix((high + key) & MASK) % (1 << low_bits)
            else:
                high ^= mix((low + key) & MASK) % (1 << (bits - low_bits))
        place = (high << low_bits) + low
        if place < size:
            return place


@given(size=st.one_of(st.integers(1, 300), st.sampled_from([2**16, 2**16 + 1, 99_991])), key=st.text(max_size=5))
def test_every_place_is_taken_once(size: int, key: str) -> None:
    moved = KeyedPermutation(size, key)(np.arange(size))
    assert np.array_equal(np.sort(moved), np.arange(size))


@given(size=st.integers(1, 2**62), key=st.text(max_size=5), data=st.data())
def test_the_native_permutation_is_the_one_that_is_defined(size: int, key: str, data: st.DataObject) -> None:
    permutation = KeyedPermutation(size, key)
    places = data.draw(st.lists(st.integers(0, size - 1), max_size=4))
    expected = [reference(size, permutation.round_keys, place) for place in places]
    assert permutation(np.array(places, np.int64)).tolist() == expected


def test_the_argument_stays_as_it_is() -> None:
    places = np.arange(9)
    KeyedPermutation(9, "x")(places)
    assert places.tolist() == list(range(9))


@pytest.mark.parametrize("size", [97, 1000, 2**13, 10_007])
def test_it_looks_like_a_shuffle(size: int) -> None:
    """Checks over many keys where places go, and how far apart neighbours are.

    Chi-squared is within 5 deviations of its mean. The keys are fixed, so the result is always the same.
    """
    keys = 20_000
    first = np.array([KeyedPermutation(size, f"{key}")(np.array([0, 1, size - 1])) for key in range(keys)])
    gaps = (first[:, 1] - first[:, 0]) % size - 1
    for places, count in ((first[:, 0], size), (first[:, 1], size), (first[:, 2], size), (gaps, size - 1)):
        cells = min(64, count)
        found = np.bincount(places * cells // count, minlength=cells)
        expected = np.diff(np.ceil(np.arange(cells + 1) * count / cells)) * keys / count
        statistic = float(((found - expected) ** 2 / expected).sum())
        assert abs(statistic - (cells - 1)) < 5 * (2 * (cells - 1)) ** 0.5
    # Two thirds of the places of a shuffle are peaks or valleys (Bienaymé 1874). The variance is (16 n - 29) / 90.
    moved = KeyedPermutation(size, "one")(np.arange(size))
    turns = float((np.diff(np.sign(np.diff(moved))) != 0).mean())
    assert abs(turns - 2 / 3) < 5 * (16 / 90 / size) ** 0.5


@pytest.mark.parametrize(
    ("size", "place", "message"),
    [
        (0, 0, r"size 0; allowed: 1 to 2\^62"),
        (2**62 + 1, 0, "size 4611686018427387905"),
        (5, 5, r"place 5; allowed: \[0, 5\)"),
        (5, -1, "place -1"),
    ],
)
def test_mistakes_are_told(size: int, place: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.permute(size, (0,) * ROUNDS, np.array([place], np.int64))
