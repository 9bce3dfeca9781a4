# SPDX-License-Identifier: Apache-2.0
"""Fits the constants of the cost model (transport/choice/cost_model.py) to times of collectives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sennit.errors import SennitError
from sennit.transport.choice.cost_model import Traffic
from sennit.transport.choice.costs import Costs

# The fit reweights its samples this often. The constants hardly change after half as many rounds.
ROUNDS: Final = 10
# A further peer adds at most this share to the price of a byte. A larger share is a disturbance.
PEER_SHARES: Final = tuple(step / 20 for step in range(21))
BYTES: Final = 2


class FitError(SennitError):
    """No constants explain the times."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A collective that ran."""

    traffic: Traffic
    folded_bytes: float
    seconds: float

    def estimate(self, costs: Costs) -> float:
        return self.traffic.seconds(costs) + self.folded_bytes * costs.fold_byte_s


def fit(samples: Sequence[Sample], *, default: Costs, fold_byte_s: float | None = None) -> Costs:
    """Returns the constants, none of them negative, whose estimates are nearest to the times, in ratios.

    `fold_byte_s` is given where it is known. What the samples do not depend on keeps its value in `default`. Raises
    FitError for times that are not above 0.
    """
    rows = np.array([_row(sample) for sample in samples])
    times = np.array([sample.seconds for sample in samples])
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise FitError("a collective took no time: the clock of this machine cannot be used")
    if fold_byte_s is not None:
        # Not more than most of a time.
        times = np.maximum(times - rows[:, 3] * fold_byte_s, times / 10)
        rows[:, 3] = 0
    more_peers = np.array([sample.traffic.further_peers for sample in samples])
    best, least = default, np.inf
    # With one number of peers the share cannot be told from the price of bytes.
    for share in PEER_SHARES if len(set(more_peers)) > 1 else (default.peer_share,):
        priced = rows.copy()
        priced[:, BYTES] *= 1 + share * more_peers
        values = _fit_rows(priced, times)
        error = float((np.log(priced @ values / times) ** 2).sum())
        if error < least:
            round_s, message_s, byte_s, folded_s = map(float, values)
            least, best = (
                error,
                Costs(
                    round_s=round_s,
                    message_s=message_s,
                    byte_s=byte_s,
                    peer_share=share,
                    fold_byte_s=folded_s if fold_byte_s is None else fold_byte_s,
                ),
            )
    return best


def _row(sample: Sample) -> tuple[float, ...]:
    """What each constant is multiplied by."""
    traffic = sample.traffic
    return traffic.rounds, traffic.messages, traffic.sent_bytes, sample.folded_bytes


def _fit_rows(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    # An error of the estimate e of a time t counts as (e - t)^2 / (e t): twice and half the time weigh the same.
    estimates, values = times, np.zeros(rows.shape[1])
    for _ in range(ROUNDS):
        weights = 1 / np.sqrt(estimates * times)
        values = _least_squares(rows * weights[:, None], times * weights)
        estimates = np.maximum(rows @ values, times / 100)
    return values


def _least_squares(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Non-negative least squares, by trying which of the few unknowns are above 0. Bytes always cost something."""
    scale = np.abs(rows).max(axis=0)
    others = [column for column in range(rows.shape[1]) if scale[column] > 0 and column != BYTES]
    best, least = np.zeros(rows.shape[1]), np.inf
    for count in range(len(others) + 1):
        for chosen in itertools.combinations(others, count):
            used = [BYTES, *chosen]
            found, *_ = np.linalg.lstsq(rows[:, used] / scale[used], times, rcond=None)
            error = float(((rows[:, used] / scale[used] @ found - times) ** 2).sum())
            if (found >= 0).all() and found[0] > 0 and error < least:
                least, best = error, np.zeros(rows.shape[1])
                best[used] = found / scale[used]
    return best
