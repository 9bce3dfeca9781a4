# SPDX-License-Identifier: Apache-2.0
"""`sennit bench scaling`: the command line. It imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from sennit.testbed.bench.running import Figures, run_ranks


def scaling(
    worlds: Annotated[str, typer.Option(help="numbers of ranks, comma-separated; 1 among them")] = "1,2,4,8,16",
    data: Annotated[str, typer.Option(help="data set, as of sennit train")] = "synthetic",
    batch: Annotated[int, typer.Option(help="samples of each rank in a step", min=1)] = 512,
    dim: Annotated[int, typer.Option(help="columns of every table", min=1)] = 16,
    slices: Annotated[int, typer.Option(help="of each rank's samples in a step: a power of two", min=1)] = 2,
    steps: Annotated[int, typer.Option(help="steps of a turn", min=1)] = 4,
    turns: Annotated[int, typer.Option(help="timed turns of a run", min=1)] = 4,
    rounds: Annotated[int, typer.Option(help="runs of each number of ranks", min=1)] = 3,
    json_path: Figures = None,
) -> None:
    """Take steps of 1 to 16 ranks with equally many samples each: efficiency, and what of a step is exposed."""
    from sennit.testbed.bench.training import scaling as bench

    try:
        counts = tuple(int(one) for one in worlds.split(","))
    except ValueError:
        raise typer.BadParameter(f"worlds {worlds!r}; allowed: numbers with commas between them") from None
    run_ranks(
        bench,
        json_path,
        doing="training with one number of ranks after the other",
        worlds=counts,
        data=data,
        local_batch=batch,
        dim=dim,
        rank_slices=slices,
        steps=steps,
        turns=turns,
        rounds=rounds,
    )
