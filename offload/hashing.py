# SPDX-License-Identifier: Apache-2.0
"""The integer hashes of TorchArrow's operators over NumPy arrays: the reference for the other targets.

`twang_mix64` is Thomas Wang's 64-bit mix, `hash_combine` folds from the right with CityHash's Hash128to64 (Pike and
Alakuijala); folly has both under these names.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_CITY_MULTIPLIER: Final = np.uint64(0x9DDFEA08EB382D69)
_GOLDEN_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)

U64 = NDArray[np.uint64]


def twang_mix64(ids: U64) -> U64:
    mixed = ~ids + (ids << np.uint64(21))
    mixed = mixed ^ (mixed >> np.uint64(24))
    mixed = mixed + (mixed << np.uint64(3)) + (mixed << np.uint64(8))
    mixed = mixed ^ (mixed >> np.uint64(14))
    mixed = mixed + (mixed << np.uint64(2)) + (mixed << np.uint64(4))
    mixed = mixed ^ (mixed >> np.uint64(28))
    mixed = mixed + (mixed << np.uint64(31))
    return np.asarray(mixed, np.uint64)


def hash_combine(first: U64, second: U64) -> U64:
    """Combines two hashes. For three, use `hash_combine(a, hash_combine(b, c))`."""
    a = (second ^ first) * _CITY_MULTIPLIER
    a = a ^ (a >> np.uint64(47))
    b = (first ^ a) * _CITY_MULTIPLIER
    b = b ^ (b >> np.uint64(47))
    return b * _CITY_MULTIPLIER


def splitmix64(seed: int, numbers: U64) -> U64:
    """Output number `numbers` of SplitMix64 with this seed (Steele, Lea, Flood, OOPSLA 2014)."""
    state = np.uint64(seed) + (numbers + np.uint64(1)) * _GOLDEN_GAMMA
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
