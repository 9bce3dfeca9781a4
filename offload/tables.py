# SPDX-License-Identifier: Apache-2.0
"""The lookup tables of Log1p, Logit, BoxCox and MapId. Every target uses the same tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sennit.offload.operators import BoxCox, Log1p, Logit, MapId, TableOperator

NAN_BITS: Final = 0x7FC00000
# Multiplicative hashing (Knuth, The Art of Computer Programming 3, section 6.4).
GOLDEN_RATIO_64: Final = 0x9E3779B97F4A7C15
PROBES_MAX: Final = 8


def function_table(operator: TableOperator) -> NDArray[np.uint32]:
    """Result bits: entry i belongs to the float32 with the bits i << (32 - operator.bits)."""
    bits = np.arange(1 << operator.bits, dtype=np.uint32) << np.uint32(32 - operator.bits)
    with np.errstate(all="ignore"):
        results = _function(operator, bits.view(np.float32).astype(np.float64)).astype(np.float32)
    found = results.view(np.uint32).copy()
    found[np.isnan(results)] = NAN_BITS
    return found


def _function(operator: TableOperator, x: NDArray[np.float64]) -> NDArray[np.float64]:
    if isinstance(operator, Log1p):
        return np.log1p(x)
    if isinstance(operator, Logit):
        clamped = np.clip(x, operator.eps, 1.0 - operator.eps)
        return np.log(clamped / (1.0 - clamped))
    assert isinstance(operator, BoxCox)
    found = np.log(x) if operator.power == 0.0 else (np.power(x, operator.power) - 1.0) / operator.power
    return np.where(x > 0.0, found, np.nan)


@dataclass(frozen=True, slots=True)
class IdDictionary:
    """A dictionary as an open-addressed table: an id is in one of the `probes` places from its hash on, or absent."""

    multiplier: int
    shift: int
    probes: int
    keys: NDArray[np.int64]
    values: NDArray[np.int64]


def id_table(operator: MapId) -> IdDictionary:
    """At most half full. Several multipliers are tried; the one with the fewest probes wins."""
    keys = np.fromiter(operator.mapping.keys(), np.int64, len(operator.mapping))
    values = np.fromiter(operator.mapping.values(), np.int64, len(operator.mapping))
    bits = max(4, int(2 * len(keys) - 1).bit_length())
    best: IdDictionary | None = None
    while best is None or best.probes > PROBES_MAX:
        for odd in range(1, 33, 2):
            found = _place(keys, values, operator.default, odd * GOLDEN_RATIO_64 % (1 << 64), bits)
            if best is None or found.probes < best.probes:
                best = found
        bits += 1
    return best


def _place(
    keys: NDArray[np.int64], values: NDArray[np.int64], default: int, multiplier: int, bits: int
) -> IdDictionary:
    """Linear probing in order of the home places: each key goes to its home or behind the key before it."""
    homes = (keys.view(np.uint64) * np.uint64(multiplier) >> np.uint64(64 - bits)).astype(np.int64)
    order = np.argsort(homes, kind="stable")
    steps = np.arange(len(keys), dtype=np.int64)
    places = np.maximum.accumulate(homes[order] - steps) + steps
    probes = int((places - homes[order]).max()) + 1
    # Extra places behind the last home, so that a search never wraps around.
    size = (1 << bits) + probes
    # An unused place holds an existing key and the default. A search for that key never reaches it: all places from the
    # key's home to its own place are used, and the first match wins.
    table_keys, table_values = np.full(size, keys[0]), np.full(size, default, np.int64)
    table_keys[places], table_values[places] = keys[order], values[order]
    return IdDictionary(multiplier=multiplier, shift=64 - bits, probes=probes, keys=table_keys, values=table_values)
