# SPDX-License-Identifier: Apache-2.0
"""`sennit bench cost`: the command line. It imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from sennit.testbed.bench.running import Figures, need, run_ranks


def cost(
    kind: Annotated[str, typer.Option(help="whole: training steps; bare: ingest and exchange alone")] = "whole",
    data: Annotated[str, typer.Option(help="data set of equally long samples: flights or synthetic")] = "flights",
    ranks: Annotated[int, typer.Option(help="ranks of each way: 1, 2, 4 or 8")] = 2,
    batch: Annotated[int, typer.Option(help="samples of a step, all ranks together", min=8)] = 2_048,
    dim: Annotated[int, typer.Option(help="columns of every table", min=1)] = 16,
    samples: Annotated[int, typer.Option(help="synthetic: number of samples", min=2)] = 200_000,
    steps: Annotated[int, typer.Option(help="steps of a turn", min=1)] = 12,
    rounds: Annotated[int, typer.Option(help="timed turns of each way", min=1)] = 8,
    json_path: Figures = None,
) -> None:
    """Count processor seconds for a million samples by role: XDP and sennit, plain Python and gloo, TorchRec."""
    from sennit.testbed.bench.training import cost as bench

    need("netns", "bpf", "arena", "native-xdp")
    run_ranks(
        bench,
        json_path,
        doing="training in turns, each way with ranks and feeders of its own",
        kind=kind,
        data=data,
        ranks=ranks,
        batch_size=batch,
        dim=dim,
        samples=samples,
        steps=steps,
        rounds=rounds,
    )
