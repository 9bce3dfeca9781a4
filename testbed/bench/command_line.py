# SPDX-License-Identifier: Apache-2.0
"""`sennit bench`. Each command imports what it needs when it runs, so that `--help` stays quick."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sennit import capabilities
from sennit.command_line import busy, fail, figure_file, stdout_console, writable_file, write_json
from sennit.testbed.bench.comparison_command import compare
from sennit.testbed.bench.cost_command import cost
from sennit.testbed.bench.overlap_command import overlap
from sennit.testbed.bench.planner_commands import placements, planner
from sennit.testbed.bench.progress import progress
from sennit.testbed.bench.scaling_command import scaling

Figures = Annotated[Path | None, typer.Option("--json", help="write the figures to this file", callback=writable_file)]
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure sennit and its peers in turn, in one run.")


def _write(json_path: Path | None, figures: object) -> None:
    if json_path is not None:
        write_json(json_path, figures)


def _need(*names: str) -> None:
    """Ends the command if this machine lacks a capability."""
    if reason := capabilities.missing(*names):
        fail(reason)


@app.command(epilog="Example: sennit bench collectives --against gloo --sizes 4KiB,64MiB")
def collectives(
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="peer: gloo, openmpi, symmetric, sennit-core, core-symmetric, udp-bare, core-CODEC or "
            "core-CODEC-between (fp16, bf16, fp8, fp8_e5m2, int8, mx4); may be repeated. The symmetric ones are sennit "
            "with symmetric memory, those with a codec the core with fewer bytes"
        ),
    ] = None,
    core: Annotated[bool, typer.Option("--core", help="measure the native core alone, without torch")] = False,
    transport: Annotated[str, typer.Option(help="value of SENNIT_TRANSPORT: auto, shm or udp")] = "auto",
    world: Annotated[int, typer.Option(help="number of ranks, all on this machine", min=2)] = 2,
    hosts: Annotated[
        int, typer.Option(help="hosts that sennit is told the ranks are spread over; between them udp", min=1)
    ] = 1,
    sizes: Annotated[
        str, typer.Option(help="message sizes, comma-separated: bytes of a rank's larger buffer")
    ] = "4KiB,64KiB,1MiB,16MiB,64MiB",
    only: Annotated[
        str | None,
        typer.Option(help="some of allreduce, alltoall, reduce_scatter, all_gather, comma-separated; default: all"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="measurements of each case and peer", min=1)] = 15,
    json_path: Figures = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="write a figure to this file (.png, .svg, .pdf)", callback=figure_file)
    ] = None,
) -> None:
    """Time AllReduce, AlltoAll, ReduceScatter and AllGather beside gloo, OpenMPI or a bare UDP transfer.

    Peers take turns round by round. The report begins with the ratios.
    """
    from sennit.testbed.bench import cases, collectives, report
    from sennit.testbed.bench.conductor import WorkerError
    from sennit.transport.sizes import parse_size

    try:
        settings = collectives.Settings(
            transport=transport,
            world=world,
            hosts=hosts,
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
        with progress() as update:
            result = collectives.run(settings, update)
    except WorkerError as error:
        fail(error)
    report.render(result, console)
    _write(json_path, result.as_json())
    if plot_path is not None:
        report.plot(result, plot_path)


def _run_ranks(bench: Any, json_path: Path | None, **settings: Any) -> None:
    """Runs a benchmark whose ranks are processes of this machine, with these settings of its module."""
    from sennit.runtime.training.launch import RankFailure

    try:
        chosen = bench.Settings(**settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        with busy("measuring in turns"):
            report = bench.run(chosen)
    except RankFailure as error:
        fail(error)
    bench.render(report, stdout_console())
    _write(json_path, report.as_json())


app.command("all", epilog="Example: sennit bench all --report comparison")(compare)
app.command("planner", epilog="Example: sennit bench planner --only held-out")(planner)
app.command("placements", epilog="Example: sennit bench placements --ranks 4 --confined")(placements)
app.command("cost", epilog="Example: sennit bench cost --kind bare --data synthetic")(cost)
app.command("scaling", epilog="Example: sennit bench scaling --worlds 1,2,4")(scaling)
app.command("overlap", epilog="Example: sennit bench overlap --hosts 2 --round-trip-us 1000")(overlap)


@app.command("group", epilog="Example: sennit bench group --world 64 --against gloo --transport udp")
def bench_group(
    against: Annotated[list[str] | None, typer.Option(help="peer: gloo")] = None,
    transport: Annotated[str, typer.Option(help="value of SENNIT_TRANSPORT: auto, shm or udp")] = "auto",
    world: Annotated[int, typer.Option(help="number of ranks, all on this machine", min=2)] = 64,
    rounds: Annotated[int, typer.Option(help="timed groups of each peer; the median is reported", min=1)] = 5,
    json_path: Figures = None,
) -> None:
    """Time the making of a group up to its first AllReduce; count bytes read from the store, and memory."""
    from sennit.testbed.bench import group

    _run_ranks(group, json_path, transport=transport, world=world, against=tuple(against or ("gloo",)), rounds=rounds)


@app.command("timeline", epilog="Example: sennit bench timeline --rounds 300")
def bench_timeline(
    data: Annotated[str, typer.Option(help="data set, as of sennit train")] = "flights",
    world: Annotated[int, typer.Option(help="number of ranks, all on this machine", min=1)] = 2,
    batch: Annotated[int, typer.Option(help="samples of a step, all ranks together", min=8)] = 2_048,
    steps: Annotated[int, typer.Option(help="steps of a turn", min=1)] = 4,
    rounds: Annotated[int, typer.Option(help="timed turns of each", min=1)] = 300,
    json_path: Figures = None,
) -> None:
    """Time training steps with a timeline beside steps without one."""
    from sennit.testbed.bench import timeline as bench

    _run_ranks(bench, json_path, data=data, world=world, batch_size=batch, steps=steps, rounds=rounds)


@app.command("slices", epilog="Example: sennit bench slices --slices 8 --batch 1024")
def bench_slices(
    world: Annotated[int, typer.Option(help="number of ranks, all on this machine: a power of two", min=2)] = 2,
    slices: Annotated[int, typer.Option(help="slices of the global batch: a power of two", min=2)] = 8,
    batch: Annotated[int, typer.Option(help="samples of a rank", min=1)] = 1_024,
    rounds: Annotated[int, typer.Option(help="timed steps of each; the median is reported", min=1)] = 25,
    json_path: Figures = None,
) -> None:
    """Time the dense step in slices beside one slice a rank, and beside DDP."""
    from sennit.testbed.bench import slices as bench

    _run_ranks(bench, json_path, world=world, slices=slices, local_batch=batch, rounds=rounds)


@app.command("sharded", epilog="Example: sennit bench sharded --zipf 1.2")
def bench_sharded(
    world: Annotated[int, typer.Option(help="number of ranks, all on this machine: a power of two", min=2)] = 2,
    batch: Annotated[int, typer.Option(help="samples of a rank", min=1)] = 1_024,
    rows: Annotated[int, typer.Option(help="rows of each of the 26 tables", min=8)] = 100_000,
    pooling: Annotated[int, typer.Option(help="ids of each bag", min=1)] = 20,
    zipf: Annotated[float | None, typer.Option(help="exponent of the ids' distribution; default: uniform")] = None,
    rounds: Annotated[int, typer.Option(help="timed steps of each; the median is reported", min=1)] = 15,
    json_path: Figures = None,
) -> None:
    """Time a training step on sharded tables by placement, beside TorchRec if it is installed."""
    from sennit.testbed.bench import sharded as bench

    _run_ranks(bench, json_path, world=world, local_batch=batch, rows=rows, pooling=pooling, zipf=zipf, rounds=rounds)


@app.command("quality", epilog="Example: sennit bench quality --seeds 3 --batch-sizes 256,2048,16384")
def bench_quality(
    data: Annotated[str, typer.Option(help="a named data set")] = "flights",
    seeds: Annotated[int, typer.Option(help="runs of each way", min=2)] = 5,
    epochs: Annotated[int, typer.Option(help="passes over the training samples", min=1)] = 1,
    ranks: Annotated[int, typer.Option(help="ranks, all on this machine", min=1)] = 2,
    only: Annotated[list[str] | None, typer.Option(help="one of the ways; may be repeated; default: all")] = None,
    batch_sizes: Annotated[str, typer.Option(help="also train with these batch sizes, comma-separated")] = "",
    warmup: Annotated[float, typer.Option(help="share of the steps of --batch-sizes in which rates rise", min=0)] = 0.0,
    same_time: Annotated[
        bool,
        typer.Option(
            "--same-time", help="--batch-sizes also for as long as the parameter server took, and their best epoch"
        ),
    ] = False,
    base: Annotated[str, typer.Option(help="the way to compare with, such as 'batch 8,192'")] = "fp32",
    json_path: Figures = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="write a figure to this file (.png, .svg, .pdf)", callback=figure_file)
    ] = None,
) -> None:
    """Train in several ways: plain torch, a parameter server, codecs, 16-bit tables, batch sizes.

    Compare their quality seed by seed.
    """
    from sennit.testbed.bench import quality as bench
    from sennit.transport.errors import SennitError

    try:
        settings = bench.Settings(
            data=data,
            seeds=seeds,
            epochs=epochs,
            ranks=ranks,
            only=tuple(only or bench.WAYS),
            batch_sizes=tuple(int(size) for size in batch_sizes.split(",") if size),
            warmup=warmup,
            equal_time=same_time,
            base=base,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        with progress() as update:
            report = bench.run(settings, update)
    except SennitError as error:
        fail(error)
    bench.render(report, stdout_console())
    _write(json_path, report.as_json())
    if plot_path is not None:
        bench.plot(report, plot_path)


@app.command("offload", epilog="Example: sennit bench offload --end-to-end")
def bench_offload(
    rounds: Annotated[int, typer.Option(help="measurements of each; the median is reported", min=1)] = 7,
    repeat: Annotated[int, typer.Option(help="runs of the program per measurement", min=1)] = 50_000,
    seed: Annotated[int, typer.Option(help="seed of the records", min=0)] = 1,
    end_to_end: Annotated[
        bool,
        typer.Option(
            "--end-to-end", help="measure from packets on a veth link to tensors, beside sockets in C and Python"
        ),
    ] = False,
    batches: Annotated[int, typer.Option(help="batches per measurement of --end-to-end", min=1)] = 16,
    json_path: Figures = None,
) -> None:
    """Time the preprocessing of records in XDP, in the native core and in NumPy.

    Needs root, clang 19 or later and Linux 6.9 or later.
    """
    from sennit.testbed.bench import offload

    _need("bpf", "arena", *(("netns", "native-xdp") if end_to_end else ()))
    console = stdout_console()
    if end_to_end:
        from sennit.testbed.bench import offload_end_to_end

        try:
            with busy("measuring in turns"):
                measured = offload_end_to_end.run(rounds=rounds, batches=batches, seed=seed)
        except offload_end_to_end.BenchError as error:
            fail(error)
        offload_end_to_end.render(measured, console)
        figures = offload_end_to_end.as_json(measured)
    else:
        with busy("measuring in turns"):
            results = offload.run(rounds=rounds, repeat=repeat, seed=seed)
        offload.render(results, console)
        figures = offload.as_json(results)
    _write(json_path, figures)


@app.command("codecs", epilog="Example: sennit bench codecs --size 4MiB")
def bench_codecs(
    size: Annotated[str, typer.Option(help="bytes of float32 that are coded, at least 4")] = "4MiB",
    rounds: Annotated[int, typer.Option(help="measurements of each; the median is reported", min=1)] = 25,
    seed: Annotated[int, typer.Option(help="seed of the numbers", min=0)] = 1,
    json_path: Figures = None,
) -> None:
    """Time codecs on one thread, beside torch's and NumPy's own conversions."""
    from sennit.testbed.bench import codecs
    from sennit.transport.sizes import parse_size

    try:
        size_bytes = parse_size(size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if size_bytes < 4:
        raise typer.BadParameter(f"--size {size}; allowed: 4 bytes or more")
    with progress() as update:
        results = codecs.run(size_bytes=size_bytes, rounds=rounds, seed=seed, on_progress=update)
    codecs.render(results, stdout_console())
    _write(json_path, codecs.as_json(results, size_bytes=size_bytes, rounds=rounds, seed=seed))


@app.command("tiers", epilog="Example: sennit bench tiers --folder /mnt/nvme")
def bench_tiers(
    folder: Annotated[Path, typer.Option(help="folder for files of rows, 1.6 GB, which are removed at the end")] = Path(
        "."
    ),
    steps: Annotated[int, typer.Option(help="steps of 2,048 samples with an id for each of 26 tables", min=1)] = 50,
    seed: Annotated[int, typer.Option(help="seed of rows and ids", min=0)] = 1,
    json_path: Figures = None,
) -> None:
    """Time training with embedding tables ten times larger than their memory, beside all tables in memory."""
    from sennit.testbed.bench import embedding_tiers, tiers
    from sennit.transport.errors import SennitError

    try:
        with busy("training from files and from memory"):
            report = tiers.run(folder, embedding_tiers.Load(), steps=steps, seed=seed)
    except SennitError as error:
        fail(error)
    tiers.render(report, stdout_console())
    _write(json_path, report.as_json())


@app.command("feed", epilog="Example: sennit bench feed --rounds 7")
def bench_feed(
    records: Annotated[int, typer.Option(help="records in memory", min=1 << 17)] = 500_000,
    batches: Annotated[int, typer.Option(help="batches of 4,096 records per measurement", min=1, max=32)] = 32,
    rounds: Annotated[int, typer.Option(help="measurements of each; the median is reported", min=1)] = 7,
    seed: Annotated[int, typer.Option(help="seed of the records and their order", min=0)] = 1,
    json_path: Figures = None,
) -> None:
    """Time one core of a feeder: packing records, and sending them over a virtual link into XDP.

    Needs root, clang 19 or later and Linux 6.9 or later.
    """
    from sennit.testbed.bench import feed as feeding

    _need("bpf", "arena", "native-xdp", "tc-bpf")
    with busy("measuring in turns"):
        results = feeding.run(records=records, batches=batches, rounds=rounds, seed=seed)
    feeding.render(results, stdout_console())
    _write(json_path, feeding.as_json(results))


@app.command("ingest", epilog="Example: sennit bench ingest --data flights")
def bench_ingest(
    data: Annotated[str, typer.Option(help="flights, movielens, adult or synthetic")] = "flights",
    turns: Annotated[int, typer.Option(help="turns of each trainer; the median is reported", min=1)] = 50,
    json_path: Figures = None,
) -> None:
    """Time a trainer that is fed over the network beside the same trainer with its data in memory.

    Needs root, clang 19 or later, Linux 6.9 or later and two cores.
    """
    from sennit.testbed.bench import ingest

    _need("bpf", "arena", "native-xdp", "tc-bpf")
    try:
        with busy("training in turns"):
            found = ingest.run(data=data, turns=turns)
    except ingest.BenchError as error:
        fail(error)
    ingest.render(found, stdout_console())
    _write(json_path, ingest.as_json(found))


def _bench_embedding_on_a_gpu(rounds: int, seed: int, json_path: Path | None) -> None:
    _need("gpu")
    from sennit.testbed.bench import embedding_cuda

    with busy("measuring in turns"):
        report = embedding_cuda.run(rounds=rounds, seed=seed)
    embedding_cuda.render(report, stdout_console())
    _write(json_path, report)


@app.command("embedding", epilog="Example: sennit bench embedding --against torch --rounds 5")
def bench_embedding(
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: the Triton kernels with the shape of FBGEMM's published times")
    ] = "cpu",
    against: Annotated[
        list[str] | None, typer.Option(help="peer: fbgemm, torch or tensor-train; may be repeated")
    ] = None,
    only: Annotated[str, typer.Option(help="only shapes whose name contains this")] = "",
    threads: Annotated[int, typer.Option(help="threads of each peer", min=1, max=256)] = 1,
    rounds: Annotated[int, typer.Option(help="turns of each peer; the median is reported", min=1)] = 15,
    seed: Annotated[int, typer.Option(help="seed of ids and weights", min=0)] = 1,
    json_path: Figures = None,
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
    with progress() as update:
        results = embedding.run(against=names, rounds=rounds, seed=seed, only=only, threads=threads, on_progress=update)
    embedding.render(results, stdout_console())
    _write(json_path, embedding.as_json(results, rounds=rounds, seed=seed, threads=threads))


@app.command("gpu", epilog="Example: sennit bench gpu --json gpu.json")
def bench_gpu(
    world: Annotated[int, typer.Option(help="ranks of staging and training step; they may share a GPU", min=2)] = 2,
    rounds: Annotated[int, typer.Option(help="timed turns of each operation; the median is reported", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="seed of ids and weights", min=0)] = 1,
    interpreter: Annotated[
        bool, typer.Option("--interpreter", help="small shapes on the CPU in Triton's interpreter; nothing is timed")
    ] = False,
    json_path: Figures = None,
) -> None:
    """Run everything that needs a GPU: tests, embedding kernels, copies and collectives, a training step.

    Needs a CUDA device, or --interpreter. A part that cannot run says why.
    """
    if not interpreter:
        _need("gpu")
    from sennit.testbed.bench import gpu

    try:
        settings = gpu.Settings(world=world, rounds=rounds, seed=seed, interpreter=interpreter)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with progress() as update:
        report = gpu.run(settings, update)
    gpu.render(report, stdout_console())
    _write(json_path, report)
    if wrong := gpu.failures(report):
        fail("; ".join(wrong))


@app.command(epilog="Example: sennit testbed vm -- sennit bench rdma --rounds 3")
def rdma(
    size: Annotated[str, typer.Option(help="bytes that each rank sends to the other in one operation")] = "64KiB",
    netem: Annotated[
        list[str] | None,
        typer.Option(help="settings of tc-netem(8), '' for none; the first is the reference; may be repeated"),
    ] = None,
    against: Annotated[list[str] | None, typer.Option(help="peer: kernel-rc or udp; may be repeated")] = None,
    in_flight: Annotated[str, typer.Option(help="operations in flight, comma-separated numbers")] = "1,8",
    rounds: Annotated[int, typer.Option(help="measurements of each peer and setting", min=1)] = 5,
    cpu: Annotated[bool, typer.Option(help="also measure the CPU time per GB of verbs and udp")] = True,
    json_path: Figures = None,
) -> None:
    """Time AlltoAll over soft-RoCE under loss, delay and reordering, beside the kernel's reliable queue pairs.

    Runs in the VM of `sennit testbed vm`.
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
        with progress() as update:
            result = rdma.run(settings, update)
    except (WorkerError, rdma.Unusable) as error:
        fail(error)
    rdma_report.render(result, stdout_console())
    _write(json_path, result.as_json())
