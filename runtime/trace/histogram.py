# SPDX-License-Identifier: Apache-2.0
"""Histograms with eight slots per doubling, filled by `slot_of` in ebpf/include/slots.h."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

SLOTS_A_DOUBLING: Final = 8
BARS: Final = " ▁▂▃▄▅▆▇█"
BARS_MAX: Final = 24


def lower_bound(slot: int) -> int:
    """The least value of a slot."""
    if slot < SLOTS_A_DOUBLING:
        return slot
    doubling, step = divmod(slot, SLOTS_A_DOUBLING)
    return (SLOTS_A_DOUBLING + step) << (doubling - 1)


def from_array(slots: NDArray[Any]) -> Counter[int]:
    """Counts by slot, without empty slots."""
    return Counter({int(slot): int(slots[slot]) for slot in np.flatnonzero(slots)})


def percentile(counts: Mapping[int, int], share: float) -> int:
    """The quantile `share` (0 to 1): the middle of its slot, accurate to 1/16. 0 without counts."""
    left = share * sum(counts.values())
    for slot in sorted(counts):
        left -= counts[slot]
        if left <= 0:
            return (lower_bound(slot) + lower_bound(slot + 1) - 1) // 2
    return 0


def summary(counts: Mapping[int, int], name: str, percents: Iterable[int], prefix: str = "") -> dict[str, object]:
    """The fields of a JSON document: `<name>` with counts by least value, and `<prefix>p<percent>_us`."""
    percentiles = {f"{prefix}p{percent}_us": percentile(counts, percent / 100) for percent in percents}
    return percentiles | {name: {lower_bound(slot): counts[slot] for slot in sorted(counts)}}


def bars(counts: Mapping[int, int]) -> str:
    """The shape, from the least value to the greatest, as one line of block characters."""
    if not counts:
        return ""
    first, last = min(counts), max(counts)
    merged = (last - first) // BARS_MAX + 1
    heights = [0] * ((last - first) // merged + 1)
    for slot, count in counts.items():
        heights[(slot - first) // merged] += count
    top = max(heights)
    # Even the smallest count is visible.
    return "".join(BARS[-(-height * (len(BARS) - 1) // top)] for height in heights)
