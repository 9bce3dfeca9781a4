# SPDX-License-Identifier: Apache-2.0
"""The command `sennit`. Each command imports what it needs when it runs, so that `--help` stays quick."""

import importlib.metadata
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

import sennit
from sennit.command_line import figure_file, stdout_console, writable_file
from sennit.runtime.ingest.command import feed
from sennit.runtime.telemetry.commands import metrics, top
from sennit.runtime.trace.commands import app as trace
from sennit.testbed.commands import app as testbed

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A multi-path transport for torch.distributed, and a DLRM trainer that uses it.",
)


bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure sennit beside its peers in one run.")
app.add_typer(bench, name="bench")
app.add_typer(testbed, name="testbed")
app.add_typer(trace, name="trace")
app.command()(top)
app.command()(metrics)
app.command()(feed)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Say what this machine can do, why not, and what to do about it."""
    from sennit import doctor

    findings = doctor.examine()
    if as_json:
        typer.echo(json.dumps(doctor.as_json(findings), indent=2, ensure_ascii=False))
    else:
        doctor.render(findings, stdout_console())
    if not doctor.healthy(findings):
        raise typer.Exit(1)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help="Train a DLRM over sennit.",
)
def train(context: typer.Context) -> None:
    # Its options are its own, so that `python -m sennit.runtime.training` under torchrun has the same.
    from sennit.runtime.training.command import main

    main(context.args)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="a checkpoint, or a folder of several: the newest is taken")],
    output: Annotated[Path, typer.Argument(help="file to write; torch.load reads it")],
) -> None:
    """Write a checkpoint's embedding tables in 8 bits a weight, for inference with torch, and its dense weights."""
    from rich.filesize import decimal

    from sennit.runtime.training.export import export_int8
    from sennit.transport.errors import SennitError

    try:
        found = export_int8(checkpoint, output)
    except SennitError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    before, after = decimal(found.before_bytes), decimal(found.after_bytes)
    typer.echo(f"{output}: {found.tables} tables of {found.source} in {after} instead of {before}")


@bench.command()
def collectives(
    against: Annotated[
        list[str] | None, typer.Option(help="gloo, openmpi, sennit-core or udp-bare; may be repeated")
    ] = None,
    core: Annotated[
        bool, typer.Option("--core", help="compare the native core alone instead of sennit in torch")
    ] = False,
    transport: Annotated[str, typer.Option(help="value of SENNIT_TRANSPORT: auto, shm or udp")] = "auto",
    world: Annotated[int, typer.Option(help="ranks, all on this machine", min=2)] = 2,
    sizes: Annotated[str, typer.Option(help="bytes of a rank's larger buffer")] = "4KiB,64KiB,1MiB,16MiB,64MiB",
    only: Annotated[
        str | None,
        typer.Option(help="of allreduce, alltoall, reduce_scatter, all_gather, comma-separated; all without"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="samples of every case and peer", min=1)] = 15,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="write the report here", callback=writable_file)
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="draw the figure here (.png, .svg, .pdf)", callback=figure_file)
    ] = None,
) -> None:
    """Time four collectives beside gloo, OpenMPI or bare UDP.

    They are those of recommendation training. Peers take turns round by round; the ratio comes first.
    """
    from sennit.testbed.bench import cases, collectives, report
    from sennit.testbed.bench.conductor import WorkerError
    from sennit.transport.sizes import parse_size

    try:
        settings = collectives.Settings(
            transport=transport,
            world=world,
            ours="sennit-core" if core else "sennit",
            against=tuple(against or ("gloo",)),
            collectives=tuple(
                cases.Collective(name.strip()) for name in (only or ",".join(cases.Collective)).split(",")
            ),
            sizes_bytes=tuple(parse_size(size) for size in sizes.split(",")),
            rounds=rounds,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = stdout_console()
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=None)
            result = collectives.run(
                settings,
                lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
            )
    except WorkerError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    report.render(result, console)
    if json_path is not None:
        json_path.write_text(json.dumps(result.as_json(), indent=1) + "\n")
    if plot_path is not None:
        report.plot(result, plot_path)


