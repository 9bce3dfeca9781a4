# SPDX-License-Identifier: Apache-2.0
"""The command `sennit`. Each command imports what it needs when it runs, so that `--help` stays quick."""

import contextlib
import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import sennit
from sennit import extras
from sennit.command_line import EXIT_UNAVAILABLE, busy, fail, json_text, loading, output, stdout_console, writable_file
from sennit.offload.agent.command import agent
from sennit.offload.opi.command import opi
from sennit.runtime.aggregate.command import aggregate
from sennit.runtime.ingest.command import feed
from sennit.runtime.stream.command import make_stream
from sennit.runtime.telemetry.commands import metrics, top
from sennit.runtime.timeline.command import timeline
from sennit.runtime.trace.commands import app as trace
from sennit.testbed.bench.command_line import app as bench
from sennit.testbed.commands import app as testbed

# As a newcomer meets them; others follow.
ORDER = (
    "demo",
    "doctor",
    "train",
    "shard",
    "roofline",
    "timeline",
    "feed",
    "agent",
    "aggregate",
    "export",
    "convert",
    "tables",
    "top",
    "metrics",
    "opi",
    "trace",
)


class Commands(TyperGroup):
    """Ends a command that needs an optional package with one line that says how to install it, and one whose output
    cannot be written.
    """

    def main(self, *arguments: Any, **options: Any) -> Any:
        with output():
            return super().main(*arguments, **options)

    def list_commands(self, ctx: Any) -> list[str]:
        """What a newcomer needs first."""
        return sorted(super().list_commands(ctx), key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            explained = extras.explain(error)
            if explained is None:
                raise
            fail(explained, EXIT_UNAVAILABLE)


# Rates of links: a modem's, and more than any processor can fill.
GBIT_MIN, GBIT_MAX = 1e-4, 1e4

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A torch.distributed backend that uses many network paths, and a trainer for recommendation models.",
)


app.add_typer(bench, name="bench")
app.add_typer(testbed, name="testbed")
app.add_typer(trace, name="trace")
app.command(epilog="Example: sennit top --paths")(top)
app.command(epilog="Example: sennit timeline run.json.gz")(timeline)
app.command(epilog="Example: sennit metrics --listen 127.0.0.1:9464")(metrics)
app.command(epilog="Example: sennit aggregate --native --port 4793")(aggregate)
app.command(epilog="Example: sennit opi --listen 127.0.0.1:50051")(opi)
app.command(epilog="Example: sudo sennit agent --config agent.toml")(agent)
app.command(epilog="Example: sennit feed --data flights --to 10.0.0.5:4800")(feed)
app.command("make-stream", epilog="Example: sennit make-stream clicks --days 14 --rows-per-day 1000000")(make_stream)


@app.command(
    epilog="Example: sennit doctor --listen on one machine; then, with its address, "
    "sennit doctor --peer 10.0.0.5 on the other one"
)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
    listen: Annotated[
        bool, typer.Option("--listen", help="wait for another machine, and try the network to it")
    ] = False,
    peer: Annotated[str, typer.Option(metavar="HOST", help="try the network to this machine, which listens")] = "",
    port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port at which the two machines meet")] = 4790,
) -> None:
    """Check this machine: what works, what is missing, and how to install it. Or the network between two machines."""
    from sennit.doctor import doctor

    if listen and peer:
        raise typer.BadParameter("give --listen on one machine and --peer on the other")
    if listen or peer:
        _doctor_of_pair(peer, port, as_json)
        return
    findings = doctor.examine()
    if as_json:
        typer.echo(json_text(doctor.as_json(findings), indent=2), nl=False)
    else:
        doctor.render(findings, stdout_console())
    if not doctor.healthy(findings):
        raise typer.Exit(1)


def _doctor_of_pair(peer: str, port: int, as_json: bool) -> None:
    from sennit.doctor import doctor_pair

    def say(text: str) -> None:
        typer.echo(text, err=as_json)

    report = doctor_pair.visit(peer, port) if peer else doctor_pair.listen(port, say=say)
    if as_json:
        typer.echo(json_text(dataclasses.asdict(report), indent=2), nl=False)
    elif report.ok:
        typer.echo(f"Packets pass both ways: {report.description}")
        for note in report.notes:
            typer.echo(f"note: {note}")
    else:
        typer.echo(f"error: {report.error}", err=True)
    if not report.ok:
        raise typer.Exit(1)


