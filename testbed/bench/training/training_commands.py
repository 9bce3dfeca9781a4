# SPDX-License-Identifier: Apache-2.0
"""`sennit bench`: training steps, and the quality that they reach. Each command imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sennit.command_line import busy, fail, is_replaceable, stdout_console
from sennit.testbed.bench import quiet
from sennit.testbed.bench.running import Figures, Picture, mistakes_told, need, progress, run_ranks, write


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
    base: Annotated[
        str | None, typer.Option(help="the way to compare with, such as 'batch 8,192'; default: fp32")
    ] = None,
    histories: Annotated[
        bool, typer.Option("--histories", help="one pass in time order: dlrm, hstu, and hstu in padded plain torch")
    ] = False,
    history: Annotated[
        int | None, typer.Option(metavar="EVENTS", help="events of a history at most; default: as the data say", min=1)
    ] = None,
    is_resumed: Annotated[
        bool, typer.Option("--resume", help="go on with the run in the file of --json, if there is one")
    ] = False,
    json_path: Figures = None,
    plot_path: Picture = None,
) -> None:
    """Train in several ways: plain torch, a parameter server, codecs, 16-bit tables, batch sizes.

    Compare their quality seed by seed. The file of --json has after each run what there is.
    """
    from sennit.testbed.bench.training import quality as bench
    from sennit.testbed.bench.training import quality_plots
    from sennit.testbed.bench.training.quality_ways import DLRM, FP32, HISTORY_WAYS, WAYS
    from sennit.transport.errors import SennitError

    with mistakes_told():
        settings = bench.Settings(
            data=data,
            seeds=seeds,
            epochs=epochs,
            ranks=ranks,
            only=tuple(only or (HISTORY_WAYS if histories else WAYS)),
            batch_sizes=tuple(int(size) for size in batch_sizes.split(",") if size),
            rate_rules=tuple(rule for rule in rate_rules.split(",") if rule),
            warmup=warmup,
            equal_time=same_time,
            base=base or (DLRM if histories else FP32),
            history=history,
        )
        earlier = bench.read_earlier(json_path, settings, is_resumed=is_resumed)

    def keep(report: bench.Report) -> None:
        if json_path is not None and is_replaceable(json_path):
            write(json_path, {**report.as_json(), quiet.PARTIAL: True})

    try:
        with progress() as update:
            report = bench.run(settings, update, earlier=earlier, keep=keep)
    except SennitError as error:
        fail(error)
    bench.render(report, stdout_console())
    write(json_path, {**report.as_json(), quiet.PARTIAL: False})
    if plot_path is not None:
        quality_plots.differences(report, plot_path)


def drift(
    days: Annotated[int, typer.Option(help="days of the stream", min=3)] = 12,
    rows_per_day: Annotated[int, typer.Option(help="samples of a day", min=1)] = 20_480,
    drift_days: Annotated[float, typer.Option(help="days in which the correlation of a weight falls to 1/e")] = 20.0,
    life_days: Annotated[float, typer.Option(help="days that an id lives")] = 20.0,
    first_days: Annotated[int, typer.Option(help="days before the first one that is evaluated", min=1)] = 4,
    seeds: Annotated[int, typer.Option(help="streams, each with all ways", min=2)] = 5,
    json_path: Figures = None,
    plot_path: Picture = None,
) -> None:
    """Train on clicks that drift: in order, shuffled, late, without new ids. Compare with the best that is possible."""
    from dataclasses import replace

    from sennit.runtime.training.launch import RankFailure
    from sennit.testbed.bench.training import drift as bench
    from sennit.testbed.bench.training import drift_page

    with mistakes_told():
        stream = replace(
            bench.Settings().stream,
            days=days,
            rows_per_day=rows_per_day,
            drift_days=drift_days,
            life_days=life_days,
        )
        settings = bench.Settings(stream=stream, first_days=first_days, seeds=seeds)
    try:
        with progress() as update:
            report = bench.run(settings, update)
    except RankFailure as failure:
        fail(failure)
    bench.render(report, stdout_console())
    write(json_path, report.as_json())
    if plot_path is not None:
        drift_page.plot([report], plot_path)


def balance(
    data: Annotated[
        str, typer.Option(help="data with histories, as of sennit train")
    ] = "synthetic-yambda?rows=200000&users=1000&items=2000&last=1000",
    world: Annotated[int, typer.Option(help="number of ranks, all on this machine", min=2)] = 4,
    batches: Annotated[str, typer.Option(help="samples of a rank in a step, comma-separated")] = "8,32,128",
    dim: Annotated[int, typer.Option(help="columns of every table", min=2)] = 64,
    steps: Annotated[int, typer.Option(help="steps with balance and without, in turns", min=1)] = 10,
    json_path: Figures = None,
) -> None:
    """Compare steps whose samples are dealt to slices by cost (--balance) with others, a core for each rank."""
    from sennit.testbed.bench.training import balance as bench

    try:
        sizes = tuple(int(one) for one in batches.split(","))
    except ValueError:
        raise typer.BadParameter(f"batches {batches!r}; allowed: numbers with commas between them") from None
    run_ranks(bench, json_path, data=data, world=world, batches=sizes, dim=dim, steps=steps)


def attention(
    count: Annotated[int, typer.Option("--sequences", help="sequences of a batch", min=1)] = 32,
    mean: Annotated[float, typer.Option(help="mean length, of a gamma distribution", min=1)] = 139.0,
    longest: Annotated[int, typer.Option(help="the greatest length", min=1)] = 512,
    heads: Annotated[int, typer.Option(help="heads", min=1)] = 4,
    dim: Annotated[int, typer.Option(help="columns of a head", min=1, max=1024)] = 64,
    rounds: Annotated[int, typer.Option(help="passes of each; the median is reported", min=1)] = 15,
    seed: Annotated[int, typer.Option(help="seed of lengths and rows", min=0)] = 1,
    json_path: Figures = None,
) -> None:
    """Time attention over sequences of different lengths beside torch's, padded and in a loop, on one core."""
    from sennit.testbed.bench.training import attention as bench

    settings = {"count": count, "longest": longest, "heads": heads, "dim": dim, "rounds": rounds, "seed": seed}
    with busy("attending in turns"):
        report = bench.run(mean=mean, **settings)
    bench.render(report, stdout_console())
    write(json_path, bench.as_json(report, mean=mean, **settings))
