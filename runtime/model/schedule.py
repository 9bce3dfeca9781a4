# SPDX-License-Identifier: Apache-2.0
"""The factor of the learning rates at each step: warm-up, a plateau, decay, a floor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sennit.transport.errors import ConfigError

DECAYS = ("linear", "polynomial", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class RateSchedule:
    """The factor of a step, as a function of the number of steps done before it.

    `torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)` accepts it. Warm-up is linear and ends at 1. Decay follows
    the reference code of DLRM (Naumov et al. 2019), which uses power 2; "linear" is power 1.
    """

    decay: str = "none"
    """One of `DECAYS`."""

    warmup_steps: int = 0
    """Factors 1/n, 2/n, …, 1 for the first n steps."""

    decay_start: int | None = None
    """Steps before decay begins; None: as many as the warm-up has."""

    decay_end: int = 1
    """The first step with the final factor."""

    power: float = 2.0
    """The power of the remaining fraction of the decay, for "polynomial"."""

    floor: float = 0.0
    """The least factor after the warm-up."""

    def __post_init__(self) -> None:
        def refuse(field: str, allowed: str) -> None:
            raise ConfigError(f"{field.replace('_', ' ')} {getattr(self, field)}; allowed: {allowed}")

        if self.decay not in DECAYS:
            raise ConfigError(f"decay {self.decay!r}; allowed: {', '.join(DECAYS)}")
        if self.warmup_steps < 0:
            refuse("warmup_steps", "0 or more")
        if self.decay_start is not None and self.decay_start < self.warmup_steps:
            refuse("decay_start", f"{self.warmup_steps} (the warm-up) or more")
        if self.decay != "none" and self.decay_end <= self._start:
            refuse("decay_end", f"above {self._start}, where decay begins")
        if not 0 < self.power < math.inf:
            refuse("power", "above 0")
        if not 0 <= self.floor <= 1:
            refuse("floor", "0 to 1")

    @property
    def _start(self) -> int:
        return self.warmup_steps if self.decay_start is None else self.decay_start

    def __call__(self, step: int) -> float:
        """The factor after `step` steps, 0 or more."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "none" or step < self._start:
            return 1.0
        left = max(0.0, 1.0 - (step - self._start) / (self.decay_end - self._start))
        return max(self.floor, left if self.decay == "linear" else left**self.power)
