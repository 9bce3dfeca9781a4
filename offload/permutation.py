# SPDX-License-Identifier: Apache-2.0
"""A shuffle of any number of things that takes no memory: a keyed bijection on [0, size)."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sennit.offload import _native

ROUNDS: Final = 8


class KeyedPermutation:
    """Where each place goes: equal sizes and keys give equal permutations everywhere (`csrc/permutation.hpp`)."""

    def __init__(self, size: int, key: str) -> None:
        """`size`: 1 to 2^62. The round keys are SHA-256 digests of the key and of the number of the round."""
        self.size = size
        self.round_keys = tuple(
            int.from_bytes(hashlib.sha256(f"{key}/{number}".encode()).digest()[:8], "little")
            for number in range(ROUNDS)
        )

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Int64 [n] of places in [0, size) -> where they go, in the same order. ValueError for others."""
        moved = np.array(places, dtype=np.int64)
        _native.permute(self.size, self.round_keys, moved)
        return moved
