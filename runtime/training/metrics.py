# SPDX-License-Identifier: Apache-2.0
"""Quality of predictions: exact AUC, log loss, normalised entropy, and calibration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """The quality of one set of predictions. Values that are not defined (one class only) are NaN."""

    auc: float
    """The probability that a positive sample scores above a negative one. A tie counts one half."""

    log_loss: float
    """Mean of -log(probability of the actual label), in nats."""

    normalised_entropy: float
    """Log loss divided by that of always predicting the base rate (He et al. 2014, section 3). 1 means no skill."""

    base_rate: float
    """The share of positive samples."""

    sample_count: int

    calibration: float = math.nan
    """Predicted positives divided by observed ones (He et al. 2014, section 3). 1 is best; below it, too few clicks are
    predicted. NaN without a positive sample, and in evaluations that earlier versions kept."""

    def text(self) -> str:
        """AUC, normalised entropy and calibration in words."""
        return (
            f"AUC {self.auc:.4f}, normalised entropy {self.normalised_entropy:.4f}, calibration {self.calibration:.4f}"
            + (f" (not defined: {self.undefined})" if self.undefined else "")
        )

    @property
    def undefined(self) -> str:
        """Why AUC and normalised entropy are NaN; empty where they are not."""
        if not math.isnan(self.auc):
            return ""
        if not self.sample_count:
            return "no sample is held back"
        return f"all {self.sample_count:,} held-back samples have the label {self.base_rate:.0f}"


METRICS: Final = {"auc": "AUC", "ne": "normalised entropy"}
"""The metrics by which an evaluation may be the best, and their names for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The quality after a step."""

    step: int
    epoch: int
    """Epochs that are over."""

    quality: Quality
    """On the evaluation rows."""

    validation: Quality | None = None
    """On the validation rows, if there are any."""

    labels: dict[str, Quality] = field(default_factory=dict)
    """On the evaluation rows by label, if samples have several. `quality` and `validation` are of the first."""

    window: str = ""
    """When the evaluated window begins, if a run trains window after window."""

    @classmethod
    def from_json(cls, told: Any) -> Self:
        """Reads what `asdict` and JSON made. Raises ValueError for anything else."""
        try:
            validation = told.get("validation")
            return cls(
                step=told["step"],
                epoch=told["epoch"],
                quality=_told(told["quality"]),
                validation=None if validation is None else _told(validation),
                labels={name: _told(one) for name, one in told.get("labels", {}).items()},
                window=told.get("window", ""),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not an evaluation: {error!r}") from None

    @property
    def judged(self) -> Quality:
        """What says whether the evaluation is the best."""
        return self.quality if self.validation is None else self.validation

    def loss(self, metric: str) -> float:
        """The value to minimise; inf if the metric is not defined."""
        found = -self.judged.auc if metric == "auc" else self.judged.normalised_entropy
        return math.inf if math.isnan(found) else found

    def text(self, metric: str) -> str:
        """The evaluation in words, with its metric."""
        value = self.judged.auc if metric == "auc" else self.judged.normalised_entropy
        where = " on validation samples" if self.validation is not None else ""
        return f"epoch {self.epoch} (step {self.step}): {METRICS[metric]} {value:.4f}{where}"


def _told(told: dict[str, Any]) -> Quality:
    """The quality from JSON, where null stands for values that are not defined."""
    values: dict[str, Any] = {name: math.nan if value is None else value for name, value in told.items()}
    return Quality(**values)


def quality(logits: npt.NDArray[np.floating], labels: npt.NDArray[np.floating]) -> Quality:
    """The quality of `logits` [N] for `labels` [N] of 0 and 1."""
    scores = Scores.of(logits, labels)
    sums = _exact_sum(_losses(logits, labels)), _exact_sum(_chances(logits))
    return _quality(scores.wins_twice, scores.positives, scores.negatives, *sums)


def quality_of_ranks(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None = None) -> Quality:
    """The quality of all ranks' predictions together, the same on every rank. Collective.

    `logits` float32 [N] and `labels` [N] are this rank's. The result is exact, and no rank holds more than its share.
    Ranks exchange distinct scores with their counts so that each handles one range of scores (a sample sort, whose
    splitters come from a histogram over the upper half of a score's bits). Ranges consist of whole bins. If all samples
    fall into one bin, a rank still gets at most 65,536 rows from each other rank: a bin has no more distinct scores.
    """
    world_size = dist.get_world_size(group)
    mine = Scores.of(logits.numpy(), labels.numpy())
    bins = mine.keys >> _BIN_BITS
    histogram = torch.from_numpy(np.bincount(bins, mine.counts, minlength=1 << _BIN_BITS).astype(np.int64))
    dist.all_reduce(histogram, group=group)
    # A bin goes to the rank whose share of all samples contains the bin's first sample.
    before = (torch.cumsum(histogram, 0) - histogram).numpy()
    owner = np.minimum(before * world_size // max(1, int(histogram.sum())), world_size - 1)
    sent = torch.from_numpy(np.bincount(owner[bins], minlength=world_size))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    rows = torch.from_numpy(np.stack((mine.keys.astype(np.int64), mine.positive, mine.counts - mine.positive), 1))
    arrived = rows.new_empty(int(received.sum()), 3)
    dist.all_to_all_single(arrived, rows, received.tolist(), sent.tolist(), group=group)
    ranged = Scores.merged(*arrived.numpy().T)
    parts: list[Any] = [None] * world_size
    sums = _exact_sum(_losses(logits.numpy(), labels.numpy())), _exact_sum(_chances(logits.numpy()))
    dist.all_gather_object(parts, (ranged.wins_twice, ranged.positives, ranged.negatives, *sums), group)
    wins_twice = positives = negatives = 0
    for wins, positive, negative, _, _ in parts:
        # Ranges rise with the ranks, so all negative samples so far score below these.
        wins_twice += wins + 2 * positive * negatives
        positives += positive
        negatives += negative
    losses, chances = (sum(part[place] for part in parts) for place in (3, 4))
    return _quality(wins_twice, positives, negatives, losses, chances)


_BIN_BITS: Final = 16
"""Half of the bits of a float32."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Distinct scores in rising order, and how many samples have each."""

    keys: npt.NDArray[np.uint32]
    """The bits of float32 scores as integers in the order of the numbers."""

    positive: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, logits: npt.NDArray[np.floating], labels: npt.NDArray[np.floating]) -> Self:
        # + 0 makes -0 the same score as 0.
        bits = (logits.astype(np.float32) + np.float32(0)).view(np.uint32)
        # IEEE 754 numbers of equal sign sort like their bits; negative ones in the opposite order.
        keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
        ones = np.ones(len(keys), np.int64)
        return cls.merged(keys, (labels > 0).astype(np.int64), (labels <= 0) * ones)

    @classmethod
    def merged(
        cls, keys: npt.NDArray[np.integer], positive: npt.NDArray[np.integer], negative: npt.NDArray[np.integer]
    ) -> Self:
        """Merges scores that may occur several times."""
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else np.zeros(0, np.intp)
        positive = np.add.reduceat(positive[order], starts) if len(keys) else positive
        negative = np.add.reduceat(negative[order], starts) if len(keys) else negative
        return cls(keys[starts].astype(np.uint32), positive.astype(np.int64), (positive + negative).astype(np.int64))

    @property
    def positives(self) -> int:
        return int(self.positive.sum())

    @property
    def negatives(self) -> int:
        return int(self.counts.sum()) - self.positives

    @property
    def wins_twice(self) -> int:
        """Twice the number of pairs in which a positive sample scores above a negative one, plus the number of ties."""
        negative = self.counts - self.positive
        below = np.cumsum(negative) - negative
        return int(np.sum(self.positive * (2 * below + negative)))


