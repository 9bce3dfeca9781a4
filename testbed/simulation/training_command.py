# SPDX-License-Identifier: Apache-2.0
"""`sennit testbed simulate-steps`: the command line. It imports what it needs when it runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from sennit.command_line import busy, fail, stdout_console, writable_folder, write_json


def simulate_steps(
    hosts: Annotated[str, typer.Option(help="numbers of hosts, comma-separated: powers of two")] = "16,64,256,1024",
    speeds: Annotated[
        str, typer.Option(help="how many times as fast as one core of this machine a host computes, comma-separated")
    ] = "1,64",
    samples: Annotated[int, typer.Option(help="of each host in a step", min=1, max=1 << 20)] = 512,
    tables: Annotated[int, typer.Option(help="tables, with 8 column shards each", min=1, max=4_096)] = 128,
    dim: Annotated[int, typer.Option(help="columns of every table", min=8, max=4_096)] = 128,
    out: Annotated[
        Path,
        typer.Option(
            help="folder for outcomes, table and figure; outcomes that fit are reused", callback=writable_folder
        ),
    ] = Path("build/simulation-steps"),
    page: Annotated[Path | None, typer.Option(help="also write table and figure into this page")] = None,
    seed: Annotated[int, typer.Option(help="seed of everything random", min=0)] = 1,
    jobs: Annotated[int, typer.Option(help="runs at a time: one of 1,024 hosts takes 3 GiB of memory", min=1)] = 1,
) -> None:
    """Predict training steps of up to 1,024 hosts: kernels as calibrated here, exchanges simulated.

    The calibration is that of SENNIT_CALIBRATION (sennit calibrate).
    """
    from sennit.runtime.planner.constants import read_constants
    from sennit.testbed.simulation import report, runner, training, training_report
    from sennit.testbed.simulation.outcome import Outcome
    from sennit.testbed.simulation.suite import Case
    from sennit.transport.choice.calibration import processor_name
    from sennit.transport.config import from_environment
    from sennit.transport.errors import SennitError

    counts, rates = _numbers("hosts", hosts), _numbers("speeds", speeds)
    shape = training.Shape(samples=samples, tables=tables, dim=dim)
    for count in counts:
        if count & (count - 1) or not 4 <= count <= shape.shards:
            raise typer.BadParameter(f"hosts {count}; allowed: powers of two, 4 to {shape.shards}, the shards")
    if dim % shape.column_shards:
        raise typer.BadParameter(f"dim {dim}; allowed: a multiple of {shape.column_shards}, the column shards")
    try:
        constants, notes = read_constants(from_environment().calibration)
    except SennitError as error:
        fail(error)
    for note in notes:
        stdout_console().print(f"note: {note}", soft_wrap=True)
    with busy("measuring the model on one core"):
        fixed = training.measure(shape)
    cases = training.cases(shape, counts, constants, fixed, seed)

    def show(case: Case, outcome: Outcome) -> None:
        state = "" if outcome.is_complete else f" (did not end: {outcome.failure or 'deadline'})"
        typer.echo(
            f"{case.name}: {outcome.completion_us / 1e3:.2f} ms, {outcome.ratio:.2f} x ideal{state}, "
            f"{outcome.wall_s:.0f} s, {outcome.trace_hash}"
        )

    with busy(f"simulating {len(cases)} exchanges"):
        outcomes = runner.run_cases(cases, out, jobs=jobs, done=show)
    by_speed = {
        float(speed): training.steps(dataclasses.replace(shape, speed=speed), counts, constants, fixed, cases, outcomes)
        for speed in rates
    }
    text = f"Kernels of {processor_name()}, seed {seed}.\n\n{training_report.table(by_speed)}"
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
    write_json(out / "steps.json", training_report.as_json(shape, by_speed))
    training_report.plot(by_speed, out / "scaling.svg")
    stdout_console().print(text, soft_wrap=True)
    if page is not None:
        try:
            picture = f"![efficiency and exposed share]({page.with_suffix('.svg').name})"
            report.write_page(page, f"{picture}\n\n{text}", training_report.BEGIN)
        except (OSError, ValueError) as error:
            fail(error, 2)
        training_report.plot(by_speed, page.with_suffix(".svg"))


def _numbers(name: str, text: str) -> list[int]:
    try:
        found = [int(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{name} {text!r}; allowed: numbers above 0 with commas between them")
    return sorted(set(found))
