# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on counters by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def total(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns the sums by name."""
    sums: dict[str, int] = {}
    for one in counters:
        for name, value in one.items():
            sums[name] = sums.get(name, 0) + value
    return sums


def difference(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Returns the differences by name. A new counter started at 0."""
    return {name: value - before.get(name, 0) for name, value in after.items()}
