# SPDX-License-Identifier: Apache-2.0
"""`sennit bench`: samples on their way to a trainer. Each command imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sennit.command_line import busy, fail, stdout_console, writable_folder
from sennit.testbed.bench.running import Figures, need, write


def offload(
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
    from sennit.testbed.bench.samples import offload

    need("bpf", "arena", *(("netns", "native-xdp") if end_to_end else ()))
    console = stdout_console()
    if end_to_end:
        from sennit.testbed.bench.samples import offload_end_to_end

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
    write(json_path, figures)


def feed(
    records: Annotated[int, typer.Option(help="records in memory", min=1 << 17)] = 500_000,
    batches: Annotated[int, typer.Option(help="batches of 4,096 records per measurement", min=1, max=32)] = 32,
    rounds: Annotated[int, typer.Option(help="measurements of each; the median is reported", min=1)] = 7,
    seed: Annotated[int, typer.Option(help="seed of the records and their order", min=0)] = 1,
    json_path: Figures = None,
) -> None:
    """Time one core of a feeder: packing records, and sending them over a virtual link into XDP.

    Needs root, clang 19 or later and Linux 6.9 or later.
    """
    from sennit.testbed.bench.samples import feed as feeding

    need("bpf", "arena", "native-xdp", "tc-bpf")
    with busy("measuring in turns"):
        results = feeding.run(records=records, batches=batches, rounds=rounds, seed=seed)
    feeding.render(results, stdout_console())
    write(json_path, feeding.as_json(results))


def ingest(
    data: Annotated[str, typer.Option(help="flights, movielens, adult or synthetic")] = "flights",
    turns: Annotated[int, typer.Option(help="turns of each trainer; the median is reported", min=1)] = 50,
    json_path: Figures = None,
) -> None:
    """Time a trainer that is fed over the network beside the same trainer with its data in memory.

    Needs root, clang 19 or later, Linux 6.9 or later and two cores.
    """
    from sennit.testbed.bench.samples import ingest

    need("bpf", "arena", "native-xdp", "tc-bpf")
    try:
        with busy("training in turns"):
            found = ingest.run(data=data, turns=turns)
    except ingest.BenchError as error:
        fail(error)
    ingest.render(found, stdout_console())
    write(json_path, ingest.as_json(found))


def file_input(
    rows: Annotated[int, typer.Option(help="rows of each file", min=1)] = 200_000,
    row_wise_rows: Annotated[int, typer.Option(help="rows that the row-wise peer reads in a turn", min=1)] = 16_384,
    rounds: Annotated[int, typer.Option(help="turns of each; the median is reported", min=1)] = 9,
    seed: Annotated[int, typer.Option(help="seed of the rows", min=0)] = 1,
    against: Annotated[
        list[str] | None, typer.Option(help="datasets, mosaicml-streaming: their loaders, if installed, too")
    ] = None,
    json_path: Figures = None,
) -> None:
    """Time files to batches on one core, beside pyarrow that only reads them and a torch DataLoader over rows."""
    from sennit.testbed.bench.samples import file_input as reading
    from sennit.testbed.bench.samples.input_peers import AGAINST
    from sennit.transport.errors import SennitError

    for name in against or ():
        if name not in AGAINST:
            raise typer.BadParameter(f"--against {name}; allowed: {', '.join(AGAINST)}")
    settings = {"rows": rows, "row_wise_rows": min(rows, row_wise_rows), "rounds": rounds, "seed": seed}
    try:
        with busy("reading in turns"):
            found = reading.run(**settings, against=against or ())
    except SennitError as error:
        fail(error)
    reading.render(found, stdout_console())
    write(json_path, reading.as_json(found, **settings))


def stream(
    rows: Annotated[str, typer.Option(help="rows of each stream, in files of a million")] = "1000000,100000000",
    steps: Annotated[int, typer.Option(help="batches of 512 samples that a reader takes", min=1)] = 2_000,
    resume: Annotated[int, typer.Option(help="the late step that a reader resumes at", min=0)] = 100_000,
    rounds: Annotated[int, typer.Option(help="readers of each stream; the median is reported", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="seed of the rows", min=0)] = 1,
    folder: Annotated[
        Path | None, typer.Option(help="where files go, 13 bytes a row; default: temporary", callback=writable_folder)
    ] = None,
    json_path: Figures = None,
) -> None:
    """Measure memory, and the time to the first batch, of readers of a short stream and of a long one."""
    from sennit.testbed.bench.samples import stream as reading
    from sennit.transport.errors import SennitError

    try:
        counts = tuple(int(count) for count in rows.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 10_000:
        raise typer.BadParameter(f"--rows {rows}; allowed: numbers of 10000 or more, with commas between them")
    settings = {"steps": steps, "resume": resume, "rounds": rounds, "seed": seed}
    try:
        with busy("reading in turns"):
            found = reading.run(rows=counts, folder=folder, **settings)
    except SennitError as error:
        fail(error)
    reading.render(found, stdout_console())
    write(json_path, reading.as_json(found, rows=counts, **settings))
