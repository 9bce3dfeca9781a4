# SPDX-License-Identifier: Apache-2.0
"""`sennit bench tiers`: the trainer, and the bare operator, with tables ten times larger than their memory."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sennit.runtime.calibrate.machine import describe
from sennit.testbed.bench.tables import embedding_tiers, training_tiers
from sennit.testbed.bench.tables.embedding_tiers import HOMES, Load


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of one call."""

    load: Load
    steps: int
    seed: int
    trainer: training_tiers.Result
    homes: list[embedding_tiers.Result]
    """The operator's result."""

    def as_json(self) -> dict[str, Any]:
        """All times, for other statistics."""
        return {
            "machine": describe(),
            "steps": self.steps,
            "seed": self.seed,
            "load": asdict(self.load),
            "lookups": self.load.lookup_count,
            "memory_bytes": self.load.memory_bytes,
            "trainer": {
                **vars(self.trainer),
                **_summary(self.trainer.memory_s, self.trainer.stored_s),
                "ratio": self.trainer.ratio,
                "memory_samples_per_s": self.load.bags / statistics.median(self.trainer.memory_s),
                "stored_samples_per_s": self.load.bags / statistics.median(self.trainer.stored_s),
            },
            "homes": [
                {**vars(result), **_summary(result.memory_s, result.tiers_s), "ratio": result.ratio}
                for result in self.homes
            ],
        }


def _summary(memory_s: list[float], tiers_s: list[float]) -> dict[str, Any]:
    """Median milliseconds in memory and with tiers, and the spread of memory / tiers."""
    ratios = [memory / tiers for memory, tiers in zip(memory_s, tiers_s, strict=True)]
    return {
        "median_ms": [1e3 * statistics.median(seconds) for seconds in (memory_s, tiers_s)],
        "spread": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)},
    }


def run(folder: Path, load: Load, *, steps: int, seed: int) -> Report:
    """Creates files in a new folder in `folder` and removes them. Raises AssertionError if results differ."""
    with tempfile.TemporaryDirectory(prefix="sennit-tiers-", dir=folder) as made:
        own = Path(made)
        return Report(
            load=load,
            steps=steps,
            seed=seed,
            trainer=training_tiers.run(own, load, steps=steps, seed=seed),
            homes=[embedding_tiers.run(own, load, home=home, steps=steps, seed=seed) for home in HOMES],
        )


def render(report: Report, console: Console) -> None:
    """Median times, with the lowest and highest ratio; counts per step."""
    table = Table("what", "rows in", "memory ms", "tiers ms", "tiers / memory", "misses", "reads", "MB")
    trainer = report.trainer
    rows = [("trainer", "file", trainer.memory_s, trainer.stored_s, trainer.ratio, trainer.counts)]
    for home in report.homes:
        counts = {name: getattr(home, name) for name in ("misses", "reads", "bytes_read", "bytes_written")}
        rows.append(("operator", home.home, home.memory_s, home.tiers_s, home.ratio, counts))
    for what, where, memory_s, tiers_s, ratio, counts in rows:
        ratios = [memory / tiers for memory, tiers in zip(memory_s, tiers_s, strict=True)]
        table.add_row(
            what,
            where,
            *(f"{statistics.median(seconds) * 1e3:.1f}" for seconds in (memory_s, tiers_s)),
            f"{ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            f"{counts['misses']:,.0f}",
            f"{counts['reads']:,.0f}",
            f"{(counts['bytes_read'] + counts['bytes_written']) / 1e6:.1f}",
        )
    console.print(table)
