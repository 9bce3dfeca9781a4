# SPDX-License-Identifier: Apache-2.0
"""The command `sennit`. Each command imports what it needs when it runs, so that `--help` stays quick."""

import importlib.metadata
import json
from typing import Annotated

import typer
from rich.console import Console

import sennit

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A multi-path transport for torch.distributed, and a DLRM trainer that uses it.",
)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Say what this machine can do, why not, and what to do about it."""
    from sennit.testbed import doctor

    findings = doctor.examine()
    if as_json:
        typer.echo(json.dumps(doctor.as_json(findings), indent=2, ensure_ascii=False))
    else:
        doctor.render(findings, Console())
    if not doctor.healthy(findings):
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the versions of sennit and of the torch that it runs under."""
    typer.echo(f"sennit {sennit.__version__}")
    try:
        typer.echo(f"torch {importlib.metadata.version('torch')}")
    except importlib.metadata.PackageNotFoundError:
        typer.echo("torch is not installed")
