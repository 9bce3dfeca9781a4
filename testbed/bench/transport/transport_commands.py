# SPDX-License-Identifier: Apache-2.0
"""`sennit bench`: collectives, groups, jobs, codecs, and soft-RoCE. Each command imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from sennit.command_line import busy, fail, stdout_console
from sennit.testbed.bench.running import Figures, Picture, mistakes_told, need, progress, run_ranks, write


def aggregate(
    rounds: Annotated[int, typer.Option(help="windows of 32 blocks of each job; the median is reported", min=1)] = 15,
    seed: Annotated[int, typer.Option(help="seed of the elements", min=0)] = 1,
    json_path: Figures = None,
) -> None:
    """Time an aggregator: leaves a second that one core sums, in XDP and behind sockets, beside a plain XDP forward.

    Needs root, clang 19 or later and Linux 6.9 or later.
    """
    from sennit.testbed.bench.transport import aggregate

    need("bpf", "arena")
    with busy("measuring in turns"):
        results = aggregate.run(rounds=rounds, seed=seed)
    aggregate.render(results, stdout_console())
    write(json_path, aggregate.as_json(results))


def rack(
    ranks: Annotated[int, typer.Option(help="ranks, each on a host of its own", min=2, max=16)] = 4,
    mbit: Annotated[str, typer.Option(help="rates of a rank's link, comma-separated; 0: no limit")] = "200",
    size: Annotated[str, typer.Option(help="of the vector, float32")] = "16MiB",
    rounds: Annotated[int, typer.Option(help="turns of each algorithm", min=1)] = 7,
    native: Annotated[bool, typer.Option("--native", help="the aggregator uses sockets, not XDP")] = False,
    json_path: Figures = None,
    plot_path: Picture = None,
) -> None:
    """Time AllReduce by an aggregator beside the hosts' own algorithms, at links of several rates.

    Needs root: hosts are network namespaces.
    """
    from sennit.testbed.bench.transport import rack
    from sennit.transport.sizes import parse_size

    with mistakes_told():
        settings = rack.Settings(
            ranks=ranks,
            rates_mbit=tuple(int(rate) for rate in mbit.split(",")),
            size_bytes=parse_size(size),
            rounds=rounds,
            native=native,
        )
    with busy("measuring in turns"):
        report = rack.run(settings)
    rack.render(report, stdout_console())
    write(json_path, report.as_json())
    if plot_path is not None:
        rack.plot(report, plot_path)


def collectives(
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="peer: gloo, openmpi, symmetric, new-sizes, sennit-core, core-symmetric, udp-bare, core-CODEC or "
            "core-CODEC-between (fp16, bf16, fp8, fp8_e5m2, int8, mx4); may be repeated. The symmetric ones are sennit "
            "with symmetric memory, new-sizes is sennit with another size in each call, those with a codec the core "
            "with fewer bytes"
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
    plot_path: Picture = None,
) -> None:
    """Time AllReduce, AlltoAll, ReduceScatter and AllGather beside gloo, OpenMPI or a bare UDP transfer.

    Peers take turns round by round. The report begins with the ratios.
    """
    from sennit.testbed.bench import cases, ratios
    from sennit.testbed.bench.transport import collectives
    from sennit.testbed.bench.transport.conductor import WorkerError
    from sennit.transport.sizes import parse_size

    with mistakes_told():
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
    console = stdout_console()
    try:
        with progress() as update:
            result = collectives.run(settings, update)
    except WorkerError as error:
        fail(error)
    ratios.render(result, console)
    write(json_path, result.as_json())
    if plot_path is not None:
        ratios.plot(result, plot_path)


def group(
    against: Annotated[list[str] | None, typer.Option(help="peer: gloo")] = None,
    transport: Annotated[str, typer.Option(help="value of SENNIT_TRANSPORT: auto, shm or udp")] = "auto",
    world: Annotated[int, typer.Option(help="number of ranks, all on this machine", min=2)] = 64,
    rounds: Annotated[int, typer.Option(help="timed groups of each peer; the median is reported", min=1)] = 3,
    warm: Annotated[bool, typer.Option("--warm", help="ranks have imported everything before")] = False,
    json_path: Figures = None,
) -> None:
    """Time the making of a group up to its first AllReduce; count bytes read from the store, and memory.

    Each round starts new processes, as torchrun does. Their `import torch` does not count.
    """
    from sennit.testbed.bench.transport import group

    peers = tuple(against or ("gloo",))
    run_ranks(group, json_path, transport=transport, world=world, against=peers, rounds=rounds, warm=warm)


def start(
    against: Annotated[list[str] | None, typer.Option(help="peer: gloo")] = None,
    transport: Annotated[str, typer.Option(help="value of SENNIT_TRANSPORT: auto, shm or udp")] = "auto",
    world: Annotated[int, typer.Option(help="number of ranks, all on this machine", min=2)] = 16,
    rounds: Annotated[int, typer.Option(help="jobs of each peer; the median is reported", min=1)] = 5,
    json_path: Figures = None,
) -> None:
    """Time a job from the start of torchrun to its first AllReduce, with all that its ranks import."""
    from sennit.testbed.bench.transport import start

    peers = tuple(against or ("gloo",))
    run_ranks(start, json_path, transport=transport, world=world, against=peers, rounds=rounds)


def codecs(
    size: Annotated[str, typer.Option(help="bytes of float32 that are coded, at least 4")] = "4MiB",
    rounds: Annotated[int, typer.Option(help="measurements of each; the median is reported", min=1)] = 25,
    seed: Annotated[int, typer.Option(help="seed of the numbers", min=0)] = 1,
    json_path: Figures = None,
) -> None:
    """Time codecs on one thread, beside torch's and NumPy's own conversions."""
    from sennit.testbed.bench.transport import codecs
    from sennit.transport.sizes import parse_size

    with mistakes_told():
        size_bytes = parse_size(size)
    if size_bytes < 4:
        raise typer.BadParameter(f"--size {size}; allowed: 4 bytes or more")
    with progress() as update:
        results = codecs.run(size_bytes=size_bytes, rounds=rounds, seed=seed, on_progress=update)
    codecs.render(results, stdout_console())
    write(json_path, codecs.as_json(results, size_bytes=size_bytes, rounds=rounds, seed=seed))


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
    from sennit.testbed.bench.transport import rdma
    from sennit.testbed.bench.transport.conductor import WorkerError
    from sennit.transport.sizes import parse_size

    with mistakes_told():
        settings = rdma.Settings(
            part_bytes=parse_size(size),
            in_flight=tuple(int(number) for number in in_flight.split(",")),
            rounds=rounds,
            netem=tuple(netem or rdma.NETEM),
            against=tuple(against or ("kernel-rc",)),
            cpu=cpu,
        )
    try:
        with progress() as update:
            result = rdma.run(settings, update)
    except (WorkerError, rdma.Unusable) as error:
        fail(error)
    rdma.render(result, stdout_console())
    write(json_path, result.as_json())
