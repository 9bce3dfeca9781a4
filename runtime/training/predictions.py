# SPDX-License-Identifier: Apache-2.0
"""From predictions to their quality: exact AUC, also by group, log loss, normalised entropy, and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from sennit.offload.hashing import splitmix64
from sennit.runtime.data.samples import NOBODY
from sennit.runtime.training.metrics import GroupedAuc, Quality

_BIN_BITS: Final = 16
"""Half of the bits of a float32."""

_SUM_BITS: Final = 52
"""The bits after the point of an exact sum."""

_SIDES: Final = ("left", "right")
"""Of equal negative scores: before them, and behind them."""

_PAIRED_AT_ONCE: Final = 1 << 20
"""Positive scores, whose places among the negative ones are looked up together."""


def quality(logits: npt.NDArray[np.floating], labels: npt.NDArray[np.floating]) -> Quality:
    """The quality of `logits` [N] for `labels` [N] of 0 and 1."""
    found = Predictions()
    found.add(logits, labels)
    return found.quality()


class Predictions:
    """What is kept of predictions until they are judged: 4 bytes of each, and sums. With groups 16 bytes more."""

    def __init__(self, *, has_groups: bool = False, leaves_out: bool = False) -> None:
        """`has_groups`: whether each prediction comes with the group that it is of. `leaves_out`: those that are not
        finite are counted alone.
        """
        self._leaves_out, self._not_finite = leaves_out, 0
        self._grouped = GroupedScores() if has_groups else None
        self._positive: list[npt.NDArray[np.uint32]] = []
        self._negative: list[npt.NDArray[np.uint32]] = []
        # Of log losses and of predicted probabilities, as `_exact_sum` returns them.
        self._losses: int | float = 0
        self._chances: int | float = 0

    def add(
        self,
        logits: npt.NDArray[np.floating],
        labels: npt.NDArray[np.floating],
        groups: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Adds `logits` [N] for `labels` [N] of 0 and 1. `groups`: [N], if there are any."""
        if self._leaves_out and not (is_finite := np.isfinite(logits)).all():
            self._not_finite += len(logits) - int(is_finite.sum())
            logits, labels = logits[is_finite], labels[is_finite]
            groups = None if groups is None else groups[is_finite]
        keys = _keys(logits)
        if self._grouped is not None:
            assert groups is not None
            self._grouped.add(groups, keys, labels > 0)
        self._positive.append(keys[labels > 0])
        self._negative.append(keys[labels <= 0])
        self._losses += _exact_sum(_losses(logits, labels))
        self._chances += _exact_sum(_chances(logits))

    def quality(self) -> Quality:
        """Their quality alone."""
        positive, negative = Scores.of(self._positive), Scores.of(self._negative)
        wins_twice = _wins_twice(positive, negative)
        found = _quality(wins_twice, positive.samples, negative.samples, self._losses, self._chances)
        grouped = None if self._grouped is None else self._grouped.sums().auc()
        return replace(found, gauc=grouped, not_finite=self._not_finite)

    def quality_of_ranks(self, group: dist.ProcessGroup | None = None) -> Quality:
        """The quality of all ranks' predictions together, the same on every rank. Collective.

        The result is exact, and no rank holds more than its share. Each rank handles one range of scores (a sample
        sort, whose splitters come from a histogram over the upper half of a score's bits). Ranges consist of whole
        bins. A bin has at most 65,536 distinct scores, and these travel with their counts. So if all samples fall into
        one bin, its rank gets no more than that from each other rank.
        """
        mine = Scores.of(self._positive), Scores.of(self._negative)
        histogram = torch.from_numpy(mine[0].histogram() + mine[1].histogram())
        dist.all_reduce(histogram, group=group)
        # A bin goes to the rank whose share of all samples contains the bin's first sample.
        world_size, before = dist.get_world_size(group), (torch.cumsum(histogram, 0) - histogram).numpy()
        owner = np.minimum(before * world_size // max(1, int(histogram.sum())), world_size - 1)
        positive, negative = (scores.exchanged(owner, group) for scores in mine)
        parts: list[Any] = [None] * world_size
        own = _wins_twice(positive, negative), positive.samples, negative.samples
        dist.all_gather_object(parts, (*own, self._losses, self._chances, self._not_finite), group)
        wins_twice = positives = negatives = 0
        for wins, more_positives, more_negatives, *_ in parts:
            # Ranges rise with the ranks, so all negative samples so far score below these.
            wins_twice += wins + 2 * more_positives * negatives
            positives += more_positives
            negatives += more_negatives
        losses, chances, not_finite = (sum(part[place] for part in parts) for place in (3, 4, 5))
        grouped = None if self._grouped is None else self._grouped.auc_of_ranks(group)
        found = _quality(wins_twice, positives, negatives, losses, chances)
        return replace(found, gauc=grouped, not_finite=not_finite)


@dataclass(frozen=True, slots=True)
class Scores:
    """Distinct scores in rising order, and how many samples have each."""

    keys: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, keys: Sequence[npt.NDArray[np.uint32]]) -> Self:
        return cls(*np.unique(np.concatenate([np.zeros(0, np.uint32), *keys]), return_counts=True))

    @property
    def samples(self) -> int:
        return int(self.counts.sum())

    def histogram(self) -> npt.NDArray[np.int64]:
        """Samples by bin [65536]."""
        return np.bincount(self.keys >> _BIN_BITS, self.counts, minlength=1 << _BIN_BITS).astype(np.int64)

    def exchanged(self, owner: npt.NDArray[np.int64], group: dist.ProcessGroup | None) -> Scores:
        """All ranks' scores of the bins that this rank owns. `owner` [65536] has the rank of each. Collective."""
        sent = torch.from_numpy(np.bincount(owner[self.keys >> _BIN_BITS], minlength=dist.get_world_size(group)))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        # Bits that torch calls int32, because few of its operations know unsigned types.
        rows = torch.from_numpy(np.stack((self.keys.view(np.int32), self.counts.astype(np.int32)), 1))
        arrived = rows.new_empty(int(received.sum()), 2)
        dist.all_to_all_single(arrived, rows, received.tolist(), sent.tolist(), group=group)
        every, counts = arrived.numpy().T
        keys, places = np.unique(every.view(np.uint32), return_inverse=True)
        return Scores(keys, np.bincount(places, counts, minlength=len(keys)).astype(np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSums:
    """What groups add up to. Integers, so that it does not matter who adds up which."""

    shares: int = 0
    """Of groups with both classes: AUC times samples, as `_exact_sum` returns it."""

    groups: int = 0
    samples: int = 0
    one_class: int = 0
    nobodys: int = 0

    def __add__(self, other: GroupSums) -> GroupSums:
        return GroupSums(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    def auc(self) -> GroupedAuc:
        return GroupedAuc(
            auc=self.shares / (self.samples << _SUM_BITS) if self.samples else None,
            groups=self.groups,
            samples=self.samples,
            one_class=self.one_class,
            nobodys=self.nobodys,
        )


class GroupedScores:
    """Predictions with the group that each is of, until they are judged."""

    def __init__(self) -> None:
        self._groups: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
        self._scores: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
        """Twice the key of a score, plus 1 for a positive sample."""

    def add(
        self, groups: npt.NDArray[np.int64], keys: npt.NDArray[np.uint32], is_positive: npt.NDArray[np.bool_]
    ) -> None:
        self._groups.append(groups)
        self._scores.append(keys.astype(np.int64) * 2 + is_positive)

    def sums(self) -> GroupSums:
        """Those of this rank's predictions alone."""
        return _group_sums(np.concatenate(self._groups), np.concatenate(self._scores))

    def auc_of_ranks(self, group: dist.ProcessGroup | None = None) -> GroupedAuc:
        """That of all ranks' predictions together, the same on every rank and in every world. Collective.

        A rank gets all predictions of the groups whose hash chooses it.
        """
        groups, scores = np.concatenate(self._groups), np.concatenate(self._scores)
        world_size = dist.get_world_size(group)
        owner = (splitmix64(0, groups.view(np.uint64)) % np.uint64(world_size)).astype(np.int64)
        order = np.argsort(owner, kind="stable")
        sent = torch.from_numpy(np.bincount(owner, minlength=world_size))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        rows = torch.from_numpy(np.stack((groups, scores), 1)[order])
        arrived = rows.new_empty(int(received.sum()), 2)
        dist.all_to_all_single(arrived, rows, received.tolist(), sent.tolist(), group=group)
        parts: list[Any] = [None] * world_size
        dist.all_gather_object(parts, _group_sums(*np.ascontiguousarray(arrived.numpy().T)), group)
        return sum(parts, GroupSums()).auc()


def _group_sums(groups: npt.NDArray[np.int64], scores: npt.NDArray[np.int64]) -> GroupSums:
    """Of predictions [N], which have all of their groups."""
    is_somebodys = groups != NOBODY
    nobodys = len(groups) - int(is_somebodys.sum())
    groups, scores = groups[is_somebodys], scores[is_somebodys]
    if not len(groups):
        return GroupSums(nobodys=nobodys)
    order = np.lexsort((scores, groups))
    groups, keys, is_positive = groups[order], scores[order] >> 1, scores[order] & 1
    # Runs of one score in one group, and where among these each group begins.
    begins = np.flatnonzero(_is_first(groups) | _is_first(keys))
    of_group = np.flatnonzero(_is_first(groups[begins]))
    positive = np.add.reduceat(is_positive, begins)
    negative = np.diff(begins, append=len(groups)) - positive
    below = np.cumsum(negative) - negative
    below -= np.repeat(below[of_group], np.diff(of_group, append=len(begins)))
    wins_twice = np.add.reduceat(positive * (2 * below + negative), of_group)
    positives, negatives = np.add.reduceat(positive, of_group), np.add.reduceat(negative, of_group)
    has_both = (positives > 0) & (negatives > 0)
    wins_twice, positives, negatives = (part[has_both] for part in (wins_twice, positives, negatives))
    samples = positives + negatives
    # Of one group a float64, which no other group changes; over groups nothing is rounded.
    shares = _exact_sum(samples * (wins_twice / (2 * positives * negatives)))
    assert isinstance(shares, int)
    return GroupSums(
        shares=shares,
        groups=len(samples),
        samples=int(samples.sum()),
        one_class=len(has_both) - len(samples),
        nobodys=nobodys,
    )


def _is_first(values: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """[N]: whether a value differs from the one before it."""
    differs: npt.NDArray[np.bool_] = np.diff(values, prepend=values[0] - 1) != 0
    return differs


def _keys(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.uint32]:
    """The bits of float32 scores as integers in the order of the numbers."""
    # + 0 makes -0 the same score as 0.
    bits = (logits.astype(np.float32) + np.float32(0)).view(np.uint32)
    # IEEE 754 numbers of equal sign sort like their bits; negative ones in the opposite order.
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))


def _wins_twice(positive: Scores, negative: Scores) -> int:
    """Twice the number of pairs in which a positive sample scores above a negative one, plus the number of ties."""
    before = np.concatenate([[0], np.cumsum(negative.counts)])
    total = 0
    for begin in range(0, len(positive.keys), _PAIRED_AT_ONCE):
        part = slice(begin, begin + _PAIRED_AT_ONCE)
        below, up_to = (before[np.searchsorted(negative.keys, positive.keys[part], side)] for side in _SIDES)
        total += int(np.sum(positive.counts[part] * (below + up_to)))
    return total


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
        # Integers of Python where the sum of int64 might overflow: their sum rounds nothing.
        total = (total << bits) + (int(whole.sum(dtype=np.int64)) if whole.max(initial=0) < 2**26 else _int_sum(whole))
        rest = rest - whole
    return total


def _int_sum(values: npt.NDArray[np.float64]) -> int:
    return sum(map(int, values.tolist()))


def _entropy(rate: float) -> float:
    """The entropy of a coin with this probability, in nats."""
    if not 0 < rate < 1:
        return 0.0
    return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))
