# SPDX-License-Identifier: Apache-2.0
"""The command `sennit`: `version` so far; `doctor`, `train` and `bench` follow."""

import typer

import sennit

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Host networking and training of recommendation models."""


@app.command()
def version() -> None:
    """Print the version."""
    print(sennit.__version__)
