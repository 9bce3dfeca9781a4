# SPDX-License-Identifier: Apache-2.0
"""The best normalised entropy that any model can reach on samples of `synthetic-stream` and `synthetic-yambda`.

The true probability of each sample is known. So the normalised entropy (NE; He et al. 2014) of true
probabilities is known, too, and what a model has above it is its own loss. A model cannot reach it quite: it does not
know the weight of an id that was born just now.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from sennit.offload.hashing import U64
from sennit.runtime.data.errors import DataError
from sennit.runtime.stream.files import PIECE_ROWS
from sennit.runtime.stream.planted import F64, Planted, indices, probabilities

# The quantile 0.975 of the normal distribution.
NORMAL_975: Final = 1.959964


class TrueModel(Protocol):
    """The model that a stream was made of."""

    @property
    def row_count(self) -> int:
        """Samples of the stream."""

    def logits(self, index: U64) -> F64:
        """Float64 [n]: the true logits of samples."""

    def labels(self, index: U64, logits: F64 | None = None) -> npt.NDArray[np.bool_]:
        """Bool [n]: the labels of samples. `logits`: the true ones, if they are there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attainable:
    """What true probabilities reach on some samples."""

    rows: int
    base_rate: float
    """The share of clicks."""

    normalised_entropy: float
    """Of the true probabilities and the labels that were drawn from them."""

    expected: float
    """The same in expectation over labels: mean entropy of true probabilities / entropy of their mean."""

    half: float
    """Half of the interval of 95 % in which labels leave `normalised_entropy` around `expected`: about 1 / sqrt(rows).
    It is a normal approximation to first order in the sums of losses and of labels."""

    @classmethod
    def of(cls, planted: TrueModel, begin: int, end: int) -> Attainable:
        """Of the samples `begin` up to, not including, `end`, read piece by piece. Raises DataError for none."""
        if not 0 <= begin < end <= planted.row_count:
            raise DataError(f"samples {begin} to {end}; allowed: at least one of 0 to {planted.row_count}")
        sums = np.zeros(7)
        for logits, clicks in _pieces(planted, begin, end):
            chances = probabilities(logits)
            # log(1 + e^x) - x·label and its expectation. No probability is rounded to 0 or 1.
            losses, doubts = np.logaddexp(0, logits), chances * (1 - chances)
            parts = (losses - logits * clicks, losses - logits * chances, clicks, chances)
            sums += [part.sum() for part in (*parts, doubts, doubts * logits, doubts * logits**2)]
        loss, expected_loss, clicked, chance, *doubt = (float(one) / (end - begin) for one in sums)
        floor, ratio = _entropy(chance), expected_loss / _entropy(chance)
        # A label y adds (-x·y - ratio·H'(mean)·y) / H(mean), with H'(q) = -logit(q), and has the variance p(1 - p).
        away = ratio * math.log(chance / (1 - chance))
        variance = (doubt[2] - 2 * away * doubt[1] + away**2 * doubt[0]) / floor**2 / (end - begin)
        return cls(
            rows=end - begin,
            base_rate=clicked,
            normalised_entropy=loss / _entropy(clicked) if 0 < clicked < 1 else math.nan,
            expected=ratio,
            half=NORMAL_975 * math.sqrt(max(0.0, variance)),
        )


def by_day(planted: Planted) -> Iterator[Attainable]:
    """Of each day in turn."""
    rows = planted.settings.rows_per_day
    return (Attainable.of(planted, day * rows, (day + 1) * rows) for day in range(planted.settings.days))


def _pieces(planted: TrueModel, begin: int, end: int) -> Iterator[tuple[F64, npt.NDArray[np.bool_]]]:
    """True logits and labels of the samples in turn."""
    for piece in range(begin, end, PIECE_ROWS):
        index = indices(piece, min(piece + PIECE_ROWS, end))
        logits = planted.logits(index)
        yield logits, planted.labels(index, logits)


def _entropy(rate: float) -> float:
    """The entropy of a coin with this probability, in nats."""
    return -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
