# SPDX-License-Identifier: Apache-2.0
"""`sennit bench`: training steps, and the quality that they reach. Each command imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from sennit.command_line import fail, stdout_console
from sennit.testbed.bench.progress import progress
from sennit.testbed.bench.running import Figures, Picture, mistakes_told, run_ranks, write


def timeline(
    data: Annotated[str, typer.Option(help="data set, as of sennit train")] = "flights",
    world: Annotated[int, typer.Option(help="number of ranks, all on this machine", min=1)] = 2,
    batch: Annotated[int, typer.Option(help="samples of a step, all ranks together", min=8)] = 2_048,
    steps: Annotated[int, typer.Option(help="steps of a turn", min=1)] = 4,
    rounds: Annotated[int, typer.Option(help="timed turns of each", min=1)] = 300,
    json_path: Figures = None,
) -> None:
    """Time training steps with a timeline beside steps without one."""
    from sennit.testbed.bench.training import timeline as bench

    run_ranks(bench, json_path, data=data, world=world, batch_size=batch, steps=steps, rounds=rounds)


def slices(
    world: Annotated[int, typer.Option(help="number of ranks, all on this machine: a power of two", min=2)] = 2,
    slices: Annotated[int, typer.Option(help="slices of the global batch: a power of two", min=2)] = 8,
    batch: Annotated[int, typer.Option(help="samples of a rank", min=1)] = 1_024,
    rounds: Annotated[int, typer.Option(help="timed steps of each; the median is reported", min=1)] = 25,
    json_path: Figures = None,
) -> None:
    """Time the dense step in slices beside one slice a rank, and beside DDP."""
    from sennit.testbed.bench.training import slices as bench

    run_ranks(bench, json_path, world=world, slices=slices, local_batch=batch, rounds=rounds)


def sharded(
    world: Annotated[int, typer.Option(help="number of ranks, all on this machine: a power of two", min=2)] = 2,
    batch: Annotated[int, typer.Option(help="samples of a rank", min=1)] = 1_024,
    rows: Annotated[int, typer.Option(help="rows of each of the 26 tables", min=8)] = 100_000,
    pooling: Annotated[int, typer.Option(help="ids of each bag", min=1)] = 20,
    zipf: Annotated[float | None, typer.Option(help="exponent of the ids' distribution; default: uniform")] = None,
    rounds: Annotated[int, typer.Option(help="timed steps of each; the median is reported", min=1)] = 15,
    json_path: Figures = None,
) -> None:
    """Time a training step on sharded tables by placement, beside TorchRec if it is installed."""
    from sennit.testbed.bench.training import sharded as bench

    run_ranks(bench, json_path, world=world, local_batch=batch, rows=rows, pooling=pooling, zipf=zipf, rounds=rounds)


def quality(
    data: Annotated[str, typer.Option(help="a named data set")] = "flights",
    seeds: Annotated[int, typer.Option(help="runs of each way", min=2)] = 5,
    epochs: Annotated[int, typer.Option(help="passes over the training samples", min=1)] = 1,
    ranks: Annotated[int, typer.Option(help="ranks, all on this machine", min=1)] = 2,
    only: Annotated[list[str] | None, typer.Option(help="one of the ways; may be repeated; default: all")] = None,
    batch_sizes: Annotated[str, typer.Option(help="also train with these batch sizes, comma-separated")] = "",
    rate_rules: Annotated[
        str, typer.Option(help="how rates follow --batch-sizes: sqrt, linear, fixed, comma-separated")
    ] = "sqrt",
    warmup: Annotated[
        float, typer.Option(help="share of the steps in which rates of --batch-sizes and parameter server rise", min=0)
    ] = 0.0,
    same_time: Annotated[
        bool, typer.Option("--same-time", help="--batch-sizes also for as long as the parameter server took")
    ] = False,
    base: Annotated[str, typer.Option(help="the way to compare with, such as 'batch 8,192'")] = "fp32",
    json_path: Figures = None,
    plot_path: Picture = None,
) -> None:
    """Train in several ways: plain torch, a parameter server, codecs, 16-bit tables, batch sizes.

    Compare their quality seed by seed.
    """
    from sennit.testbed.bench.training import quality as bench
    from sennit.testbed.bench.training import quality_plots
    from sennit.testbed.bench.training.quality_ways import WAYS
    from sennit.transport.errors import SennitError

    with mistakes_told():
        settings = bench.Settings(
            data=data,
            seeds=seeds,
            epochs=epochs,
            ranks=ranks,
            only=tuple(only or WAYS),
            batch_sizes=tuple(int(size) for size in batch_sizes.split(",") if size),
            rate_rules=tuple(rule for rule in rate_rules.split(",") if rule),
            warmup=warmup,
            equal_time=same_time,
            base=base,
        )
    try:
        with progress() as update:
            report = bench.run(settings, update)
    except SennitError as error:
        fail(error)
    bench.render(report, stdout_console())
    write(json_path, report.as_json())
    if plot_path is not None:
        quality_plots.differences(report, plot_path)