@bench.command("offload")
def bench_offload(
    rounds: Annotated[int, typer.Option(help="samples of each; the median counts", min=1)] = 7,
    repeat: Annotated[int, typer.Option(help="runs of the program in a sample", min=1)] = 50_000,
    seed: Annotated[int, typer.Option(help="of the records", min=0)] = 1,
    end_to_end: Annotated[
        bool,
        typer.Option("--end-to-end", help="from packets on a veth link to tensors, beside sockets in C and Python"),
    ] = False,
    batches: Annotated[int, typer.Option(help="in a sample of --end-to-end", min=1)] = 16,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="write the figures here", callback=writable_file)
    ] = None,
) -> None:
    """Time feature plans in XDP, in the native core and in NumPy.

    Needs root, clang 19 or later and Linux 6.9 or later.
    """
    from sennit import capabilities
    from sennit.testbed.bench import offload

    reason = capabilities.missing("bpf", "arena", *(("netns", "native-xdp") if end_to_end else ()))
    if reason is not None:
        typer.echo(f"error: {reason}", err=True)
        raise typer.Exit(1)
    console = stdout_console()
    if end_to_end:
        from sennit.testbed.bench import offload_end_to_end

        try:
            measured = offload_end_to_end.run(rounds=rounds, batches=batches, seed=seed)
        except offload_end_to_end.BenchError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        offload_end_to_end.render(measured, console)
        figures = offload_end_to_end.as_json(measured)
    else:
        results = offload.run(rounds=rounds, repeat=repeat, seed=seed)
        offload.render(results, console)
        figures = offload.as_json(results)
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=1) + "\n")


@bench.command("tiers")
def bench_tiers(
    folder: Annotated[Path, typer.Option(help="files of rows, 1.6 GB, are made here and removed")] = Path("."),
    steps: Annotated[int, typer.Option(help="of 2,048 samples with an id for each of 26 tables", min=1)] = 50,
    seed: Annotated[int, typer.Option(help="of rows and ids", min=0)] = 1,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="write the figures here", callback=writable_file)
    ] = None,
) -> None:
    """Time the trainer, and the bare operator, with tables ten times larger than their memory, beside all in memory."""
    from sennit.testbed.bench import embedding_tiers, tiers
    from sennit.transport.errors import SennitError

    try:
        report = tiers.run(folder, embedding_tiers.Load(), steps=steps, seed=seed)
    except SennitError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    tiers.render(report, stdout_console())
    if json_path is not None:
        json_path.write_text(json.dumps(report.as_json(), indent=1) + "\n")


@bench.command("feed")
def bench_feed(
    records: Annotated[int, typer.Option(help="in memory", min=1 << 17)] = 500_000,
    batches: Annotated[int, typer.Option(help="of 4,096 records, sent in a sample", min=1, max=32)] = 32,
    rounds: Annotated[int, typer.Option(help="samples of each; the median counts", min=1)] = 7,
    seed: Annotated[int, typer.Option(help="of the records and their order", min=0)] = 1,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="write the figures here", callback=writable_file)
    ] = None,
) -> None:
    """Time one core of a feeder: packing, and sending over a virtual link into XDP.

    Needs what `sennit bench offload` needs.
    """
    from sennit import capabilities
    from sennit.testbed.bench import feed as feeding

    reason = capabilities.missing("bpf", "arena", "native-xdp", "tc-bpf")
    if reason is not None:
        typer.echo(f"error: {reason}", err=True)
        raise typer.Exit(1)
    results = feeding.run(records=records, batches=batches, rounds=rounds, seed=seed)
    feeding.render(results, stdout_console())
    if json_path is not None:
        json_path.write_text(json.dumps(feeding.as_json(results), indent=1) + "\n")


@bench.command("ingest")
def bench_ingest(
    data: Annotated[str, typer.Option(help="flights, movielens, adult or synthetic")] = "flights",
    turns: Annotated[int, typer.Option(help="of each trainer; the median counts", min=1)] = 50,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="write the figures here", callback=writable_file)
    ] = None,
) -> None:
    """Time a trainer from memory beside the same one from feeders.

    Needs what `sennit bench offload` needs, and two cores.
    """
    from sennit import capabilities
    from sennit.testbed.bench import ingest

    reason = capabilities.missing("bpf", "arena", "native-xdp", "tc-bpf")
    if reason is not None:
        typer.echo(f"error: {reason}", err=True)
        raise typer.Exit(1)
    try:
        found = ingest.run(data=data, turns=turns)
    except ingest.BenchError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    ingest.render(found, stdout_console())
    if json_path is not None:
        json_path.write_text(json.dumps(ingest.as_json(found), indent=1) + "\n")


