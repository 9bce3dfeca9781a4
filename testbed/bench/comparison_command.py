# SPDX-License-Identifier: Apache-2.0
"""`sennit bench all`: the command line. It imports what it needs when it runs, so that `--help` stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sennit.command_line import fail, stdout_console, write_text
from sennit.testbed.bench.running import progress, write


def compare(
    report: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="write JSON, tables and two pictures there: send it with your machine"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="turns of each peer; the median is reported", min=2)] = 15,
    quick: Annotated[
        bool, typer.Option("--quick", help="small sizes: shows that all runs, and says little about speed")
    ] = False,
) -> None:
    """Run every peer that is installed beside sennit: gloo, OpenMPI, FBGEMM, TorchRec, plain torch. Takes minutes."""
    from rich.markdown import Markdown

    from sennit.testbed.bench import comparison, comparison_page

    settings = comparison.Settings(rounds=rounds, quick=quick)
    try:
        with progress() as update:
            found = comparison.run(settings, update)
    except comparison.FAILURES as error:
        fail(error)
    stdout_console().print(Markdown(comparison_page.tables(found)))
    if report is not None:
        write(report / comparison_page.FIGURES, found.as_json())
        for name, text in comparison_page.files(found).items():
            write_text(report / name, text)
        typer.echo(f"written to {report}: {comparison_page.PAGE} has it all")
