# SPDX-License-Identifier: Apache-2.0
"""`sennit shard`: plans the placement of a run before it starts. It takes the options of `sennit train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sennit.command_line import busy, check_writable, fail, stdout_console, writable_file, write_json
from sennit.runtime.planner import plan_file, report
from sennit.runtime.planner.cluster import Cluster, read_cluster
from sennit.runtime.planner.constants import read_constants
from sennit.runtime.planner.search import Searched, of_placement, search
from sennit.runtime.planner.splits import splits
from sennit.runtime.planner.step_time import Rating
from sennit.runtime.training import command as training
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.planned import (
    LOSSLESS,
    check_ranks,
    cluster_of,
    limits_here,
    problem_of,
    source_of,
    uses_of,
)
from sennit.transport.config import from_environment
from sennit.transport.errors import ConfigError, SennitError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: sennit shard --data synthetic --ranks 4 --output plan.toml; "
    "then sennit train --data synthetic --ranks 4 --sharding plan.toml. "
    "Or: sennit shard diff old.toml new.toml. All options of sennit train describe the model",
)
def shard(
    context: typer.Context,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a described cluster (TOML); default: this machine")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="write the placement, for --sharding FILE", callback=writable_file),
    ] = None,
) -> None:
    """Plan which rank has which rows. Print the placement, its predicted step, memory, and what others would cost."""
    if context.args[:1] == ["diff"]:
        _diff(context.args[1:])
        return

    def plan(config: TrainingConfig, ranks: int | None) -> None:
        _plan(config, ranks, cluster, output)

    training.main(context.args, use=plan, name="sennit shard")


def _plan(config: TrainingConfig, ranks: int | None, described: Path | None, output: Path | None) -> None:
    if config.ingest is not None:
        raise ConfigError("sennit shard with --ingest; the feeders have the data: give it data, or plan with auto")
    if output is not None and output.suffix != ".toml":
        raise ConfigError(f"--output {output}; allowed: a name that ends in .toml")
    if config.json_path is not None:
        check_writable(config.json_path, "--json")
    where = _cluster(config, ranks, described)
    with busy("searching for a placement"):
        source = source_of(config, where.ranks)
        constants, notes = read_constants(from_environment().calibration)
        if config.exchange == LOSSLESS:
            notes.append(f"--exchange {LOSSLESS}: what it saves depends on the data; planned as without a codec")
        problem = problem_of(config, source, where, constants)
        rating = Rating(problem)
        searched = search(rating)
        split = splits(rating, lambda tables: uses_of(config, source, tables))
    sharding = config.sharding
    if not sharding.is_planned and (sharding.shards is not None or sharding.tables):
        # A plan that somebody edited, or names by table.
        placement = sharding.placement(problem.tables, where.ranks, local_ranks=where.local_ranks)
        given = of_placement(rating, sharding.source, placement)
        searched = Searched(best=searched.best, others=[given, *searched.others], is_proven=searched.is_proven)
    report.render(rating, searched, split, notes, stdout_console())
    best = searched.best
    if output is not None:
        plan_file.write(output, problem.tables, where, best.shards(rating), best.seconds)
        typer.echo(f"written to {output}; use it: sennit train --sharding {output}")
    if config.json_path is not None:
        write_json(config.json_path, report.as_json(rating, searched, split, notes))


def _cluster(config: TrainingConfig, ranks: int | None, described: Path | None) -> Cluster:
    if described is not None:
        found = read_cluster(described)
        check_ranks(ranks, found.ranks, described)
        return found
    count = ranks or 1
    return cluster_of(config, count, count, limits_here(config, count))


def _diff(arguments: list[str]) -> None:
    """Prints what differs, and ends with status 1 if anything does, as diff does."""
    try:
        if len(arguments) != 2:
            raise ConfigError(f"sennit shard diff with {len(arguments)} files; allowed: two")
        lines = plan_file.differences(*(plan_file.read(Path(one)) for one in arguments))
    except SennitError as error:
        fail(error)
    for line in lines:
        typer.echo(line)
    if lines:
        raise typer.Exit(1)


def main(arguments: list[str]) -> None:
    """The command line."""
    app(args=arguments, prog_name="sennit shard")
