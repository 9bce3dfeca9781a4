# SPDX-License-Identifier: Apache-2.0
"""Pictures of `sennit bench quality`: differences with their intervals, and large batches beside the baseline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from sennit.testbed.bench.training.quality import METRICS, Report, interval_half
from sennit.testbed.bench.training.quality_ways import ASYNCHRONOUS, batch_way

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#888888"
BETTER: Final = {"normalised_entropy": "less is better", "auc": "more is better", "calibration": "1 is best"}


def differences(report: Report, path: Path, ways: Sequence[str] | None = None) -> None:
    """A line for each way, and a panel for each metric: the difference from the base. Of calibration its value.

    `ways`: None for all but the base.
    """
    ways, base = report.others if ways is None else ways, report.settings.base
    figure, (axes,) = panels(len(METRICS), height=1.3 + 0.26 * len(ways), sharey=True)
    for axis, (metric, short) in zip(axes, METRICS.items(), strict=True):
        is_calibration = metric == "calibration"
        if is_calibration:
            values = [report.values(way, metric) for way in ways]
            middles = [statistics.fmean(found) for found in values]
            halves = [interval_half(found) for found in values]
        else:
            apart = [report.difference(way, metric) for way in ways]
            middles, halves = [one.mean for one in apart], [one.half for one in apart]
        axis.axvline(1 if is_calibration else 0, color=GREY, linewidth=1)
        axis.errorbar(middles, range(len(ways)), xerr=halves, fmt="o", ms=4, color=BLUE, capsize=3)
        axis.set_title(short if is_calibration else f"{short} - {short} of {base}")
        axis.locator_params(axis="x", nbins=4)
        axis.set_xlabel(f"{BETTER[metric]}; bars: 95 % over seeds")
    axes[0].set_yticks(range(len(ways)), ways)
    axes[0].invert_yaxis()
    save(figure, report.settings.title, path)


def batches(reports: Sequence[Report], path: Path) -> None:
    """Synchronous batches beside the parameter server: NE by batch size. A column of panels for each data set, a row
    for equal samples and one for equal time."""
    figure, rows = panels(len(reports), row_count=2, height=5.2, sharey=False)
    for axes, is_same_time in zip(rows, (False, True), strict=True):
        for axis, report in zip(axes, (one.against(ASYNCHRONOUS) for one in reports), strict=True):
            sizes = report.settings.batch_sizes
            names = [batch_way(size, is_same_time=is_same_time).name for size in sizes]
            apart = [report.difference(name, "normalised_entropy") for name in names]
            axis.axhline(0, color=GREY, linewidth=1)
            axis.errorbar(
                sizes,
                [one.mean for one in apart],
                yerr=[one.half for one in apart],
                color=ORANGE if is_same_time else BLUE,
                marker="o",
                ms=4,
                capsize=3,
            )
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45, ha="right")
            axis.minorticks_off()
            axis.set_title(f"{report.settings.data}, equal {'time' if is_same_time else 'samples'}")
        axes[0].set_ylabel("NE - NE of the server")
    for axis in rows[-1]:
        axis.set_xlabel("synchronous batch size")
    save(figure, "Synchronous beside asynchronous training (below 0: better; bars: 95 % over seeds)", path)


def panels(count: int, *, row_count: int = 1, height: float, sharey: bool | Literal["row"]) -> tuple[Any, Any]:
    """A figure, and its rows of `count` axes. `sharey`: as of `pyplot.subplots`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(
        row_count, count, figsize=(11, height), sharey=sharey, squeeze=False, layout="constrained"
    )
    for axis in rows.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, rows


def save(figure: Any, title: str, path: Path) -> None:
    """Writes the figure with this title, and closes it."""
    import matplotlib
    from matplotlib import pyplot

    figure.suptitle(title)
    # Text stays text, and the same figures make the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "quality"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
