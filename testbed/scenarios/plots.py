# SPDX-License-Identifier: Apache-2.0
"""The plots of the report, as SVG that uses the page's text colour: readable in light and dark."""

from __future__ import annotations

import functools
import io
import re
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, ParamSpec

from sennit.testbed.scenarios.counters import total
from sennit.testbed.scenarios.results import Case

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's palette, which people without red or green vision can tell apart; chosen to stand out on white and
# black.
COLOURS: Final = {"sennit": "#0072B2", "gloo": "#D55E00"}
PLANES: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
# Written by matplotlib, replaced by the page's text colour.
INK: Final = "#010203"
MEGA: Final = 1e6
WIDTH_INCHES: Final = 9.0
TOGETHER_S: Final = 0.02
STYLE: Final[dict[Any, Any]] = {
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#808080",
    "grid.alpha": 0.3, "font.size": 10.0,
}  # fmt: skip

Parameters = ParamSpec("Parameters")


def _styled(draw: Callable[Parameters, Figure | None]) -> Callable[Parameters, Figure | None]:
    """Draws all text of a figure in the page's colour. matplotlib reads the style whenever it makes a text."""

    @functools.wraps(draw)
    def drawn(*arguments: Parameters.args, **options: Parameters.kwargs) -> Figure | None:
        import matplotlib

        with matplotlib.rc_context(STYLE):
            return draw(*arguments, **options)

    return drawn