def _bench_embedding_on_a_gpu(rounds: int, seed: int, json_path: Path | None) -> None:
    from sennit import capabilities

    reason = capabilities.missing("gpu")
    if reason is not None:
        typer.echo(f"error: {reason}", err=True)
        raise typer.Exit(1)
    from sennit.testbed.bench import embedding_cuda

    report = embedding_cuda.run(rounds=rounds, seed=seed)
    embedding_cuda.render(report, stdout_console())
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")


@bench.command("embedding")
def bench_embedding(
    device: Annotated[str, typer.Option(help="cpu, or cuda: the Triton kernels at their peer's shape")] = "cpu",
    against: Annotated[list[str] | None, typer.Option(help="fbgemm, torch or tensor-train; may be repeated")] = None,
    only: Annotated[str, typer.Option(help="shapes whose name contains this")] = "",
    threads: Annotated[int, typer.Option(help="of each peer", min=1, max=256)] = 1,
    rounds: Annotated[int, typer.Option(help="turns of each peer", min=1)] = 15,
    seed: Annotated[int, typer.Option(help="of ids and weights", min=0)] = 1,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="write the figures here", callback=writable_file)
    ] = None,
) -> None:
    """Time lookups and updates of embedding tables beside fbgemm and torch, or on a GPU."""
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device {device}; allowed: cpu, cuda")
    if device == "cuda":
        if against or only or threads != 1:
            raise typer.BadParameter("--against, --only and --threads are for --device cpu")
        _bench_embedding_on_a_gpu(rounds, seed, json_path)
        return
    from sennit.testbed.bench import embedding, embedding_peers

    names = tuple(against or ("fbgemm", "torch"))
    allowed = [name for name in embedding_peers.PEERS if name != embedding.OURS]
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"--against {name}; allowed: {', '.join(allowed)}")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        results = embedding.run(
            against=names,
            rounds=rounds,
            seed=seed,
            only=only,
            threads=threads,
            on_progress=lambda what: progress.update(task, description=what),
        )
    embedding.render(results, stdout_console())
    if json_path is not None:
        json_path.write_text(
            json.dumps(embedding.as_json(results, rounds=rounds, seed=seed, threads=threads), indent=1) + "\n"
        )


@bench.command()
def rdma(
    size: Annotated[str, typer.Option(help="bytes that each rank sends to the other in an operation")] = "64KiB",
    netem: Annotated[
        list[str] | None,
        typer.Option(help="settings of tc-netem(8), the first to compare with ('' for none); may be repeated"),
    ] = None,
    against: Annotated[list[str] | None, typer.Option(help="kernel-rc or udp; may be repeated")] = None,
    in_flight: Annotated[str, typer.Option(help="operations at a time, numbers separated by commas")] = "1,8",
    rounds: Annotated[int, typer.Option(help="samples of every peer and setting", min=1)] = 5,
    cpu: Annotated[bool, typer.Option(help="also the CPU time per GB, of verbs and of udp")] = True,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="write the report here", callback=writable_file)
    ] = None,
) -> None:
    """Time AlltoAll over soft-RoCE with loss, delay and the like, beside the kernel's own recovery.

    Runs in the VM: sennit testbed vm -- sennit bench rdma
    """
    from sennit.testbed.bench import rdma, rdma_report
    from sennit.testbed.bench.conductor import WorkerError
    from sennit.transport.sizes import parse_size

    try:
        settings = rdma.Settings(
            part_bytes=parse_size(size),
            in_flight=tuple(int(number) for number in in_flight.split(",")),
            rounds=rounds,
            netem=tuple(netem or rdma.NETEM),
            against=tuple(against or ("kernel-rc",)),
            cpu=cpu,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=None)
            result = rdma.run(
                settings,
                lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
            )
    except (WorkerError, rdma.Unusable) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    rdma_report.render(result, stdout_console())
    if json_path is not None:
        json_path.write_text(json.dumps(result.as_json(), indent=1) + "\n")


@app.command()
def version() -> None:
    """Print the versions of sennit and of the torch that it runs under."""
    typer.echo(f"sennit {sennit.__version__}")
    try:
        typer.echo(f"torch {importlib.metadata.version('torch')}")
    except importlib.metadata.PackageNotFoundError:
        typer.echo("torch is not installed")
