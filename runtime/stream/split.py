# SPDX-License-Identifier: Apache-2.0
"""Which rows of a stream are held back for evaluation, so that a training position is a row by arithmetic.

A split divides the places 0, 1, …, n - 1 into those *picked* and the *rest*; both keep their order. Two splits, one for
evaluation and one for validation, give a stream its three parts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from sennit.runtime.data.errors import DataError

Places = NDArray[np.int64]

# Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014), SplitMix64.
_GAMMA: Final = 0x9E3779B97F4A7C15


class Split(Protocol):
    """Places in [0, picked + rest)."""

    @property
    def picked(self) -> int:
        """How many are picked."""

    @property
    def rest(self) -> int:
        """How many are not."""

    def is_picked(self, places: Places) -> NDArray[np.bool_]:
        """Which of these places are picked."""

    def before(self, places: Places) -> Places:
        """How many of the rest are before each of these places in [0, picked + rest]."""

    def place_of_rest(self, number: int) -> int:
        """Where number `number` of the rest is. `number` in [0, rest]."""

    def place_of_picked(self, number: int) -> int:
        """Where number `number` of those picked is. `number` in [0, picked]."""

    def number_in_rest(self, places: Places) -> Places:
        """The numbers in the rest of places of the rest."""


@dataclass(frozen=True, kw_only=True)
class Last:
    """The last places are picked."""

    rest: int
    picked: int

    def is_picked(self, places: Places) -> NDArray[np.bool_]:
        return places >= self.rest

    def before(self, places: Places) -> Places:
        return np.minimum(places, self.rest)

    def place_of_rest(self, number: int) -> int:
        return number

    def place_of_picked(self, number: int) -> int:
        return self.rest + number

    def number_in_rest(self, places: Places) -> Places:
        return places


@dataclass(frozen=True, kw_only=True)
class OneInEach:
    """One place in each group of `group` consecutive ones is picked, by a hash of `key` and the group's number.

    Places behind the last whole group are of the rest.
    """

    count: int
    group: int
    key: str
    picked: int = field(init=False)
    rest: int = field(init=False)
    _salt: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "picked", self.count // self.group)
        object.__setattr__(self, "rest", self.count - self.picked)
        salt = int.from_bytes(hashlib.sha256(self.key.encode()).digest()[:8], "little")
        object.__setattr__(self, "_salt", salt)

    def _choice(self, groups: Places) -> Places:
        """The place within each group that is picked, and `group` for a group that is not whole."""
        mixed = (groups.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA) + np.uint64(self._salt)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        chosen = (mixed % np.uint64(self.group)).astype(np.int64)
        return np.where(groups < self.picked, chosen, self.group)

    def _choice_in(self, group: int) -> int:
        return int(self._choice(np.array([group], np.int64))[0])

    def is_picked(self, places: Places) -> NDArray[np.bool_]:
        groups, within = np.divmod(places, self.group)
        # Neighbours share a group, so each group's hash is taken once.
        first = int(groups.min()) if len(groups) else 0
        known = self._choice(np.arange(first, first + 1 + (int(groups.max()) - first if len(groups) else 0)))
        found: NDArray[np.bool_] = within == known[groups - first]
        return found

    def before(self, places: Places) -> Places:
        groups, within = np.divmod(places, self.group)
        return places - np.minimum(groups, self.picked) - (within > self._choice(groups))

    def place_of_rest(self, number: int) -> int:
        group = min(number // (self.group - 1), self.picked)
        within = number - group * (self.group - 1)
        return group * self.group + within + (within >= self._choice_in(group))

    def place_of_picked(self, number: int) -> int:
        if number >= self.picked:
            return self.count
        return number * self.group + self._choice_in(number)

    def number_in_rest(self, places: Places) -> Places:
        groups, within = np.divmod(places, self.group)
        whole = np.minimum(groups, self.picked)
        return places - whole - (within > self._choice(groups))


def split(how: str, what: str, count: int, fraction: float, key: str) -> Split:
    """Holds back about this fraction of `count` places for `what`. `how`: "random" or "last".

    Raises DataError if one of the two parts would be empty.
    """
    if how == "last":
        picked = round(count * fraction)
        made: Last | OneInEach = Last(rest=count - picked, picked=picked)
    else:
        group = round(1 / fraction)
        if group < 2:
            raise DataError(f"{what} part {fraction} of a stream; allowed: up to 0.66 unless --split last")
        made = OneInEach(count=count, group=group, key=key)
    if not made.picked or not made.rest:
        raise DataError(f"{what} part {fraction} of {count} samples leaves {made.picked} for {what}")
    return made