@app.command(epilog="Example: sennit demo")
def demo(
    ranks: Annotated[int, typer.Option(min=1, max=64, help="processes that train, all on this machine")] = 2,
) -> None:
    """Train a recommendation model on real flights over sennit, in about a minute. Writes no file."""
    from sennit.runtime.training.__main__ import main

    typer.echo(f"Which of 327,346 flights arrives late? This is: sennit train --data flights --ranks {ranks}")
    try:
        main(["--data", "flights", "--ranks", str(ranks)])
    except SystemExit as end:
        if end.code:
            raise
    typer.echo(
        "\nThe hash of the weights is the same with --ranks 1, 2, 3 or 4. Go on with:\n"
        "  sennit train --help      your data, models, checkpoints, elastic runs\n"
        "  sennit top               in another terminal, while a run goes on\n"
        "  sennit bench all         sennit beside gloo and other peers on this machine\n"
        "  sennit doctor            what this machine can do, and what is missing"
    )


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help="Train a recommendation model (DLRM) over sennit.",
)
def train(context: typer.Context) -> None:
    # The options are those of `python -m sennit.runtime.training`, which torchrun starts.
    from sennit.runtime.training.__main__ import main

    main(context.args)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help="Plan which rank has which rows of the tables, and predict the time of a step.",
)
def shard(context: typer.Context) -> None:
    # The options are its own and those of `sennit train`.
    with loading("torch"):
        from sennit.runtime.training.shard_command import main

    main(context.args)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help="Bound each phase of a training step by bandwidth, latency and arithmetic, and size a model on a cluster.",
)
def roofline(context: typer.Context) -> None:
    # The options are its own and those of `sennit train`.
    with loading("torch"):
        from sennit.runtime.training.roofline_command import main

    main(context.args)


@app.command(epilog="Example: sennit export runs/checkpoints rows.pt")
def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="a checkpoint, or a folder of checkpoints, of which the newest is read")
    ],
    output: Annotated[Path, typer.Argument(help="file to write; torch.load reads it", callback=writable_file)],
) -> None:
    """Export a checkpoint for inference with torch: tables in 8 bits a weight, dense weights, preprocessing."""
    from rich.filesize import decimal

    from sennit.runtime.training.export import export_int8
    from sennit.transport.errors import SennitError

    try:
        with busy("reading the checkpoint, and coding its rows"):
            found = export_int8(checkpoint, output)
    except SennitError as error:
        fail(error)
    before, after = decimal(found.before_bytes), decimal(found.after_bytes)
    typer.echo(f"{output}: {found.tables} tables of {found.source} in {after} instead of {before}")


@app.command(epilog="Example: sennit convert runs/flights runs/more --slices 16 --row-shards 16")
def convert(
    checkpoint: Annotated[
        Path, typer.Argument(help="a checkpoint, or a folder of checkpoints, of which the newest is read")
    ],
    output: Annotated[Path, typer.Argument(help="folder to write; a run goes on from it with --resume")],
    slices: Annotated[int | None, typer.Option(help="slices of a global batch, a power of two")] = None,
    row_shards: Annotated[
        list[str] | None,
        typer.Option(metavar="N|TABLE=N", help="row shards of all tables, or of one; may be given several times"),
    ] = None,
    dynamic: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE", help="give this table dynamic ids, with the rows and rules of --tables"),
    ] = None,
    fixed: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE", help="give this dynamic table a vocabulary of the ids that have rows"),
    ] = None,
    tables: Annotated[Path | None, typer.Option(metavar="FILE", help="settings of tables, as for train")] = None,
) -> None:
    """Make a checkpoint for more ranks, other row shards, or other ids of tables: the model stays as it is, bits of its
    training change.
    """
    from sennit.runtime.training.convert import convert as converted
    from sennit.runtime.training.convert import dynamic_of
    from sennit.transport.errors import SennitError

    of_table: dict[str, int] = {}
    for text in row_shards or ():
        table, _, count = text.rpartition("=")
        if not count.isdecimal() or table in of_table or (len(row_shards or ()) > 1 and not table):
            raise typer.BadParameter(f"--row-shards {text}; allowed: one number, or TABLE=NUMBER once for each table")
        of_table[table] = int(count)
    try:
        with busy("reading the checkpoint, and writing another"):
            found = converted(
                checkpoint,
                output,
                slices=slices,
                row_shards=of_table.get("", of_table or None),
                dynamic=dynamic_of(dynamic or (), tables),
                fixed=fixed or (),
            )
    except SennitError as error:
        fail(error)
    typer.echo(f"{found.output}: a new run with the weights of {found.source}, which goes on with other bits")
    for line in found.changes:
        typer.echo(f"  {line}")
    typer.echo(f"go on with sennit train --resume, {'--tables, ' if dynamic else ''}and the same slices and row shards")


