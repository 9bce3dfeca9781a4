# SPDX-License-Identifier: Apache-2.0
"""The result of a simulated run, as far as the report needs it."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(kw_only=True)
class TierUse:
    """The links of one tier and direction, without the failed ones."""

    links: int
    least: float
    mean: float
    most: float
    """Share of the run's time in which a link was sending."""

    shares: list[float]
    """Share of the run's time in which each link was sending, in ascending order."""

    peak_queue_bytes: int
    dropped_packets: int


@dataclass(kw_only=True)
class Outcome:
    """The result of a run."""

    scenario: dict[str, Any]
    algorithm: str
    """What the ranks ran."""

    is_complete: bool
    failure: str
    completion_us: float
    ideal_us: float
    trace_hash: str
    counters: dict[str, int]
    message_us: list[float]
    """Quantiles of the time from transfer to acknowledgement, of messages that an advert precedes: evenly spaced."""

    arrived_bytes: list[int]
    """Payload that arrived, by sample."""

    tiers: dict[str, TierUse] = field(default_factory=dict)
    fingerprint: str = ""
    """The fingerprint (runner.fingerprint) of the core that ran it."""

    plans: str = ""
    """The digest (plans.Program.digest) of the plans that it ran."""

    wall_s: float = 0.0
    peak_memory_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Completion time divided by the ideal time."""
        return self.completion_us / self.ideal_us

    def quantile_us(self, fraction: float) -> float:
        return self.message_us[round(fraction * (len(self.message_us) - 1))] if self.message_us else 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Outcome":
        tiers = {name: TierUse(**use) for name, use in values["tiers"].items()}
        return cls(**{**values, "tiers": tiers})
