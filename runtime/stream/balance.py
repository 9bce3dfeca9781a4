# SPDX-License-Identifier: Apache-2.0
"""Deals the samples of a batch to its slices so that their histories cost alike. A rule of the model: it decides which
samples a slice sums.

A sample with L events costs L (L + `ROW_COST`): attention grows with the square, everything else with the events. A
slice keeps its number of samples, so that the rest of a step does not change.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

ROW_COST: Final = 400
"""The cost of an event beside attention, where attention over L events costs L². Part of the model.

Passes of `hstu` over 16 to 256 events fitted 433 with a width of 16 and 388 with 64 (AMD EPYC, one core). Layers over
16 to 1,000 events fitted 506, 913 and 1,319 with widths of 16, 64 and 256 (Intel Xeon, AVX-512, within 5 %). Little
hangs on it: with true costs of 50 and 3,200 the dearest of 4 ranks was 1.3 % above the mean with 32 samples a rank,
and 0.0 % with 128. So it is a constant, and the same on all machines.
"""


BALANCE_VERSION: Final = 2
"""Incremented when the same lengths are dealt otherwise."""


def costs_of(lengths: Ints) -> Ints:
    """Int64 [n]: what samples with so many events cost by the rule."""
    return lengths * (lengths + ROW_COST)


def dealt(lengths: Ints, sizes: Sequence[int]) -> Ints:
    """Int64 [n]: the samples of a batch, slice after slice, each slice's in the order that they had.

    `lengths`: int64 [n], the events of each sample. `sizes`: the samples of each slice, n in all. The dearest sample
    goes first, each to the slice that has cost least so far and has room (Graham 1969, with room): of equal ones the
    first. Then slices of one size change places, so that those of a rank cost alike, too (`even_neighbours`).
    """
    costs = costs_of(lengths)
    slice_of = np.empty(len(lengths), np.int64)
    left = list(sizes)
    waiting = [(0, number) for number, size in enumerate(sizes) if size]
    for sample in np.argsort(-costs, kind="stable").tolist():
        cost, number = waiting[0]
        slice_of[sample] = number
        left[number] -= 1
        if left[number]:
            heapq.heapreplace(waiting, (cost + int(costs[sample]), number))
        else:
            heapq.heappop(waiting)
    count = len(sizes)
    if len(set(sizes)) == 1 and not count & (count - 1):
        totals = np.zeros(count, np.int64)
        np.add.at(totals, slice_of, costs)
        slice_of = np.argsort(even_neighbours(totals.tolist()))[slice_of]
    return np.argsort(slice_of, kind="stable")


def even_neighbours(costs: Sequence[int]) -> list[int]:
    """The numbers of 2^n slices in an order in which pairs of neighbours cost alike, pairs of pairs, and so on.

    The dearest stands beside the cheapest, the second beside the second cheapest; then pairs do the same. Of equal ones
    the first is the dearer. One sample may cost more than a slice should: then a rank has it beside cheap ones.
    """
    groups = [([number], cost) for number, cost in enumerate(costs)]
    while len(groups) > 1:
        groups.sort(key=lambda group: -group[1])
        half = len(groups) // 2
        groups = [
            (dear + cheap, cost + less)
            for (dear, cost), (cheap, less) in zip(groups[:half], reversed(groups[half:]), strict=True)
        ]
    return groups[0][0]