@app.command(epilog="Example: sennit tables runs/flights --table tailnum --by count")
def tables(
    checkpoint: Annotated[
        Path, typer.Argument(help="a checkpoint, or a folder of checkpoints, of which the newest is read")
    ],
    table: Annotated[str | None, typer.Option(help="list rows of this table")] = None,
    by: Annotated[str, typer.Option(help="what is listed first: count or age of a dynamic table, or norm")] = "norm",
    count: Annotated[int, typer.Option(help="rows to list", min=1, max=1_000_000)] = 10,
    parquet: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="write all rows of --table: id, row, count, last_step", callback=writable_file
        ),
    ] = None,
) -> None:
    """List the embedding tables of a checkpoint, or the rows of one with their ids, or write them to a file."""
    from sennit.runtime.training import table_rows
    from sennit.transport.errors import SennitError

    if by not in table_rows.BY:
        raise typer.BadParameter(f"--by {by}; allowed: {', '.join(table_rows.BY)}")
    if parquet is not None and table is None:
        raise typer.BadParameter("--parquet without --table; allowed: with one table")
    try:
        with busy("reading the checkpoint"):
            found = table_rows.CheckpointTables(checkpoint)
            rows = None if table is None else table_rows.first_rows(found, table, by=by, count=count)
            written = 0 if parquet is None or table is None else table_rows.write_parquet(found, table, parquet)
    except SennitError as error:
        fail(error)
    if rows is None:
        table_rows.show_tables(found, stdout_console())
        return
    table_rows.show_rows(rows, stdout_console())
    if parquet is not None:
        typer.echo(f"{parquet}: {written:,} rows of table {table}")


