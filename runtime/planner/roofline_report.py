# SPDX-License-Identifier: Apache-2.0
"""What `sennit roofline` prints: the bound of each phase and what binds it, the step, memory, and a measured run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table as Lines

from sennit.runtime.planner.roofline import ARITHMETIC, LATENCY, PHASES, Bounds, Machines, Workload
from sennit.runtime.planner.roofline_files import Described
from sennit.runtime.telemetry import process_cost
from sennit.transport.errors import ConfigError

# Phases of a trainer's report, by phase of a bound.
CLOCKED: Final[dict[str, tuple[str, ...]]] = {
    "id exchange": ("input exchange",),
    "lookup": ("lookup",),
    "pooled exchange": ("AlltoAll forward",),
    "dense": ("dense forward", "dense backward", "dense update", "attention"),
    "gradient exchange": ("AlltoAll backward",),
    "update": ("sparse update",),
    "replicas": ("AllGather",),
    "AllReduce": ("AllReduce",),
}
KINDS: Final = ("bandwidth", LATENCY, ARITHMETIC)
# Phases of a report in which no samples are trained on.
NOT_STEPS: Final = ("evaluation", "checkpoint", "tables")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A run of `sennit train`, from its report."""

    step_s: float
    phases_s: Mapping[str, float]
    """Seconds of a step by the phases of a bound: the mean over ranks."""
    others_s: Mapping[str, float]
    """Seconds of phases without a bound, by the report's names."""
    cost: Mapping[str, Any] = field(default_factory=dict)
    """Processor time and energy, as the report has them (docs/reference/cost.md); empty in older reports."""


def read_report(path: Path, work: Workload, ranks: int) -> Measured:
    """The report of `sennit train --json`. Raises `ConfigError` if it is of another model or number of ranks."""
    try:
        found = json.loads(path.read_bytes())
        steps = found["steps"]["last"] - found["steps"]["first"]
        seconds = {str(name): float(one) / steps for name, one in found["phases_s"].items()}
        step_s = float(found["train_s"]) / steps
        told = {
            "ranks": (int(found["world_size"]), ranks),
            "samples a step": (int(found["config"]["batch_size"]), work.batch),
            "numbers in tables": (
                int(found["embedding"]["table_numbers"]),
                sum(one.count * one.rows * one.dim for one in work.tables),
            ),
        }
        changes = len(found["changes"])
        cost = found.get("cost") or {}
        process_cost.lines(cost)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a file of sennit train --json") from error
    except (ValueError, KeyError, TypeError, ZeroDivisionError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no report of a run with steps ({type(error).__name__}: {error}); allowed: a file of "
            "sennit train --json"
        ) from error
    for name, (theirs, ours) in told.items():
        if theirs != ours:
            raise ConfigError(
                f"{path} is of another run: {theirs:,} {name}, and here are {ours:,}; give the options of that run"
            )
    if changes:
        raise ConfigError(f"{path} is of a run whose ranks changed; allowed: one with the same ranks to its end")
    known = {one for names in CLOCKED.values() for one in names}
    return Measured(
        step_s=step_s,
        phases_s={
            phase: sum(seconds.get(name, 0.0) for name in names)
            for phase, names in CLOCKED.items()
            if any(name in seconds for name in names)
        },
        others_s={name: one for name, one in seconds.items() if name not in known and name not in NOT_STEPS},
        cost=cost,
    )


