# SPDX-License-Identifier: Apache-2.0
"""`sennit train`, and the same under torchrun: `torchrun … -m sennit.runtime.training --data flights`.

Without torchrun it starts its ranks itself. Under torchrun (RANK and WORLD_SIZE are set) it is one of them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sennit.command_line import check_folder, check_writable
from sennit.options import with_options
from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.data import sources
from sennit.runtime.data.packages import require
from sennit.runtime.data.source import Source
from sennit.runtime.ingest.address import Address
from sennit.runtime.model.factory import check_name, find
from sennit.runtime.model.loss import check_name as check_loss
from sennit.runtime.model.loss import find_loss
from sennit.runtime.timeline.left import left_paths, write_left
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.launch import Ranks, join_address, serve_store
from sennit.transport.config import from_environment
from sennit.transport.errors import ConfigError
from sennit.transport.meeting.rails import find_rails


@with_options
def command(
    context: typer.Context,
    *,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join((*sources.NAMES, *sources.MADE))}, package.module:function, or "
            f"files with --schema: path, pattern, folder or URL; may be repeated; default: {Source().data}"
        ),
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        typer.Option(
            help="files whose rows are for evaluation alone; may be repeated; default: --eval-fraction of the samples"
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="ranks to start on this machine; default: 1; not under torchrun")
    ] = None,
    config: TrainingConfig,
    port: Annotated[
        int, typer.Option(help="elastic: port where ranks can join; 0: any free port", min=0, max=65_535)
    ] = 0,
    join: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="elastic: join the run at this address, with the same options"),
    ] = None,
) -> None:
    """Train a recommendation model. Report its quality, speed, time by phase and hash of the weights."""
    store = config.table_store
    if store is not None and store.device_bytes is not None and config.device == "cpu":
        raise ConfigError("--table-device-memory alone; allowed: with --table-store and --device cuda")
    if config.ingest is not None:
        _check_no_data(context)
    if data:
        config = replace(config, source=replace(config.source, data=data[0], further=tuple(data[1:])))
    if eval_data:
        config = replace(config, source=replace(config.source, evaluation=tuple(eval_data)))
    instead, forked = context.obj
    if instead is not None:
        instead(config, ranks)
        return
    start(config, ranks, port=port, join=None if join is None else Address.parse(join), forked=forked)


def start(
    config: TrainingConfig, ranks: int | None, *, port: int = 0, join: Address | None = None, forked: bool = False
) -> None:
    """Runs this process's rank under torchrun, else starts the ranks. Checks early what can be checked.

    `forked`: the ranks may be forks of this process.
    """
    if (join is not None or port) and not config.elastic:
        raise ConfigError("--port or --join without --elastic; allowed: with it")
    if config.use is not None and not config.sharding.is_planned:
        raise ConfigError("--use with a placement that is given; allowed: with --sharding auto, the default")
    check_name(config.model)
    check_loss(config.loss)
    # As late as here, so that --help and a mistyped option need not load them.
    from sennit.runtime.checkpoint.folder import named
    from sennit.runtime.training.resumption import check_unused
    from sennit.runtime.training.run import Place, run_rank
    from sennit.runtime.training.streamed import check
    from sennit.runtime.training.supply import resumed

    if config.ingest is None:
        check(config)
    for name, folder in (
        ("--checkpoint", config.checkpoint),
        ("--table-store", config.table_store.folder if config.table_store is not None else None),
        ("--tensorboard", config.tensorboard),
    ):
        if folder is not None:
            check_folder(folder, name)
    for name, file in (
        ("--json", config.json_path),
        ("--timeline", config.timeline),
        ("--sketch", config.sketch_path),
    ):
        if file is not None:
            check_writable(file, name)
    if config.warm_start is not None and resumed(config) is None:
        # All ranks of this machine then take the same one.
        config = replace(config, warm_start=named(config.warm_start))
    if config.checkpoint is not None and not config.resume and join is None:
        check_unused(config.checkpoint)
    if config.tensorboard is not None:
        require("torch.utils.tensorboard", package="tensorboard", purpose="--tensorboard")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if join is not None or port:
            raise ConfigError(
                "--port or --join under torchrun; allowed: without torchrun, which ends all ranks when one dies"
            )
        world_size = int(os.environ["WORLD_SIZE"])
        if ranks is not None and ranks != world_size:
            raise ConfigError(f"--ranks {ranks}, but torchrun started {world_size}; leave it out under torchrun")
        config.check_world(world_size)
        _check_ingest(config, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        _find_code(config)
        rank = int(os.environ["RANK"])
        with _telling_interrupt(config, here=rank == 0):
            run_rank(config, Place(rank=rank, world_size=world_size))
        return
    world_size = ranks if ranks is not None else 1
    if join is not None:
        join.check()
    else:
        config.check_world(world_size)
    _check_ingest(config, world_size)
    # Before what must not be in a process that is forked: CUDA, threads of the store, the user's code.
    with Ranks(world_size, forked=forked and config.device == "cpu") as here:
        _find_code(config)
        if join is None:
            with _telling_interrupt(config):
                _begin(config, world_size, here, port)
        else:
            here.run(_join_here, config, address=join, store_timeout_s=config.timeout_s, on_loss=_tell_newcomer)


@contextlib.contextmanager
def _telling_interrupt(config: TrainingConfig, *, here: bool = True) -> Iterator[None]:
    """Says what an interrupted run has kept."""
    try:
        yield
    except KeyboardInterrupt:
        if here:
            from sennit.runtime.training.resumption import what_is_kept

            typer.echo(f"interrupted; {what_is_kept(config)}", err=True)
        raise


def _find_code(config: TrainingConfig) -> None:
    """Imports what is the user's, so that its errors come once, and not from each rank."""
    find(config.model)
    find_loss(config.loss)
    if config.ingest is None:
        sources.check_code(config.source)


