# SPDX-License-Identifier: Apache-2.0
"""What a timeline comes to: the critical path by what was on it, and what each overlap hid."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from sennit.runtime.timeline.critical_path import Link, Paths
from sennit.runtime.timeline.exposure import Share, shares
from sennit.runtime.timeline.spans import RankClock, TimelineError, Trace
from sennit.runtime.timeline.threads import threads_of

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_MIN: Final = 0.005
"""Shares of the whole below this one are summed in a row "less than 0.5 % each"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Times are of all steps together, in nanoseconds."""

    clocks: tuple[RankClock, ...]
    steps: tuple[int, ...]
    step_ns: float
    """The median step: from the end of the one before, on the rank that ends last, to its own end there."""

    paths: dict[int, list[Link]]
    """The critical path of each step."""

    shares: dict[tuple[str, str], Share]
    """Exposed and whole time by (thread, what), summed over the ranks."""

    @property
    def path_ns(self) -> int:
        return sum(link.length_ns for path in self.paths.values() for link in path)

    @property
    def usual_step(self) -> int:
        """A step of median length."""
        lengths = {step: path[-1].end_ns - path[0].start_ns for step, path in self.paths.items()}
        return sorted(lengths, key=lambda step: lengths[step])[len(lengths) // 2]

    def on_path(self) -> dict[tuple[str, str], Counter[int]]:
        """By (kind, what), the nanoseconds on the critical path by rank, the longest first."""
        found: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
        for path in self.paths.values():
            for link in path:
                found[link.kind, link.what][link.rank] += link.length_ns
        return dict(sorted(found.items(), key=lambda item: -item[1].total()))

    def as_json(self) -> dict[str, Any]:
        count, ranks = len(self.steps), len(self.clocks)
        return {
            "ranks": ranks,
            "steps": count,
            "step_ms": self.step_ns / 1e6,
            "critical_path": [
                {"kind": kind, "what": what, "ms_a_step": by_rank.total() / 1e6 / count,
                 "share": by_rank.total() / self.path_ns,
                 "share_by_rank": {str(rank): ns / by_rank.total() for rank, ns in sorted(by_rank.items())}}
                for (kind, what), by_rank in self.on_path().items()
            ],
            "overlaps": [
                {"thread": thread, "what": what, "ms_a_step": share.busy_ns / 1e6 / count / ranks,
                 "hidden_ms_a_step": share.hidden_ns / 1e6 / count / ranks,
                 "exposed_ms_a_step": share.exposed_ns / 1e6 / count / ranks,
                 "sent_bytes_a_step": share.sent_bytes / count / ranks}
                for (thread, what), share in _by_time(self.shares)
            ],
            "clocks": [{"rank": clock.rank, "offset_us": clock.offset_ns / 1e3,
                        "uncertainty_us": clock.uncertainty_ns / 1e3, "lost": clock.lost,
                        "has_died": clock.has_died} for clock in self.clocks],
        }  # fmt: skip


def summarise(trace: Trace) -> Summary:
    """Raises `TimelineError` for a timeline without a step that all ranks have."""
    ranks = threads_of(trace.spans)
    common = set.intersection(*(set(rank.steps) for rank in ranks)) if len(ranks) == len(trace.ranks) else set()
    if not common:
        raise TimelineError("no step that all ranks have taken is in the timeline")
    steps = tuple(sorted(common))
    paths = Paths(ranks)
    walked = {step: paths.of_step(step) for step in steps}
    lengths = [sum(link.length_ns for link in path) for path in walked.values()]
    return Summary(clocks=trace.ranks, steps=steps, step_ns=median(lengths), paths=walked, shares=shares(ranks))


def _by_time(found: dict[tuple[str, str], Share]) -> list[tuple[tuple[str, str], Share]]:
    return sorted(found.items(), key=lambda item: -item[1].busy_ns)


def render(summary: Summary, console: Console) -> None:
    """Prints the summary for people."""
    from rich.filesize import decimal
    from rich.table import Table

    count, ranks = len(summary.steps), len(summary.clocks)
    console.print(
        f"{ranks} ranks, steps {summary.steps[0]} to {summary.steps[-1]}: "
        f"{summary.step_ns / 1e6:.3g} ms a step (median)"
    )
    for clock in summary.clocks:
        if clock.uncertainty_ns:
            console.print(f"clock of rank {clock.rank}: known to {clock.uncertainty_ns / 1e3:.1f} µs")
        if clock.lost:
            console.print(f"rank {clock.rank} had no room for {clock.lost:,} earlier spans")
        if clock.has_died:
            console.print(f"rank {clock.rank} died")
    table = Table(title="Critical path: what the steps had to wait for", title_justify="left")
    for name in ("what", "kind"):
        table.add_column(name)
    for name in ("ms a step", "share", *(f"rank {clock.rank}" for clock in summary.clocks[:16])):
        table.add_column(name, justify="right")
    rest = 0
    for (kind, what), by_rank in summary.on_path().items():
        share = by_rank.total() / summary.path_ns
        if share < SHOWN_MIN:
            rest += by_rank.total()
            continue
        parts = [f"{by_rank[clock.rank] / by_rank.total():.0%}" for clock in summary.clocks[:16]]
        table.add_row(what, kind, f"{by_rank.total() / 1e6 / count:.3f}", f"{share:.1%}", *parts)
    if rest:
        table.add_row("less than 0.5 % each", "", f"{rest / 1e6 / count:.3f}", f"{rest / summary.path_ns:.1%}")
    console.print(table)
    table = Table(title="Overlap: what runs beside the steps, mean of the ranks", title_justify="left")
    for name in ("what", "thread"):
        table.add_column(name)
    for name in ("ms a step", "hidden", "exposed", "hidden share", "bytes sent"):
        table.add_column(name, justify="right")
    for (thread, what), part in _by_time(summary.shares):
        scale = 1e6 * count * ranks
        table.add_row(
            what,
            thread,
            f"{part.busy_ns / scale:.3f}",
            f"{part.hidden_ns / scale:.3f}",
            f"{part.exposed_ns / scale:.3f}",
            f"{part.hidden_ns / part.busy_ns:.0%}",
            decimal(round(part.sent_bytes / count / ranks)) if part.sent_bytes else "",
        )
    console.print(table)


def render_step(path: list[Link], console: Console) -> None:
    """The critical path of one step, link by link."""
    from rich.table import Table

    begin = path[0].start_ns
    table = Table(title="Critical path, from its begin to its end", title_justify="left")
    for name in ("from ms", "ms"):
        table.add_column(name, justify="right")
    for name in ("rank", "thread", "kind", "what"):
        table.add_column(name)
    for link in path:
        at, took = (link.start_ns - begin) / 1e6, link.length_ns / 1e6
        table.add_row(f"{at:.3f}", f"{took:.3f}", str(link.rank), link.thread, link.kind, link.what)
    console.print(table)