def as_json(
    work: Workload, machines: Machines, bounds: Bounds, measured: Measured | None, notes: Sequence[str]
) -> dict[str, Any]:
    """All of it for programs: seconds and bytes."""
    return {
        "model": work.name,
        "cluster": machines.name,
        "ranks": machines.ranks,
        "hosts": machines.hosts,
        "batch": work.batch,
        "parameters": int(work.parameters),
        "phases": [
            {
                "name": phase.name,
                "bound_s": phase.seconds,
                "binding": phase.binding,
                "kind": phase.kind(phase.binding),
                "times_the_next": None if math.isinf(phase.margin) else phase.margin,
                "needs_s": dict(phase.needs),
                "measured_s": None if measured is None else measured.phases_s.get(phase.name),
            }
            for phase in bounds.phases
        ],
        "serial_s": bounds.serial_s,
        "overlapped_s": bounds.overlapped_s,
        "overlapped_binding": bounds.overlapped_binding,
        "samples_per_s": {
            "serial": bounds.samples_per_s(bounds.serial_s),
            "overlapped": bounds.samples_per_s(bounds.overlapped_s),
        },
        "memory": [
            {
                "tier": tier.name,
                "there_bytes": tier.size_bytes,
                "needed_bytes": sum(bounds.memory[tier.name].values()),
                "of": dict(bounds.memory[tier.name]),
                "row_share": share,
            }
            for tier, share in zip(machines.tiers, bounds.row_shares, strict=True)
        ],
        "measured_step_s": None if measured is None else measured.step_s,
        "measured_cost": None if measured is None else dict(measured.cost),
        "notes": list(notes),
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds else ""


def _why(bounds: Bounds, number: int) -> str:
    phase = bounds.phases[number]
    kind = phase.kind(phase.binding)
    what = kind if kind == phase.binding else f"{kind} of {phase.binding}"
    return what if math.isinf(phase.margin) else f"{what}, {phase.margin:.1f} x the next"


def render(
    work: Workload, machines: Machines, bounds: Bounds, measured: Measured | None, notes: Sequence[str], out: Console
) -> None:
    for note in notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True)
    hosts = "1 host" if machines.hosts == 1 else f"{machines.hosts} hosts"
    out.print(
        f"{work.name} on {machines.name}: {work.parameters:,.0f} parameters, {work.batch:,} samples a step, "
        f"{machines.ranks} ranks on {hosts}",
        markup=False,
        soft_wrap=True,
    )
    lines = Lines("phase", title="The least time of each phase, ms")
    for heading in (*KINDS, "bound"):
        lines.add_column(heading, justify="right")
    lines.add_column("what binds")
    if measured is not None:
        lines.add_column("measured", justify="right")
        lines.add_column("times", justify="right")
    for number, phase in enumerate(bounds.phases):
        cells = [phase.name, *(_ms(one) for one in phase.by_kind().values()), _ms(phase.seconds), _why(bounds, number)]
        if measured is not None:
            found = measured.phases_s.get(phase.name)
            cells += ["", ""] if found is None else [_ms(found), f"{found / phase.seconds:.1f} x"]
        lines.add_row(*cells)
    out.print(lines)
    for name, seconds, why in (
        ("one phase after the other", bounds.serial_s, ""),
        ("with perfect overlap", bounds.overlapped_s, f"; {bounds.overlapped_binding} is busy all the time"),
    ):
        rate = bounds.samples_per_s(seconds)
        out.print(f"step, {name}: {seconds * 1e3:.3f} ms or more, {rate:,.0f} samples/s or fewer{why}", soft_wrap=True)
    if measured is not None:
        _render_measured(bounds, measured, out)
    lines = Lines("tier", title="Memory of a rank")
    for heading in ("needed", "there", "free", "rows of a step"):
        lines.add_column(heading, justify="right")
    lines.add_column("what for")
    for tier, share in zip(machines.tiers, bounds.row_shares, strict=True):
        parts = bounds.memory[tier.name]
        needed = sum(parts.values())
        lines.add_row(
            tier.name,
            decimal(int(needed)),
            decimal(int(tier.size_bytes)),
            decimal(int(tier.size_bytes - needed)),
            f"{share:.1%}",
            ", ".join(f"{name} {decimal(int(size))}" for name, size in parts.items()),
        )
    out.print(lines)


def _render_measured(bounds: Bounds, measured: Measured, out: Console) -> None:
    out.print(
        f"measured: {measured.step_s * 1e3:.3f} ms a step, {measured.step_s / bounds.serial_s:.1f} times the bound in "
        f"turn, {measured.step_s / bounds.overlapped_s:.1f} times that with perfect overlap",
        soft_wrap=True,
    )
    if measured.others_s:
        rest = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in measured.others_s.items())
        out.print(f"measured, without a bound: {rest}", markup=False, soft_wrap=True)
    for title, text in process_cost.lines(measured.cost):
        out.print(f"measured {title}: {text}", markup=False, soft_wrap=True)


def page(cases: Sequence[tuple[Described, Machines, Bounds, Bounds]]) -> list[str]:
    """The lines of the tables of docs/models.md. A case has bounds as described, and with three times the tables."""
    lines = [
        "| model | parameters | batch | tables with states | fastest tier | slowest tier | rows from there |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for described, machines, bounds, _ in cases:
        used = [
            f"{machines.tiers[place].name} {decimal(int(sum(bounds.memory[machines.tiers[place].name].values())))} "
            f"of {decimal(int(machines.tiers[place].size_bytes))}"
            for place in (0, -1)
        ]
        size = sum(one.size_bytes for one in described.work.tables)
        lines.append(
            f"| {described.work.name} | {described.work.parameters / 1e9:,.0f} B | {described.work.batch:,} | "
            f"{decimal(int(size))} | {used[0]} | {used[1]} | {bounds.row_shares[-1]:.1%} |"
        )
    lines += [
        "",
        f"| phase, ms | {' | '.join(one.work.name for one, *_ in cases)} |",
        "| --- |" + " --- |" * len(cases),
    ]
    for name in PHASES:
        found = [next((phase for phase in bounds.phases if phase.name == name), None) for _, _, bounds, _ in cases]
        if any(found):
            cells = ["–" if one is None else f"{one.seconds * 1e3:.2f} ({one.binding})" for one in found]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    rows: list[tuple[str, list[str]]] = [
        ("step, in turn", [f"{bounds.serial_s * 1e3:.2f}" for _, _, bounds, _ in cases]),
        (
            "step, perfect overlap",
            [f"{bounds.overlapped_s * 1e3:.2f} ({bounds.overlapped_binding})" for _, _, bounds, _ in cases],
        ),
    ]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows]
    lines += [
        "",
        "| model | paper | bound, in turn | bound, overlapped | paper / bound in turn | with 3 × the tables |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for described, _, bounds, wider in cases:
        theirs = described.reported_samples_per_s or math.nan
        ours, most, other = (
            bounds.samples_per_s(bounds.serial_s),
            bounds.samples_per_s(bounds.overlapped_s),
            wider.samples_per_s(wider.serial_s),
        )
        lines.append(
            f"| {described.work.name} | {theirs / 1e6:.1f} M/s | {ours / 1e6:.1f} M/s | {most / 1e6:.1f} M/s | "
            f"{theirs / ours:.0%} | {theirs / other:.0%} |"
        )
    return lines