def _quality(wins_twice: int, positives: int, negatives: int, losses: int | float, chances: int | float) -> Quality:
    """The quality from counts, and from sums of losses and of predicted probabilities as `_exact_sum` returns them."""
    count, pairs = positives + negatives, positives * negatives
    base_rate = positives / count if count else float("nan")
    log_loss = losses / (count << _SUM_BITS) if count else float("nan")
    floor = _entropy(base_rate)
    return Quality(
        # The Mann-Whitney statistic. Up to here all numbers are integers.
        auc=wins_twice / (2 * pairs) if pairs else float("nan"),
        log_loss=log_loss,
        normalised_entropy=log_loss / floor if floor > 0 else float("nan"),
        base_rate=base_rate,
        sample_count=count,
        calibration=chances / (positives << _SUM_BITS) if positives else float("nan"),
    )


def _losses(logits: npt.NDArray[np.floating], labels: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Log losses. They use logits, so no probability rounds to 0 or 1: log(1 + e^x) - x·label."""
    scores = logits.astype(np.float64)
    losses: npt.NDArray[np.float64] = np.logaddexp(0, scores) - scores * labels.astype(np.float64)
    return losses


def _chances(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Predicted probabilities. The exponent is never above 0, so nothing overflows."""
    chances: npt.NDArray[np.float64] = np.exp(-np.logaddexp(0, -logits.astype(np.float64)))
    return chances


_SUM_BITS: Final = 52
"""The bits after the point of an exact sum."""


def _exact_sum(values: npt.NDArray[np.float64]) -> int | float:
    """The sum of numbers from 0, times 2^52: an integer, so that it does not depend on who adds up which.

    Not finite if a number is not.
    """
    if not np.isfinite(values).all():
        return float(values.sum())
    total, rest = 0, values
    for bits in (0, _SUM_BITS // 2, _SUM_BITS // 2):
        rest = rest * 2.0**bits
        whole = np.floor(rest)
        total = (total << bits) + int(whole.sum(dtype=np.int64 if whole.max(initial=0) < 2**26 else object))
        rest = rest - whole
    return total


def _entropy(rate: float) -> float:
    """The entropy of a coin with this probability, in nats."""
    if not 0 < rate < 1:
        return 0.0
    return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))