def _begin(config: TrainingConfig, world_size: int, here: Ranks, port: int) -> None:
    """Serves the store, and runs the ranks."""
    # Kept open until the last rank is done.
    store, address = serve_store(port, timeout_s=config.timeout_s)
    if config.elastic:
        reachable = join_address(address, find_rails(from_environment().interfaces))
        if reachable is None:
            typer.echo(
                "no interface that the transport uses has an address that other machines reach: "
                f"ranks of this machine can join with --join {address}"
            )
        else:
            typer.echo(f"ranks can join with --join {reachable}")
    source = "samples of feeders" if config.ingest is not None else config.source.data
    typer.echo(f"{config.model} on {source}: starting {world_size} rank{'s' if world_size > 1 else ''}")
    try:
        here.run(
            _run_here,
            config,
            address=address,
            store_timeout_s=config.timeout_s,
            on_loss=_tell_loss if config.elastic else None,
        )
    finally:
        if config.timeline is not None:
            _write_left(config.timeline)
    del store


def _write_left(timeline: Path) -> None:
    """Writes what the ranks, which have ended, have left of timelines: run.json.gz, run.2.json.gz, …"""
    from sennit.runtime.training.stretch import tell_timeline

    folder, name = timeline.absolute().parent, timeline.name.partition(".")[0]
    for path in sorted(left_paths()):
        if path.parent == folder and path.name.partition(".")[0] == name:
            try:
                left = write_left(path)
            except OSError as error:
                typer.echo(f"no timeline in {path}: {error.strerror}", err=True)
            else:
                if left is not None:
                    tell_timeline(str(left), left.path)


def _run_here(config: TrainingConfig, rank: int, world_size: int, store: Store) -> Any:
    from sennit.runtime.training.run import Place, run_rank

    return run_rank(config, Place(rank=rank, world_size=world_size, store=store)).weights_sha256


def _join_here(config: TrainingConfig, number: int, count: int, store: Store) -> Any:
    from sennit.runtime.training.run import join_run

    return join_run(config, number, store).weights_sha256


def _tell_newcomer(number: int, error: str) -> None:
    typer.echo(f"newcomer {number} did not come to the end: {error}", err=True)


def _tell_loss(rank: int, error: str) -> None:
    # Groups that were made since have other numbers.
    typer.echo(f"the process that began as rank {rank} did not come to the end: {error}", err=True)


def _check_ingest(config: TrainingConfig, local_ranks: int) -> None:
    if config.ingest is not None:
        config.ingest.check(local_ranks)


def _check_no_data(context: typer.Context) -> None:
    """The feeders have the data set. Raises ConfigError for options that describe one."""
    names = [*(field.name for field in fields(Source)), "eval_data"]
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "")
        if option.name in names and given is not None and given.name != "DEFAULT":
            raise ConfigError(f"{option.opts[0]} with --ingest; the data set is the feeders': give it to sennit feed")


def main(
    arguments: Sequence[str] | None = None,
    *,
    use: Callable[[TrainingConfig, int | None], None] | None = None,
    name: str = "sennit train",
    forked: bool = False,
) -> None:
    """The command line of `python -m sennit.runtime.training`.

    `use`: called in place of `start`. `forked`: the ranks may be forks of this process, which does nothing else.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(epilog="Example: sennit train --data flights --ranks 2")(command)
    app(args=list(sys.argv[1:] if arguments is None else arguments), prog_name=name, obj=(use, forked))
