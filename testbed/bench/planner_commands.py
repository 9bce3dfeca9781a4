# SPDX-License-Identifier: Apache-2.0
"""`sennit bench planner` and `sennit bench placements`. They import what they need when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sennit.command_line import busy, fail, stdout_console, writable_file, write_json

Figures = Annotated[Path | None, typer.Option("--json", help="write the figures to this file", callback=writable_file)]


def planner(
    only: Annotated[str | None, typer.Option(help="tuned or held-out; default: both")] = None,
    json_path: Figures = None,
) -> None:
    """Compare predicted with measured step times of placements, 2 and 4 ranks here."""
    from sennit.runtime.training.launch import RankFailure
    from sennit.testbed.bench import planner as bench

    if only not in (None, "tuned", "held-out"):
        raise typer.BadParameter(f"--only {only}; allowed: tuned, held-out")
    try:
        with busy("training with each placement"):
            results = bench.run([case for case in bench.CASES if only is None or case.is_held_out == (only != "tuned")])
    except RankFailure as failure:
        fail(failure)
    bench.render(results, stdout_console())
    if json_path is not None:
        write_json(json_path, bench.as_json(results))


def placements(
    ranks: Annotated[int, typer.Option(help="ranks, all on this machine", min=2, max=8)] = 4,
    steps: Annotated[int, typer.Option(help="steps of each placement", min=2)] = 25,
    is_confined: Annotated[
        bool, typer.Option("--confined", help="each rank gets its own part of a core (needs root)")
    ] = False,
    json_path: Figures = None,
) -> None:
    """Compare the best placement found with round robin and the choice of TorchRec's planner, in turns."""
    from sennit.runtime.training.launch import RankFailure
    from sennit.testbed.bench import placements as bench
    from sennit.testbed.bench.planner import calibrated
    from sennit.transport.errors import SennitError

    try:
        with busy("training with each placement"), calibrated(ranks):
            result = bench.run(bench.Settings(ranks=ranks, steps=steps, is_confined=is_confined))
    except (RankFailure, SennitError) as failure:
        fail(failure)
    bench.render(result, stdout_console())
    if json_path is not None:
        write_json(json_path, result.as_json())
