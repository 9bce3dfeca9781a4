# SPDX-License-Identifier: Apache-2.0
"""The figures of one run: samples by peer, their median and spread, and the ratio to sennit."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from sennit.testbed.bench.cases import Case


def quantile(samples: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the nearest ranks. `fraction` is in 0..1."""
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Row:
    """All rounds of one case. A sample is the seconds per operation on the slowest rank of that round."""

    case: Case
    samples_s: dict[str, list[float]]

    def median_s(self, peer: str) -> float:
        return statistics.median(self.samples_s[peer])

    def spread_s(self, peer: str) -> tuple[float, float]:
        """The 10th and 90th percentiles."""
        return quantile(self.samples_s[peer], 0.1), quantile(self.samples_s[peer], 0.9)

    def ratio(self, peer: str, ours: str) -> float:
        """The speed-up: the median over rounds of peer / ours.

        Taken round by round, because both ran within a second of each other.
        """
        return statistics.median(
            theirs / ours for theirs, ours in zip(self.samples_s[peer], self.samples_s[ours], strict=True)
        )


@dataclass
class Report:
    """One run of the benchmark, with its settings and machine."""

    ours: str
    """The peer that all others are compared with."""

    settings: dict[str, object]
    machine: dict[str, object]
    rows: list[Row] = field(default_factory=list)
    memory_growth_bytes: int | None = None
    """Peak resident memory of sennit beyond the user's tensors, the largest over ranks."""

    def peers(self) -> list[str]:
        return [peer for peer in self.rows[0].samples_s if peer != self.ours] if self.rows else []

    def as_json(self) -> dict[str, object]:
        return {
            "schema": 1,
            "unit": "seconds per operation, slowest rank of the round",
            "ours": self.ours,
            "settings": self.settings,
            "machine": self.machine,
            "memory_growth_bytes": self.memory_growth_bytes,
            "rows": [
                {
                    "collective": row.case.collective.value,
                    "size_bytes": row.case.size_bytes,
                    "ratio": {peer: row.ratio(peer, self.ours) for peer in self.peers()},
                    "between": {
                        peer: {other: row.ratio(peer, other) for other in row.samples_s if other != peer}
                        for peer in row.samples_s
                    },
                    "median_s": {peer: row.median_s(peer) for peer in row.samples_s},
                    "p10_p90_s": {peer: row.spread_s(peer) for peer in row.samples_s},
                    "samples_s": row.samples_s,
                }
                for row in self.rows
            ],
        }
