# SPDX-License-Identifier: Apache-2.0
"""The model that `synthetic-stream` plants: clicks whose parameters drift, and ids that are born and die.

Everything of a sample is a function of (seed, index of the sample) alone, so any block can be made without the others.

- **Clicks** come from a logistic model: an intercept, a weight for each dense feature, and a weight for each id.
- **Drift.** A weight is a path in time with mean 0 and variance 1, and its correlation with itself falls as
  exp(-lag / `drift_days`), as of an Ornstein-Uhlenbeck process. A process would need its whole past. A path is a sum of
  waves with random phases, whose frequencies have that process's spectrum (Cauchy's distribution).
- **Ids.** A table has so many *slots*, and draws them by Zipf's law. A slot has one id after the other, each for
  `life_days`. So popularity among the ids that live has the same law at any time.

The bits are the same on every machine: random numbers are integers (SplitMix64 by index), waves and normal deviates are
read from tables that are rounded to multiples of 2^-20, and sums have one order. What is left to the C library is the
last bit of `pow` in Zipf's law and of `exp` in the probability of a click. It decides one draw of about 10^15.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sennit.offload.hashing import U64, splitmix64
from sennit.runtime.data.seeds import derive
from sennit.runtime.stream.synthetic_settings import SyntheticStream

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

DAY_S: Final = 86_400
WAVES: Final = 8
"""Waves of a path. More come closer to a normal distribution, and take longer."""

DENSE_SCALE: Final = 0.8
ID_SCALE: Final = 1.6
"""Standard deviations that all dense features, and all ids, add to the logit of a click."""

_TABLE_BITS: Final = 16
_ROUNDED: Final = 1 << 20
_STEP_BITS: Final = 40
"""Bits behind the point of a frequency in waves a second."""


class Planted:
    """The samples of a stream by index, uint64 [n], and the true model behind them."""

    def __init__(self, settings: SyntheticStream) -> None:
        self.settings = settings
        self._life_s = max(1, round(settings.life_days * DAY_S))
        self._tables = [
            _Slots(count, self._life_s, settings.zipf, derive(settings.seed, "synthetic-stream", "table", number))
            for number, count in enumerate(settings.living)
        ]
        self._steps = _steps(settings.drift_days * DAY_S)
        # A normal logit of this variance moves the mean probability towards a half (Bishop 2006, section 4.5.2).
        odds = math.log(settings.base_rate / (1 - settings.base_rate))
        spread = math.sqrt(1 + math.pi / 8 * (DENSE_SCALE**2 + ID_SCALE**2))
        self._intercept = round(odds * spread * _ROUNDED) / _ROUNDED
        self._dense_gain = round(DENSE_SCALE / math.sqrt(settings.dense) * _ROUNDED) / _ROUNDED
        self._id_gain = round(ID_SCALE / math.sqrt(len(settings.living)) * _ROUNDED) / _ROUNDED

    @property
    def row_count(self) -> int:
        return self.settings.row_count

    def times(self, index: U64) -> I64:
        """Int64 [n]: seconds since the stream begins."""
        day, row = np.divmod(index, np.uint64(self.settings.rows_per_day))
        return (day * np.uint64(DAY_S) + row * np.uint64(DAY_S) // np.uint64(self.settings.rows_per_day)).view(np.int64)

    def dense(self, feature: int, index: U64) -> npt.NDArray[np.float32]:
        """Float32 [n]: the values of a dense feature, with mean 0 and variance 1."""
        drawn: npt.NDArray[np.float32] = self._dense(feature, index).astype(np.float32)
        return drawn

    def ids(self, table: int, index: U64) -> I64:
        """Int64 [n], 0 or more: the ids of a table, one a sample."""
        return self._tables[table].living(self._slots(table, index), self.times(index))[0]

    def labels(self, index: U64, logits: F64 | None = None) -> npt.NDArray[np.bool_]:
        """Bool [n]: whether a sample is a click. `logits`: the true ones of these samples, if they are there."""
        chances = probabilities(self.logits(index) if logits is None else logits)
        clicked: npt.NDArray[np.bool_] = self._uniform("labels", 0, index) < chances
        return clicked

    def logits(self, index: U64) -> F64:
        """Float64 [n]: the true logit of a click. No model predicts better."""
        return self._logits(index, None)

    def forecast(self, index: U64, until_s: int) -> F64:
        """Float64 [n]: logits by one who knows what all weights were at a time, and nothing that came later.

        What a weight is expected to be is its value then times its correlation. Ids that were born later have the
        expectation 0. The variance that is left draws probabilities towards a half (Bishop 2006, section 4.5.2).
        """
        return self._logits(index, until_s)

    def slots_of(self, table: int, time_s: int) -> tuple[I64, I64]:
        """(ids, seconds of their births), int64 [living]: those that live at a time, the most popular first."""
        slots = np.arange(self.settings.living[table], dtype=np.uint64)
        return self._tables[table].living(slots, np.full(len(slots), time_s, np.int64))

    def weights(self, ids: I64, time_s: I64) -> F64:
        """Float64 [n]: the weights of ids at times, with mean 0 and variance 1."""
        return self._path(ids.view(np.uint64), time_s)

    def _logits(self, index: U64, until_s: int | None) -> F64:
        time_s = self.times(index)
        seen_s, decay = time_s, np.ones(len(index))
        if until_s is not None:
            seen_s = np.minimum(time_s, until_s)
            decay = np.exp((seen_s - time_s) / (self.settings.drift_days * DAY_S))
        logits, left = np.full(len(index), self._intercept), np.zeros(len(index))
        for feature in range(self.settings.dense):
            key = np.full(len(index), derive(self.settings.seed, "synthetic-stream", "weight", feature), np.uint64)
            value = self._dense(feature, index) * self._dense_gain
            logits += value * (self._path(key, seen_s) * decay)
            left += value**2 * (1 - decay**2)
        for number, table in enumerate(self._tables):
            ids, born_s = table.living(self._slots(number, index), time_s)
            known = np.where(born_s <= seen_s, decay, 0)
            logits += self._path(ids.view(np.uint64), seen_s) * known * self._id_gain
            left += self._id_gain**2 * (1 - known**2)
        return logits if until_s is None else logits / np.sqrt(1 + math.pi / 8 * left)

    def _dense(self, feature: int, index: U64) -> F64:
        drawn: F64 = _normal()[self._random("dense", feature, index) >> np.uint64(64 - _TABLE_BITS)]
        return drawn

    def _slots(self, table: int, index: U64) -> U64:
        return self._tables[table].drawn(self._uniform("slot", table, index))

    def _uniform(self, name: str, number: int, index: U64) -> F64:
        return (self._random(name, number, index) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _random(self, name: str, number: int, index: U64) -> U64:
        return splitmix64(derive(self.settings.seed, "synthetic-stream", name, number), index)

    def _path(self, keys: U64, time_s: I64) -> F64:
        """Float64 [n]: the path of each key at its time.

        A wave's place is kept in units of 2^-64 waves, and wraps as integers do.
        """
        total, seconds = np.zeros(len(keys)), time_s.view(np.uint64)
        for number in range(WAVES):
            bits = splitmix64(derive(self.settings.seed, "synthetic-stream", "wave", number), keys)
            place = (bits << np.uint64(_TABLE_BITS)) + self._steps[bits >> np.uint64(64 - _TABLE_BITS)] * seconds
            total += _wave()[place >> np.uint64(64 - _TABLE_BITS)]
        return total * math.sqrt(2 / WAVES)


class _Slots:
    """The ids of one table."""

    def __init__(self, count: int, life_s: int, zipf: float, key: int) -> None:
        self._key, self._life_s = key, life_s
        shares = np.cumsum(np.arange(1, count + 1, dtype=np.float64) ** -zipf)
        self._ends = shares / shares[-1]

    def drawn(self, uniform: F64) -> U64:
        """The slots that these numbers in [0, 1) draw."""
        return np.searchsorted(self._ends, uniform, side="right").astype(np.uint64)

    def living(self, slots: U64, time_s: I64) -> tuple[I64, I64]:
        """(ids, seconds of their births): the id of each slot at its time. Births before 0 are negative."""
        life = np.uint64(self._life_s)
        # How long the slot's first id has lived when the stream begins.
        age = splitmix64(self._key, slots) >> np.uint64(32)
        age = (age * life) >> np.uint64(32)
        place = (time_s.view(np.uint64) + age) // life
        ids = splitmix64(self._key + 1, (place << np.uint64(32)) | slots) >> np.uint64(1)
        return ids.view(np.int64), (place * life - age).view(np.int64)


def probabilities(logits: F64) -> F64:
    """Of clicks, from their logits."""
    found: F64 = 1 / (1 + np.exp(-logits))
    return found


def indices(begin: int, end: int) -> U64:
    """The samples `begin` up to, not including, `end`."""
    return np.arange(begin, end, dtype=np.uint64)


def _middles() -> list[float]:
    """The middle of each of 2^16 equal parts of [0, 1]."""
    size = 1 << _TABLE_BITS
    return [(place + 0.5) / size for place in range(size)]


def _rounded(values: list[float]) -> F64:
    return np.asarray([round(value * _ROUNDED) / _ROUNDED for value in values])


@functools.cache
def _normal() -> F64:
    """Quantiles of the normal distribution."""
    return _rounded([statistics.NormalDist().inv_cdf(middle) for middle in _middles()])


@functools.cache
def _wave() -> F64:
    """One wave."""
    return _rounded([math.cos(2 * math.pi * middle) for middle in _middles()])


@functools.lru_cache(maxsize=4)
def _steps(drift_s: float) -> U64:
    """Quantiles of the frequencies, in units of 2^-64 waves a second.

    The spectrum of exp(-|lag| / drift_s) is Cauchy's density of angular frequencies, with the scale 1 / drift_s.
    """
    waves = [math.tan(math.pi / 2 * middle) / (2 * math.pi * drift_s) for middle in _middles()]
    rounded: list[Any] = [(round(one * (1 << _STEP_BITS)) << (64 - _STEP_BITS)) % (1 << 64) for one in waves]
    return np.asarray(rounded, np.uint64)