@app.command(epilog="Example: sennit explain allreduce 64MiB --ranks 32 --hosts 4")
def explain(
    collective: Annotated[str, typer.Argument(help="allreduce, reduce_scatter, reduce, allgather, gather or alltoall")],
    size: Annotated[str, typer.Argument(help="of the whole vector, or of all parts, as 64KiB or 16MiB")],
    ranks: Annotated[int, typer.Option(min=1, max=65_536, help="ranks of the group")] = 8,
    hosts: Annotated[int, typer.Option(min=1, help="machines that the ranks are spread over")] = 1,
    leaves: Annotated[
        int | None, typer.Option(help="of an allreduce: leaves of the tree that ranks share; default: one a rank")
    ] = None,
    dtype: Annotated[str, typer.Option(help="type of the elements, as float32, bfloat16 or int64")] = "float32",
    codec: Annotated[
        list[str] | None,
        typer.Option(help="also say what a codec would cost: fp16, bf16, fp8, fp8_e5m2, int8, mx4; auto: each of them"),
    ] = None,
    stochastic: Annotated[bool, typer.Option("--stochastic", help="codecs round at random")] = False,
    gbit: Annotated[
        float | None, typer.Option(help="what a rank can send to other hosts, Gbit/s; default: as calibrated")
    ] = None,
    aggregator: Annotated[
        bool, typer.Option("--aggregator", help="as if the ranks had one; default: if SENNIT_AGGREGATOR names one")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the rows as JSON")] = False,
) -> None:
    """Say which algorithm a collective takes, what each would do, and what the model thinks it costs."""
    from sennit.commands import explain as explanation
    from sennit.commands import explain_codecs
    from sennit.transport.choice.calibration import read_calibration
    from sennit.transport.choice.costs import Collective
    from sennit.transport.config import from_environment
    from sennit.transport.errors import ConfigError
    from sennit.transport.sizes import parse_size

    # Underscores do not count: torch's names are all_reduce, all_gather and all_to_all.
    named = {name.replace("_", ""): name for name in Collective}.get(collective.replace("_", ""))
    if named is None:
        raise typer.BadParameter(f"{collective!r}; allowed: {', '.join(Collective)}")
    try:
        size_bytes = parse_size(size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if hosts > ranks:
        raise typer.BadParameter(f"--hosts {hosts}; allowed: 1..{ranks}, the number of ranks")
    if leaves is not None and (named is not Collective.ALLREDUCE or leaves < ranks):
        raise typer.BadParameter(
            f"--leaves {leaves}; allowed: with allreduce, {ranks} or more, so that each rank has one"
        )
    if dtype not in explanation.DTYPES:
        raise typer.BadParameter(f"--dtype {dtype}; allowed: {', '.join(explanation.DTYPES)}")
    for name in codec or ():
        if name not in explain_codecs.NAMES:
            raise typer.BadParameter(f"--codec {name}; allowed: {', '.join(explain_codecs.NAMES)}")
    if codec and dtype not in explain_codecs.DTYPES:
        raise typer.BadParameter(f"--codec with --dtype {dtype}; allowed: {', '.join(explain_codecs.DTYPES)}")
    if stochastic and not codec:
        raise typer.BadParameter("--stochastic without --codec; allowed: with --codec")
    # The comparison is false for NaN.
    if gbit is not None and not (hosts > 1 and GBIT_MIN <= gbit <= GBIT_MAX):
        raise typer.BadParameter(f"--gbit {gbit:g}; allowed: {GBIT_MIN:g}..{GBIT_MAX:g}, with --hosts 2 or more")
    try:
        config = from_environment()
        constants = read_calibration(config.calibration)
    except ConfigError as error:
        fail(error)
    for note in constants.notes:
        typer.echo(f"note: {note}", err=True)
    found = explanation.explain(
        named,
        size_bytes,
        ranks=ranks,
        hosts=hosts,
        forced=config.algorithm,
        calibration=constants,
        leaves=leaves,
        dtype=explanation.DTYPES[dtype],
        bytes_per_s=None if gbit is None else gbit * 1e9 / 8,
        has_aggregator=aggregator or bool(config.aggregator),
        codecs=tuple(codec or ()),
        stochastic=stochastic,
    )
    if as_json:
        typer.echo(json_text(found, indent=2), nl=False)
    else:
        explanation.render(found, stdout_console())


@app.command(epilog="Example: sennit calibrate --ranks 8; or torchrun ... -m sennit calibrate")
def calibrate(
    ranks: Annotated[
        int | None, typer.Option(min=2, help="ranks to start on this machine; default: this is a rank of torchrun")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="file to write; SENNIT_CALIBRATION then names it", callback=writable_file)
    ] = Path("calibration.json"),
) -> None:
    """Measure this cluster in seconds, and write the constants by which algorithms are chosen."""
    import os

    from sennit.runtime.calibrate import calibrate as calibration
    from sennit.transport.errors import SennitError

    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if is_rank == (ranks is not None):
        raise typer.BadParameter("give --ranks, or start it with torchrun, which sets RANK and WORLD_SIZE; not both")
    try:
        found: dict[str, Any] | None
        if ranks is not None:
            with busy(f"measuring with {ranks} ranks"):
                found = calibration.run_here(ranks)
        else:
            from torch.distributed.rendezvous import rendezvous

            with busy("measuring with all ranks") if os.environ["RANK"] == "0" else contextlib.nullcontext():
                store, rank, world = next(iter(rendezvous("env://")))
                found = calibration.measure(rank=rank, world=world, store=store)
        if found is not None:
            calibration.write(output, found)
            calibration.render(found, stdout_console())
            typer.echo(f"written to {output}; use it on all ranks: SENNIT_CALIBRATION={output.absolute()}")
    except SennitError as error:
        fail(error)


@app.command(epilog="Example: CXX=g++-12 sennit build-extension")
def build_extension() -> None:
    """Compile the torch extension for the torch that is installed, where no wheel of sennit-torch fits it.

    It needs a C++20 compiler (CXX names another one) and Python's headers. The result is kept in the cache's folder.
    """
    from sennit.errors import SennitError
    from sennit.runtime.backend import building

    try:
        with busy("building the extension"):
            path = building.provide(typer.echo)
    except SennitError as error:
        fail(error, EXIT_UNAVAILABLE)
    typer.echo(f"the extension is ready: {path}")


@app.command(epilog="Example: sennit version")
def version() -> None:
    """Print the versions of sennit and torch."""
    typer.echo(f"sennit {sennit.__version__}")
    try:
        typer.echo(f"torch {importlib.metadata.version('torch')}")
    except importlib.metadata.PackageNotFoundError:
        typer.echo("torch is not installed")
