# SPDX-License-Identifier: Apache-2.0
"""`sennit bench`: embedding tables, in files and in memory. A command imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sennit.command_line import busy, fail, stdout_console, writable_folder
from sennit.testbed.bench.running import Figures, need, progress, write


def tiers(
    folder: Annotated[
        Path,
        typer.Option(help="folder for files of rows, 1.6 GB, which are removed at the end", callback=writable_folder),
    ] = Path("."),
    steps: Annotated[int, typer.Option(help="steps of 2,048 samples with an id for each of 26 tables", min=1)] = 50,
    seed: Annotated[int, typer.Option(help="seed of rows and ids", min=0)] = 1,
    json_path: Figures = None,
) -> None:
    """Time training with embedding tables ten times larger than their memory, beside all tables in memory."""
    from sennit.testbed.bench.tables import embedding_tiers, tiers
    from sennit.transport.errors import SennitError

    try:
        with busy("training from files and from memory"):
            report = tiers.run(folder, embedding_tiers.Load(), steps=steps, seed=seed)
    except SennitError as error:
        fail(error)
    tiers.render(report, stdout_console())
    write(json_path, report.as_json())


def _bench_embedding_on_a_gpu(rounds: int, seed: int, json_path: Path | None) -> None:
    need("gpu")
    from sennit.testbed.bench.tables import embedding_cuda

    with busy("measuring in turns"):
        report = embedding_cuda.run(rounds=rounds, seed=seed)
    embedding_cuda.render(report, stdout_console())
    write(json_path, report)


def embedding(
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
    from sennit.testbed.bench.tables import embedding, embedding_peers

    names = tuple(against or ("fbgemm", "torch"))
    allowed = [name for name in embedding_peers.PEERS if name != embedding.OURS]
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"--against {name}; allowed: {', '.join(allowed)}")
    with progress() as update:
        results = embedding.run(against=names, rounds=rounds, seed=seed, only=only, threads=threads, on_progress=update)
    embedding.render(results, stdout_console())
    write(json_path, embedding.as_json(results, rounds=rounds, seed=seed, threads=threads))


def dynamic(
    rows: Annotated[int, typer.Option(help="rows of the table", min=1000)] = 1_000_000,
    dim: Annotated[int, typer.Option(help="columns", min=1, max=4096)] = 64,
    bags: Annotated[int, typer.Option(help="bags of a batch", min=1)] = 2048,
    length: Annotated[int, typer.Option(help="ids of a bag", min=1)] = 20,
    rounds: Annotated[int, typer.Option(help="steps of each; the median is reported", min=1)] = 31,
    seed: Annotated[int, typer.Option(help="seed of the ids", min=0)] = 1,
    against: Annotated[str, typer.Option(help="torchrec, if it is installed: its managed collisions, too")] = "",
    json_path: Figures = None,
) -> None:
    """Time steps of a dynamic table beside a fixed one, and beside a dict with torch's modules."""
    from sennit.testbed.bench.tables import dynamic as tables
    from sennit.transport.errors import SennitError

    if against not in ("", "torchrec"):
        raise typer.BadParameter(f"--against {against}; allowed: torchrec")

    settings = {"rows": rows, "dim": dim, "bags": bags, "length": length, "rounds": rounds, "seed": seed}
    try:
        with busy("taking steps in turns"):
            found, growth = tables.run(**settings, torchrec=bool(against))
    except SennitError as error:
        fail(error)
    tables.render(found, growth, stdout_console())
    write(json_path, tables.as_json(found, growth, **settings))
