# SPDX-License-Identifier: Apache-2.0
"""The table and the figure of steps among simulated hosts, in docs/lab/scaling.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sennit.testbed.simulation.training import EXCHANGES, Shape, Step

BEGIN: Final = "<!-- results: written by sennit testbed simulate-steps -->"
OVERLAPPED: Final = {False: "serial", True: "overlapped"}
TABLE: Final = (
    "| each | hosts | busy | ids | vectors | AllReduce | serial | exposed | efficiency | overlapped | exposed "
    "| efficiency |"
)


def efficiency(steps: Sequence[Step], step: Step, *, overlapped: bool) -> float:
    """The step of one host, to that of so many with equally many samples each."""
    return steps[0].seconds(overlapped=overlapped) / step.seconds(overlapped=overlapped)


def table(by_speed: Mapping[float, Sequence[Step]]) -> str:
    """In Markdown. `by_speed`: steps of hosts that compute so many times as fast as one core, the single host first.

    Vectors are those of both ways.
    """
    lines = [TABLE, "| --- " * (TABLE.count("|") - 1) + "|"]
    for speed, steps in by_speed.items():
        for step in steps:
            waited = {name: 1e3 * step.times[phase].waited for phase, name in EXCHANGES.items()}
            cells = [
                "1 core" if speed == 1 else f"{speed:g} cores",
                f"{step.hosts:,}",
                f"{step.computed_s * 1e3:.1f} ms",
                *(
                    f"{times * waited[name]:.2f} ms" if step.hosts > 1 else ""
                    for name, times in (("ids", 1), ("vectors", 2), ("gradients", 1))
                ),
            ]
            for overlapped in OVERLAPPED:
                cells += [
                    f"{step.seconds(overlapped=overlapped) * 1e3:.1f} ms",
                    f"{step.exposed_share(overlapped=overlapped):.0%}",
                    f"{efficiency(steps, step, overlapped=overlapped):.0%}",
                ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def as_json(shape: Shape, by_speed: Mapping[float, Sequence[Step]]) -> dict[str, Any]:
    """The report for programs, in seconds."""
    return {
        "tables": shape.tables,
        "rows": shape.rows,
        "dim": shape.dim,
        "samples": shape.samples,
        "speeds": {
            f"{speed:g}": [
                {
                    "hosts": step.hosts,
                    "computed_s": step.computed_s,
                    "exchanges_s": {phase: float(step.times[phase].waited) for phase in EXCHANGES},
                    **{
                        name: {
                            "step_s": step.seconds(overlapped=overlapped),
                            "exposed_share": step.exposed_share(overlapped=overlapped),
                            "efficiency": efficiency(steps, step, overlapped=overlapped),
                        }
                        for overlapped, name in OVERLAPPED.items()
                    },
                }
                for step in steps
            ]
            for speed, steps in by_speed.items()
        },
    }


def plot(by_speed: Mapping[float, Sequence[Step]], path: Path) -> None:
    """Plots efficiency and the exposed share by the number of hosts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharex=True)
    for number, (speed, steps) in enumerate(by_speed.items()):
        hosts = [step.hosts for step in steps]
        for overlapped, name in OVERLAPPED.items():
            style: dict[str, Any] = {"color": f"C{number}", "ls": "-" if overlapped else ":", "marker": "o", "ms": 3}
            cores = "1 core" if speed == 1 else f"{speed:g} cores"
            values = [100 * efficiency(steps, step, overlapped=overlapped) for step in steps]
            axes[0].plot(hosts, values, label=f"{cores}, {name}", **style)
            axes[1].plot(hosts, [100 * step.exposed_share(overlapped=overlapped) for step in steps], **style)
    for axis, title in zip(axes, ("efficiency, %", "exposed share of a step, %"), strict=True):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_ylim(0, max(105, axis.get_ylim()[1]))
        axis.set_xlabel("hosts")
        axis.set_title(title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else {"Date": None})
    pyplot.close(figure)
