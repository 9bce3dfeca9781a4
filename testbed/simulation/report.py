# SPDX-License-Identifier: Apache-2.0
"""The table and the figure of docs/lab/simulation.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sennit.testbed.marked_page import with_part
from sennit.testbed.simulation.outcome import Outcome
from sennit.testbed.simulation.suite import Case

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEGIN, END = "<!-- results: written by sennit testbed simulate -->", "<!-- end of results -->"
COLOURS = {
    "reps": "tab:blue",
    "reps, control first": "tab:green",
    "round robin": "tab:cyan",
    "static ECMP": "tab:orange",
}
TIMES = "| workload | algorithm | paths | time | ideal | time / ideal | dropped | black-holed | sent again |"
QUEUES = "| workload | paths | busy leaf uplinks, least–mean–most | largest queue | message P50 / P99 |"


def table(cases: Sequence[Case], outcomes: dict[str, Outcome]) -> str:
    """Returns two tables in Markdown, of times and of queues, with a row for every case that has an outcome."""
    times, queues = [_head(TIMES)], [_head(QUEUES)]
    for case in cases:
        if case.name not in outcomes:
            continue
        outcome = outcomes[case.name]
        count = outcome.counters
        uplinks = outcome.tiers["leaf_up"]
        peak_bytes = max(tier.peak_queue_bytes for tier in outcome.tiers.values())
        times.append(
            _row(
                case.group,
                outcome.algorithm,
                case.way,
                milliseconds(outcome.completion_us),
                milliseconds(outcome.ideal_us),
                f"{outcome.ratio:.2f}" if outcome.is_complete else "did not end",
                f"{count['queue_dropped_packets']:,}",
                f"{count['black_holed_packets']:,}",
                f"{count['retransmitted_packets']:,}",
            )
        )
        queues.append(
            _row(
                case.group,
                case.way,
                f"{100 * uplinks.least:.0f}–{100 * uplinks.mean:.0f}–{100 * uplinks.most:.0f} %",
                f"{peak_bytes / 1024:.0f} KiB",
                f"{outcome.quantile_us(0.5):.0f} / {outcome.quantile_us(0.99):.0f} µs" if outcome.message_us else "",
            )
        )
    return "\n".join([*times, "", *queues])


def _head(names: str) -> str:
    return f"{names}\n" + "| --- " * (names.count("|") - 1) + "|"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def milliseconds(time_us: float) -> str:
    return f"{time_us / 1000:.3g} ms"


def provenance(cases: Sequence[Case], outcomes: dict[str, Outcome]) -> str:
    """Returns the parameters that repeat the run."""
    known = [case for case in cases if case.name in outcomes]
    first = known[0].scenario
    events = sum(outcomes[case.name].counters["events"] for case in known)
    wall_s = sum(outcomes[case.name].wall_s for case in known)
    return (
        f"{first.hosts:,} hosts, {first.hosts // first.hosts_per_leaf} leaves, {first.spines} spines, "
        f"{first.rate_gbps} Gb/s, {first.delay_ns} ns per hop; seed {first.seed};\n"
        f"flow and fabric of fingerprint {outcomes[known[0].name].fingerprint}; {len(known)} of {len(cases)} runs, "
        f"{events / 1e6:,.0f} million events in {wall_s / 60:.0f} minutes of one core."
    )


def write_page(page: Path, text: str, begin: str = BEGIN) -> None:
    """Replaces the text between the page's two markers. Raises ValueError for a page without them."""
    page.write_text(
        with_part(page.read_text(encoding="utf-8"), begin, END, f"\n{text}\n", what=f"results ({page})"),
        encoding="utf-8",
    )


def plot(cases: Sequence[Case], outcomes: dict[str, Outcome], path: Path) -> None:
    """Plots time over ideal, goodput while links die, and how evenly the uplinks are used."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = [case for case in cases if case.name in outcomes]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained", width_ratios=(1.25, 1, 1))
    _plot_ratios(axes[0], known, outcomes)
    dying = [case for case in known if case.scenario.fail_at_us != 0]
    failed = [case for case in known if case.scenario.failed_fraction != 0 and case not in dying]
    one_group = [case for case in known if case.group == known[-1].group]
    _plot_goodput(axes[1], dying or failed or one_group, outcomes)
    _plot_shares(axes[2], failed or one_group, outcomes)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else {"Date": None})
    pyplot.close(figure)


def _plot_ratios(axis: Axes, cases: Sequence[Case], outcomes: dict[str, Outcome]) -> None:
    labelled: set[str] = set()
    position = 0.0
    ticks: list[float] = []
    names: list[str] = []
    for group in dict.fromkeys(case.group for case in cases):
        members = [case for case in cases if case.group == group]
        ticks.append(position + (len(members) - 1) / 2)
        names.append(group.replace(", ", ",\n"))
        for case in members:
            ratio = outcomes[case.name].ratio
            label = case.way if case.way not in labelled else None
            labelled.add(case.way)
            axis.barh(position, ratio, color=COLOURS[case.way], label=label)
            axis.text(ratio * 1.04, position, f"{ratio:.2f}", va="center", fontsize=8)
            position += 1
        position += 0.7
    axis.axvline(1, color="black", lw=1)
    axis.set_yticks(ticks, names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("{x:g}")
    axis.set_xlim(0.9, 1.6 * max(outcomes[case.name].ratio for case in cases))
    axis.set_xlabel("completion time / ideal")
    # One legend for all three panels, because the colours are the same.
    axis.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)


def _plot_goodput(axis: Axes, cases: Sequence[Case], outcomes: dict[str, Outcome]) -> None:
    for case in cases:
        scenario = case.scenario
        capacity_bytes = scenario.hosts * scenario.rate_gbps * 125 * scenario.sample_us
        arrived = outcomes[case.name].arrived_bytes
        times_ms = [index * scenario.sample_us / 1000 for index in range(len(arrived))]
        shares = [100 * arrived_bytes / capacity_bytes for arrived_bytes in arrived]
        axis.plot(times_ms, shares, color=COLOURS[case.way], label=case.way, lw=1.2, drawstyle="steps-post")
    group, scenario = cases[0].group, cases[0].scenario
    if scenario.fail_at_us != 0:
        fail_ms = scenario.fail_at_us / 1000
        axis.axvline(fail_ms, color="grey", ls="--", lw=1)
        axis.axvline(fail_ms + scenario.convergence_us / 1000, color="grey", ls=":", lw=1)
        group += " (dashed) until routes know (dotted)"
    axis.set_ylim(0, 105)
    axis.set_title(group, fontsize=8)
    axis.set_xlabel("time, ms")
    axis.set_ylabel("goodput of all hosts, % of their links")


def _plot_shares(axis: Axes, cases: Sequence[Case], outcomes: dict[str, Outcome]) -> None:
    for case in cases:
        shares = outcomes[case.name].tiers["leaf_up"].shares
        axis.plot([100 * share for share in shares], color=COLOURS[case.way], label=case.way)
    axis.set_ylim(0, 105)
    axis.set_title(cases[0].group, fontsize=9)
    axis.set_xlabel("living links from leaves to spines, least used first")
    axis.set_ylabel("share of the run in which it sent, %")
