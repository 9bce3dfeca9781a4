# SPDX-License-Identifier: Apache-2.0
"""Shows a benchmark's figures: a table for the terminal, a plot for a page; ratios first."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sennit.testbed.bench.results import Report, quantile
from sennit.transport.sizes import format_size

# Okabe & Ito's palette, which people without red or green vision can tell apart.
COLOURS = {
    "sennit": "#0072B2",
    "sennit-core": "#56B4E9",
    "gloo": "#E69F00",
    "openmpi": "#009E73",
    "udp-bare": "#CC79A7",
}


def format_seconds(seconds: float) -> str:
    """Three digits with a unit: '12.3 ms'."""
    rounded = float(f"{seconds:.3g}")
    if rounded < 1e-3:
        return f"{rounded * 1e6:.3g} µs"
    if rounded < 1.0:
        return f"{rounded * 1e3:.3g} ms"
    return f"{rounded:.3g} s"


def spread(samples_s: Sequence[float]) -> str:
    """The median, and the 10th and 90th percentiles: '12.3 ms  (11.9 ms – 13 ms)'."""
    low, middle, high = (format_seconds(quantile(samples_s, fraction)) for fraction in (0.1, 0.5, 0.9))
    return f"{middle}  ({low} – {high})"


def render(report: Report, console: Console) -> None:
    """One line per case: the speed-up over each peer, then medians and spreads."""
    peers = report.peers()
    table = Table(title=_title(report), caption=_caption(report), caption_justify="left")
    table.add_column("collective", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for peer in peers:
        table.add_column(f"{peer} / {report.ours}", justify="right", no_wrap=True)
    for peer in (report.ours, *peers):
        table.add_column(f"{peer}  (p10 – p90)", justify="right", no_wrap=True)
    previous = None
    for row in report.rows:
        if previous is not None and row.case.collective != previous:
            table.add_section()
        ratios = [
            Text(
                f"{row.ratio(peer, report.ours):.2f}×",
                style="bold green" if row.ratio(peer, report.ours) >= 1 else "bold red",
            )
            for peer in peers
        ]
        name = row.case.collective.value if row.case.collective != previous else ""
        cells = [spread(row.samples_s[peer]) for peer in (report.ours, *peers)]
        table.add_row(name, format_size(row.case.size_bytes), *ratios, *cells)
        previous = row.case.collective
    console.print(table)


def _title(report: Report) -> str:
    settings = report.settings
    hosts = settings.get("hosts", 1)
    place = f"one machine as {hosts} hosts" if hosts != 1 else "one machine"
    return f"{settings['world']} ranks on {place}, transport {settings['transport']}, {settings['rounds']} rounds"


def _caption(report: Report) -> str:
    lines = [
        f"ratio: median over rounds, more than 1 means that {report.ours} is faster; times: slowest rank",
        f"{report.machine['processor']}, {report.machine['cores']} cores, load "
        + " ".join(f"{load:.1f}" for load in report.machine["load_average"]),  # type: ignore[attr-defined]
    ]
    if report.memory_growth_bytes is not None:
        lines.append(
            f"peak memory of a rank beyond the user's tensors: {report.memory_growth_bytes / (1 << 20):.1f} MiB"
        )
    return "\n".join(lines)


def plot(report: Report, path: Path) -> None:
    """One panel per collective: time against size on logarithmic axes, with bands from p10 to p90."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    collectives = list(dict.fromkeys(row.case.collective for row in report.rows))
    figure, axes = pyplot.subplots(
        1,
        len(collectives),
        figsize=(3.4 * len(collectives) + 0.4, 3.6),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, collective in zip(axes[0], collectives, strict=True):
        rows = sorted(
            (row for row in report.rows if row.case.collective == collective), key=lambda row: row.case.size_bytes
        )
        sizes = [row.case.size_bytes for row in rows]
        for number, peer in enumerate((report.ours, *report.peers())):
            # Other peers get matplotlib's colours.
            colour = COLOURS.get(peer, f"C{number}")
            spreads = [row.spread_s(peer) for row in rows]
            axis.fill_between(
                sizes, [low for low, _ in spreads], [high for _, high in spreads], color=colour, alpha=0.2, lw=0
            )
            axis.plot(sizes, [row.median_s(peer) for row in rows], marker="o", ms=4, color=colour, label=peer)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45, ha="right")
        axis.minorticks_off()
        axis.set_title(collective.value.replace("_", " "))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("time of an operation, slowest rank")
    axes[0][0].yaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
    axes[0][-1].legend(frameon=False)
    figure.suptitle(_title(report))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
