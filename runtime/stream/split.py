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
    """The places are cut into `picked` groups of consecutive ones, whose sizes differ by one at most. One place of each
    group is picked, by a hash of `key` and the group's number.
    """

    count: int
    picked: int
    """In [1, count]."""

    key: str
    rest: int = field(init=False)
    _size: int = field(init=False)
    """Places of the smaller groups."""

    _larger: int = field(init=False)
    """How many groups have one place more."""

    _salt: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rest", self.count - self.picked)
        size, larger = divmod(self.count, self.picked)
        object.__setattr__(self, "_size", size)
        object.__setattr__(self, "_larger", larger)
        salt = int.from_bytes(hashlib.sha256(self.key.encode()).digest()[:8], "little")
        object.__setattr__(self, "_salt", salt)

    def _begin(self, groups: Places) -> Places:
        """The first place of each group: `groups * count // picked`, which could be too large for 64 bits."""
        return groups * self._size + groups * self._larger // self.picked

    def _group(self, places: Places) -> Places:
        """The group of each place; `picked` for the place behind the last one."""
        # A double is exact enough to be wrong by one group at most.
        groups = (places * (self.picked / self.count)).astype(np.int64)
        groups -= self._begin(groups) > places
        groups += self._begin(groups + 1) <= places
        return groups

    def _choice(self, groups: Places) -> Places:
        """The place within each group that is picked."""
        mixed = (groups.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA) + np.uint64(self._salt)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        sizes = self._begin(groups + 1) - self._begin(groups)
        return (mixed % sizes.astype(np.uint64)).astype(np.int64)

    def is_picked(self, places: Places) -> NDArray[np.bool_]:
        if not len(places):
            return np.zeros(0, np.bool_)
        # Neighbours share a group, so each group's hash is taken once.
        first, last = self._group(np.array([places.min(), places.max()]))
        groups = np.arange(first, last + 1)
        chosen = self._begin(groups) + self._choice(groups)
        found: NDArray[np.bool_] = chosen[self._group(places) - first] == places
        return found

    def before(self, places: Places) -> Places:
        groups = self._group(places)
        return places - groups - (places > self._begin(groups) + self._choice(groups))

    def place_of_rest(self, number: int) -> int:
        if number >= self.rest:
            return self.count
        # The rest of groups before group g are g * rest // picked.
        group = ((number + 1) * self.picked - 1) // self.rest
        within = number - group * self.rest // self.picked
        return self._begin_of(group) + within + (within >= self._choice_in(group))

    def place_of_picked(self, number: int) -> int:
        return self.count if number >= self.picked else self._begin_of(number) + self._choice_in(number)

    def number_in_rest(self, places: Places) -> Places:
        return self.before(places)

    def _begin_of(self, group: int) -> int:
        return int(self._begin(np.array([group], np.int64))[0])

    def _choice_in(self, group: int) -> int:
        return int(self._choice(np.array([group], np.int64))[0])


def split(how: str, what: str, count: int, fraction: float, key: str) -> Split:
    """Holds back this fraction of `count` places for `what`. `how`: "random" or "last".

    Raises DataError if one of the two parts would be empty.
    """
    picked = round(count * fraction)
    if not 0 < picked < count:
        raise DataError(f"{what} part {fraction} of {count} samples leaves {picked} for {what}")
    return Last(rest=count - picked, picked=picked) if how == "last" else OneInEach(count=count, picked=picked, key=key)
