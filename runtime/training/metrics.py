# SPDX-License-Identifier: Apache-2.0
"""Quality of predictions: exact AUC, log loss, and normalised entropy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """Of one set of predictions. NaN where it is not defined (one class only)."""

    auc: float
    """Chance that a positive sample scores above a negative one; a tie counts one half."""

    log_loss: float
    """Mean of -log(probability of what happened), in nats."""

    normalised_entropy: float
    """Log loss over that of always predicting the base rate (He et al. 2014, section 3); 1 is no skill."""

    base_rate: float
    """Share of positives."""

    sample_count: int


def quality(logits: npt.NDArray[np.floating], labels: npt.NDArray[np.floating]) -> Quality:
    """`logits` [N] real numbers, `labels` [N] of 0 and 1."""
    scores, truth = logits.astype(np.float64), labels.astype(np.float64)
    base_rate = float(truth.mean()) if len(truth) else float("nan")
    loss = log_loss(scores, truth)
    floor = _entropy(base_rate)
    return Quality(
        auc=auc(scores, truth),
        log_loss=loss,
        normalised_entropy=loss / floor if floor > 0 else float("nan"),
        base_rate=base_rate,
        sample_count=len(truth),
    )


def auc(scores: FloatArray, labels: FloatArray) -> float:
    """Exact, by rank: the Mann-Whitney statistic, where tied scores share their mean rank."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    positive = labels > 0
    positives = int(positive.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return float("nan")
    rank_sum = float(mean_rank[place.reshape(-1)[positive]].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def log_loss(logits: FloatArray, labels: FloatArray) -> float:
    """From logits, so that no probability rounds to 0 or 1: log(1 + e^x) - x·label."""
    return float(np.mean(np.logaddexp(0, logits) - logits * labels)) if len(labels) else float("nan")


def _entropy(rate: float) -> float:
    """Of a coin with that rate, in nats."""
    if not 0 < rate < 1:
        return 0.0
    return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))