@_styled
def loss_figure(cases: Sequence[Case]) -> Figure | None:
    """Goodput against the fraction of lost packets: one panel per collective, a dot per round, a line of medians."""
    from matplotlib.ticker import LogLocator

    points = _loss_points(cases)
    if not points:
        return None
    operations = sorted({operation for operation, _ in points})
    figure, axes = _subplots(1, len(operations), height=3.2, sharey=True)
    for axis, operation in zip(axes[0], operations, strict=True):
        libraries = [library for library in COLOURS if (operation, library) in points]
        losses = sorted({loss for library in libraries for loss in points[operation, library]})
        for library in libraries:
            by_loss = points[operation, library]
            places = [losses.index(loss) for loss in sorted(by_loss)]
            medians = [statistics.median(by_loss[loss]) for loss in sorted(by_loss)]
            for place, loss in zip(places, sorted(by_loss), strict=True):
                axis.plot([place] * len(by_loss[loss]), by_loss[loss], ".", ms=4, alpha=0.45, color=COLOURS[library])
            axis.plot(places, medians, marker="o", ms=5, color=COLOURS[library], label=library)
        axis.set_xticks(range(len(losses)), [f"{100 * loss:g}" for loss in losses])
        axis.set_yscale("log")
        axis.set_title(operation)
        axis.set_xlabel("packets lost, %")
        axis.legend(frameon=False)
    axes[0][0].set_ylabel("goodput, MB/s")
    axes[0][0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0][0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[0][0].minorticks_off()
    return figure


def _loss_points(cases: Sequence[Case]) -> dict[tuple[str, str], dict[float, list[float]]]:
    """(collective, library) -> loss -> MB/s of every round. The undisturbed rounds of all cases count as loss 0."""
    points: dict[tuple[str, str], dict[float, list[float]]] = {}
    for case in cases:
        if not case.name.startswith("loss-"):
            continue
        workload = case.scenario["workload"]
        for run in case.runs:
            if not run["repetition_times_s"]:
                continue
            loss = case.scenario["impairment"]["loss_fraction"] if run["disturbed"] else 0.0
            goodput = workload["size_bytes"] / statistics.median(run["repetition_times_s"]) / MEGA
            points.setdefault((workload["operation"], run["library"]), {}).setdefault(loss, []).append(goodput)
    return points


@_styled
def timeline_figure(case: Case) -> Figure | None:
    """Draws payload over time above, bytes by plane below, and a line for every fault. Grey: ranks check results."""
    series = case.series
    if not series or not series["times_s"] or "links" in series:
        return None
    figure, axes = _subplots(2, 1, height=4.6, sharex=True)
    upper, lower = axes[0][0], axes[1][0]
    times_s = series["times_s"]
    upper.plot(times_s, [value / MEGA for value in series["goodput_bytes_per_s"]], color=COLOURS["sennit"], lw=1.2)
    upper.set_ylabel("payload, MB/s")
    for plane, values in enumerate(series["plane_bytes_per_s"]):
        colour = PLANES[plane % len(PLANES)]
        lower.plot(times_s, [value / MEGA for value in values], color=colour, lw=1.2, label=f"plane {plane}")
    lower.set_ylabel("on the planes, MB/s")
    lower.set_xlabel("seconds")
    lower.legend(frameon=False, ncols=8, loc="lower left", bbox_to_anchor=(0, 1), fontsize="small")
    for axis in (upper, lower):
        axis.set_ylim(bottom=0)
        axis.set_xlim(0, times_s[-1])
        for low, high in series["between"]:
            axis.axvspan(low, high, color="#808080", alpha=0.18, lw=0)
        for at_s, _ in _together(series["events"]):
            axis.axvline(at_s, color=INK, lw=1.0, ls="--")
    for at_s, names in _together(series["events"]):
        upper.annotate(
            "\n".join(names), (at_s, 1.0), (3, -3), xycoords=("data", "axes fraction"),
            textcoords="offset points", va="top", fontsize="small",
        )  # fmt: skip
    return figure


@_styled
def links_figure(case: Case) -> Figure | None:
    """Draws what each host's link carries over time, a panel for each, and a line where somebody was killed."""
    series = case.series
    if "links" not in series:
        return None
    figure, axes = _subplots(len(series["links"]), 1, height=1.15 * len(series["links"]), sharex=True)
    times_s = series["times_s"]
    for (name, ways), (axis,) in zip(series["links"].items(), axes, strict=True):
        for way, colour in zip(("sent", "received"), PLANES, strict=False):
            axis.plot(times_s, [8 * value / MEGA for value in ways[way]], color=colour, lw=1.0, label=way)
        axis.set_ylim(bottom=0)
        axis.set_xlim(0, times_s[-1])
        axis.set_title(name, loc="left", fontsize="small")
        for what, host, at_s in series["events"]:
            is_here = host in ("", name)
            axis.axvline(at_s, color=COLOURS["gloo"] if is_here else INK, lw=1.4 if is_here else 0.6, ls="--")
            if is_here and (host or axis is axes[0][0]):
                axis.annotate(what, (at_s, 1.0), (3, -3), xycoords=("data", "axes fraction"),
                              textcoords="offset points", va="top", fontsize="small")  # fmt: skip
    axes[0][0].legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), fontsize="small")
    axes[len(axes) // 2][0].set_ylabel("Mbit/s")
    axes[-1][0].set_xlabel("seconds")
    return figure


def _together(events: Sequence[tuple[str, float]]) -> list[tuple[float, list[str]]]:
    """Events too close together to tell apart share a line."""
    groups: list[tuple[float, list[str]]] = []
    for name, at_s in sorted(events, key=lambda event: event[1]):
        if groups and at_s - groups[-1][0] < TOGETHER_S:
            groups[-1][1].append(name)
        else:
            groups.append((at_s, [name]))
    return groups


@_styled
def shares_figure(cases: Sequence[Case]) -> Figure | None:
    """The share of bytes over each plane, one bar per case, from sennit's disturbed runs."""
    rows = [(case.name, shares) for case in cases if len(shares := disturbed_shares(case)) > 1]
    if not rows:
        return None
    figure, axes = _subplots(1, 1, height=0.9 + 0.27 * len(rows))
    axis = axes[0][0]
    for row, (_, shares) in enumerate(rows):
        left = 0.0
        for plane, (_, share) in enumerate(sorted(shares.items())):
            colour = PLANES[plane % len(PLANES)]
            axis.barh(row, 100 * share, left=left, color=colour, height=0.72, label=f"plane {plane}")
            left += 100 * share
    axis.set_yticks(range(len(rows)), [name for name, _ in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, 100)
    axis.set_xlabel("share of received bytes, %")
    axis.grid(False)
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    axis.legend(handles.values(), handles.keys(), frameon=False, ncols=len(handles), loc="lower left",
                bbox_to_anchor=(0, 1), fontsize="small")  # fmt: skip
    return figure


def disturbed_shares(case: Case) -> dict[str, float]:
    """By interface, over all disturbed runs of sennit; empty if nothing went over interfaces."""
    runs = [run for run in case.runs if run["library"] == "sennit" and run["disturbed"] and run["path_shares"]]
    sums = total(run["path_shares"] for run in runs)
    return {name: value / len(runs) for name, value in sums.items()}


def as_svg(figure: Figure, name: str) -> str:
    """The SVG element, for a page with its own style. `name` keeps identifiers of several figures apart."""
    import matplotlib
    from matplotlib import pyplot

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    # The page scales the figure; the view box keeps its proportions.
    return re.sub(
        r'(<svg[^>]*?) height="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1), count=1
    )


def _subplots(rows: int, columns: int, *, height: float, **options: Any) -> tuple[Figure, list[list[Axes]]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=(WIDTH_INCHES, height), squeeze=False, layout="constrained", **options
    )
    return figure, axes.tolist()
