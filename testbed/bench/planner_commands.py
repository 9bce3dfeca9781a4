# SPDX-License-Identifier: Apache-2.0
"""`sennit bench planner` and `sennit bench placements`. They import what they need when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sennit.command_line import busy, fail, stdout_console
from sennit.testbed.bench.running import Figures, need, run_ranks, write


def planner(
    only: Annotated[str | None, typer.Option(help="tuned or held-out; default: both")] = None,
    is_large: Annotated[
        bool, typer.Option("--large", help="time a plan for 1,000 tables on 128 ranks instead; nothing is trained")
    ] = False,
    json_path: Figures = None,
) -> None:
    """Compare predicted with measured step times of placements, 2 and 4 ranks here."""
    if is_large:
        _large(json_path)
        return
    from sennit.runtime.training.launch import RankFailure
    from sennit.testbed.bench.training import planner as bench

    if only not in (None, "tuned", "held-out"):
        raise typer.BadParameter(f"--only {only}; allowed: tuned, held-out")
    try:
        with busy("training with each placement"):
            results = bench.run([case for case in bench.CASES if only is None or case.is_held_out == (only != "tuned")])
    except RankFailure as failure:
        fail(failure)
    bench.render(results, stdout_console())
    write(json_path, bench.as_json(results))


def _large(json_path: Path | None) -> None:
    from sennit.testbed.bench.training import planner_scale

    with busy("planning"):
        result = planner_scale.run()
    planner_scale.render(result, stdout_console())
    write(json_path, planner_scale.as_json(result))


def placements(
    ranks: Annotated[int, typer.Option(help="ranks, all on this machine", min=2, max=8)] = 4,
    steps: Annotated[int, typer.Option(help="steps of each placement", min=2)] = 25,
    is_confined: Annotated[
        bool, typer.Option("--confined", help="each rank gets its own part of a core (needs root)")
    ] = False,
    hosts: Annotated[int, typer.Option(help="network namespaces that the ranks are spread over", min=1)] = 1,
    rate_mbit: Annotated[int | None, typer.Option(help="of a host's link", min=1)] = None,
    json_path: Figures = None,
) -> None:
    """Compare the best placement found with round robin and the choice of TorchRec's planner, in turns."""
    from sennit.testbed.bench.training import placements as bench
    from sennit.testbed.bench.training.planner import calibrated

    if hosts > 1:
        need("netns")
    run_ranks(
        bench,
        json_path,
        doing="training with each placement",
        around=calibrated(ranks),
        ranks=ranks,
        steps=steps,
        is_confined=is_confined,
        hosts=hosts,
        rate_mbit=rate_mbit,
    )
