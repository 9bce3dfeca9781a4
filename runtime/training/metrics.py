# SPDX-License-Identifier: Apache-2.0
"""The quality of predictions, and evaluations as reports, checkpoints and displays have them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final, Self


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedAuc:
    """AUC within the samples of each group, such as a user (GAUC: Zhu et al., KDD 2017, section 4.2)."""

    auc: float | None
    """The mean over groups with samples of both classes, weighted by their samples. None: no group has both."""

    groups: int
    """Groups with samples of both classes."""

    samples: int
    """Their samples."""

    one_class: int
    """Groups whose samples are all of one class. They have no AUC, and are left out."""

    nobodys: int
    """Samples whose group is null. They are left out."""

    def text(self) -> str:
        if self.auc is None:
            return f"GAUC not defined: all {self.one_class:,} groups have one class"
        return f"GAUC {self.auc:.4f} of {self.groups:,} groups ({self.one_class:,} with one class left out)"


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

    gauc: GroupedAuc | None = None
    """AUC by group; None: nobody asked (`TrainingConfig.gauc`)."""

    not_finite: int = 0
    """Predictions that are not finite. They are left out, if the run may leave samples out (`skip_samples`)."""

    def text(self) -> str:
        """AUC, normalised entropy, calibration and GAUC in words."""
        return (
            f"AUC {self.auc:.4f}, normalised entropy {self.normalised_entropy:.4f}, calibration {self.calibration:.4f}"
            + (f" (not defined: {self.undefined})" if self.undefined else "")
            + (f"; {self.gauc.text()}" if self.gauc is not None else "")
            + (f"; {self.not_finite:,} predictions that are not finite left out" if self.not_finite else "")
        )

    @property
    def undefined(self) -> str:
        """Why AUC and normalised entropy are NaN; empty where they are not."""
        if not math.isnan(self.auc):
            return ""
        if not self.sample_count:
            return "no prediction is finite" if self.not_finite else "no sample is held back"
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
    grouped = told.get("gauc")
    values: dict[str, Any] = {name: math.nan if value is None else value for name, value in told.items()}
    return Quality(**values | {"gauc": None if grouped is None else GroupedAuc(**grouped)})
