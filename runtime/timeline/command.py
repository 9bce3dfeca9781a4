# SPDX-License-Identifier: Apache-2.0
"""`sennit timeline FILE`: what the timeline of a run says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sennit.command_line import ANOTHER_FILE, busy, fail, json_text, stdout_console, writable_file


def timeline(
    file: Annotated[Path, typer.Argument(help="what sennit train --timeline wrote")],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="print the critical path of this step, link by link")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg", help="draw a step: that of --step, or one of median length", callback=writable_file
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """Print the critical path of a run's steps, and how much of each exchange the overlaps hid."""
    from sennit.runtime.timeline.left import write_left
    from sennit.runtime.timeline.plot import plot as draw
    from sennit.runtime.timeline.spans import TimelineError
    from sennit.runtime.timeline.summary import render, render_step, summarise
    from sennit.runtime.timeline.trace_file import read

    try:
        with busy(f"reading {file}"):
            if left := write_left(file):
                typer.echo(f"{left.path}: written of {left}", err=True)
            trace = read(file)
            summary = summarise(trace)
        if step is not None and step not in summary.paths:
            raise TimelineError(f"step {step}; allowed: {summary.steps[0]} to {summary.steps[-1]}")
    except TimelineError as error:
        fail(error)
    except OSError as error:
        fail(f"{file} cannot be written of what ranks have left: {error.strerror}; {ANOTHER_FILE}")
    if plot is not None:
        shown = summary.usual_step if step is None else step
        try:
            plot.write_text(draw(trace, shown, summary.paths[shown]), encoding="utf-8")
        except OSError as error:
            fail(f"{plot} cannot be written: {error.strerror}; {ANOTHER_FILE}")
        typer.echo(f"step {shown} is drawn in {plot}")
    elif as_json:
        typer.echo(json_text(summary.as_json(), indent=2), nl=False)
    elif step is not None:
        render_step(summary.paths[step], stdout_console())
    else:
        render(summary, stdout_console())
