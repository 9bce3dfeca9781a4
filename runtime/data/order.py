# SPDX-License-Identifier: Apache-2.0
"""What the order of samples depends on beside the data and the kind of order (`StreamSettings`).

Ranks and feeders share these settings, so they are apart from the order itself, which needs the blocks of the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sennit.runtime.data.errors import DataError

SLICES_MAX: Final = 1 << 15


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderSettings:
    """The settings of a run that the order of samples depends on. Raises DataError for values that give none."""

    seed: int
    split: str
    """How evaluation rows, and then validation rows among the others, are chosen: "random" or "last"."""

    eval_fraction: float
    """The share of evaluation rows."""

    batch_size: int
    """Samples per global batch."""

    epochs: int
    max_steps: int | None
    slices: int = 8
    """The slices of the model that a global batch is cut by, a power of two. A world has at most as many ranks."""

    eval_every: int | None = None
    """Steps from one evaluation to the next inside an epoch, counted from the first step of the run; None: no such."""

    validation_fraction: float = 0.0
    """The share of validation rows in what evaluation leaves. 0: there are none."""

    def __post_init__(self) -> None:
        if self.split not in ("random", "last"):
            raise DataError(f"split {self.split!r}; allowed: random, last")
        if not 1 <= self.slices <= SLICES_MAX or self.slices & (self.slices - 1):
            raise DataError(f"{self.slices} slices; allowed: a power of two, 1 to {SLICES_MAX:,}")
        if self.eval_every is not None and self.eval_every < 1:
            raise DataError(f"evaluation every {self.eval_every} steps; allowed: 1 or more")
