# SPDX-License-Identifier: Apache-2.0
"""The table and the picture of docs/lab/congestion.md, from what the program simulated_networks printed.

python -m sennit.testbed.simulation.congestion_page DOCS LINES
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sennit.testbed.simulation.report import write_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEGIN: Final = "<!-- results: written by make congestion -->"
CONTROLS: Final = ("fixed", "dctcp", "swift")
COLOURS: Final = {"fixed": "tab:orange", "dctcp": "tab:blue", "swift": "tab:green"}
PAYLOAD_BYTES: Final = 4096
# When the second one begins and ends, in congestion.cpp. Shares are taken over the last half of that time.
TOGETHER_US: Final = (120_000, 220_000)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One network with one control. Lists have an entry for each sample."""

    name: str
    congestion: str
    marks: bool
    sample_us: int
    rate: int
    drops: int
    again: int
    sent: int
    finished_us: list[int]
    queued: list[int]
    bytes: list[list[int]]

    @property
    def queue_us(self) -> list[float]:
        return [queued * 1e6 / self.rate for queued in self.queued]

    @property
    def again_percent(self) -> float:
        return 100 * self.again / self.sent

    @property
    def links(self) -> int:
        return 4 if self.name.startswith("planes") else 1

    def time_over_ideal(self) -> float:
        """Time until the last flow has ended / time of its payload on the links."""
        ideal_us = (self.sent - self.again) * PAYLOAD_BYTES * 1e6 / self.rate / self.links
        return max(self.finished_us) / ideal_us

    def share(self, flow: int) -> float:
        """The share of the link that the payload of one flow has."""
        first, last = (at_us // self.sample_us for at_us in TOGETHER_US)
        return (self.bytes[last][flow] - self.bytes[first][flow]) * 1e6 / (TOGETHER_US[1] - TOGETHER_US[0]) / self.rate

    def goodput(self, flow: int, samples: int = 4) -> tuple[list[float], list[float]]:
        """Times in milliseconds, and rates in Gbit/s over the `samples` samples before each."""
        ends = range(samples, len(self.bytes), samples)
        moved = [self.bytes[end][flow] - self.bytes[end - samples][flow] for end in ends]
        span_us = samples * self.sample_us
        return [end * self.sample_us / 1e3 for end in ends], [count * 8 / span_us / 1e3 for count in moved]


def read(path: Path) -> list[Run]:
    return [Run(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def table(runs: Sequence[Run]) -> str:
    """A row for each network, and for each control: how it ended, what was sent again, the mean queue."""
    names = list(dict.fromkeys((run.name, run.marks) for run in runs))
    lines = ["| network | " + " | ".join(CONTROLS) + " |", "| --- " * (len(CONTROLS) + 1) + "|"]
    by_key = {(run.name, run.marks, run.congestion): run for run in runs}
    for name, marks in names:
        cells = [_cell(by_key[name, marks, control]) for control in CONTROLS]
        lines.append(f"| {name}{', ECN' if marks else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(run: Run) -> str:
    if run.name in ("two jobs", "beside TCP"):
        how = f"{100 * run.share(0):.0f} : {100 * run.share(1):.0f}"
    else:
        how = f"{run.time_over_ideal():.2f}"
    return f"{how}; {run.again_percent:.1f} %; {statistics.fmean(run.queue_us):.0f} µs"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Queues of an incast and of pairs, and who gets how much beside another job and beside TCP."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {(run.name, run.congestion): run for run in runs if not run.marks}
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 7), layout="constrained")
    _plot_queues(axes[0][0], found, "incast 32", "incast: 32 senders, one receiver")
    _plot_queues(axes[0][1], found, "pairs 32", "32 pairs over one link")
    _plot_goodput(axes[1][0], found["two jobs", "dctcp"], ("first job", "second job"), "two jobs on one link (dctcp)")
    _plot_goodput(axes[1][1], found["beside TCP", "dctcp"], ("sennit", "TCP"), "a TCP flow beside us (dctcp)")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8)
        axis.set_xlabel("ms")
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def _plot_queues(axis: Axes, found: dict[tuple[str, str], Run], name: str, title: str) -> None:
    for control in CONTROLS:
        run = found[name, control]
        times_ms = [sample * run.sample_us / 1e3 for sample in range(len(run.queued))]
        label = f"{control}: {run.again_percent:.1f} % sent again"
        axis.plot(times_ms, run.queue_us, lw=0.8, color=COLOURS[control], label=label)
    axis.set_title(title, fontsize=10)
    axis.set_ylabel("queue, µs")


def _plot_goodput(axis: Axes, run: Run, names: tuple[str, str], title: str) -> None:
    for flow, name in enumerate(names):
        axis.plot(*run.goodput(flow), lw=1, label=name)
    axis.set_title(title, fontsize=10)
    axis.set_ylabel("goodput, Gbit/s")


def main() -> None:
    docs, lines = map(Path, sys.argv[1:])
    runs = read(lines)
    page = docs / "lab" / "congestion.md"
    write_page(page, f"![queues and goodput](congestion.png)\n\n{table(runs)}", BEGIN)
    plot(runs, page.with_suffix(".png"))


if __name__ == "__main__":
    main()
