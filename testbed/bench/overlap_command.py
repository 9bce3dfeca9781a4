# SPDX-License-Identifier: Apache-2.0
"""`sennit bench overlap`: the command line. It imports what it needs when it runs, so that `--help` stays quick."""

from __future__ import annotations

from typing import Annotated

import typer

from sennit.testbed.bench.running import Figures, need, run_ranks


def overlap(
    data: Annotated[str, typer.Option(help="data set, as of sennit train")] = "flights",
    world: Annotated[int, typer.Option(help="number of ranks", min=2)] = 2,
    hosts: Annotated[int, typer.Option(help="network namespaces that the ranks are spread over", min=1)] = 1,
    round_trip_us: Annotated[int, typer.Option(help="what the network adds to a round trip", min=0)] = 0,
    rate_mbit: Annotated[int | None, typer.Option(help="of a host's link", min=1)] = None,
    batch: Annotated[int, typer.Option(help="samples of a step, all ranks together", min=8)] = 2_048,
    dim: Annotated[int, typer.Option(help="columns of every table", min=1)] = 16,
    steps: Annotated[int, typer.Option(help="steps of a turn", min=1)] = 4,
    rounds: Annotated[int, typer.Option(help="timed turns of each", min=1)] = 20,
    json_path: Figures = None,
) -> None:
    """Time overlapped training steps beside serial ones; say what of the exchanges a step waits for."""
    from sennit.testbed.bench.training import overlap as bench

    if hosts > 1:
        need("netns")
    run_ranks(
        bench,
        json_path,
        doing="training serially and overlapped, in turns",
        data=data,
        world=world,
        hosts=hosts,
        round_trip_us=round_trip_us,
        rate_mbit=rate_mbit,
        batch_size=batch,
        dim=dim,
        steps=steps,
        rounds=rounds,
    )
