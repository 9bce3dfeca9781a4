# SPDX-License-Identifier: Apache-2.0
"""The command line of `sennit make-stream`. Its modules are imported when it runs, so that `--help` stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sennit.command_line import busy, writable_folder
from sennit.options import with_options
from sennit.runtime.stream.synthetic_settings import FORMATS, SyntheticStream


@with_options
def make_stream(
    *,
    folder: Annotated[
        Path, typer.Argument(help="where the files go; it is made if it is not there", callback=writable_folder)
    ],
    settings: SyntheticStream,
    format: Annotated[str, typer.Option(help=f"of the files: {', '.join(FORMATS)}")] = FORMATS[0],
) -> None:
    """Write clicks that drift as files, one a day, and the best normalised entropy that any model can reach."""
    from sennit.runtime.stream.writing import ATTAINABLE, SCHEMA, write

    with busy("making samples"):
        write(settings, folder, format)
    typer.echo(f"{folder}: {settings.row_count:,} samples by day, {SCHEMA}, {ATTAINABLE}")
