# SPDX-License-Identifier: Apache-2.0
"""`sennit train`, and the same under torchrun: `torchrun … -m sennit.runtime.training --data flights`.

Without torchrun it starts its ranks itself. Under torchrun (RANK and WORLD_SIZE are set) it is one of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sennit.command_line import fail
from sennit.offload.ingest.target import IngestTarget
from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.data import sources
from sennit.runtime.data.packages import require
from sennit.runtime.data.sources import Source
from sennit.runtime.ingest.address import Address
from sennit.runtime.model.factory import MODELS, check_name, find
from sennit.runtime.model.settings import SettingsFile
from sennit.runtime.model.sharding_settings import AUTO, sharding_of
from sennit.runtime.model.tensor_train import TensorTrainRule
from sennit.runtime.sharded.files import TableStore
from sennit.runtime.sharded.placement import SHARDINGS
from sennit.runtime.timeline.left import left_paths, write_left
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.launch import Ranks, join_address, serve_store
from sennit.runtime.training.resumption import check_unused
from sennit.runtime.training.run import Place, join_run, run_rank
from sennit.runtime.training.stretch import tell_timeline
from sennit.transport.codecs import EXCHANGE_CODECS
from sennit.transport.config import from_environment
from sennit.transport.errors import ConfigError, SennitError
from sennit.transport.meeting.rails import find_rails
from sennit.transport.sizes import parse_size

_DEFAULT = TrainingConfig()
_SOURCE = _DEFAULT.source


def command(
    context: typer.Context,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(sources.NAMES)}, or Parquet files: path, pattern, folder or URL; may be repeated"
        ),
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="schema of the Parquet files (TOML or JSON)")] = None,
    ingest: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET", help="take samples from feeders: xdp://INTERFACE[,…][:PORT] or cpu://ADDRESS[:PORT]"
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="ranks to start on this machine; default: 1; not under torchrun")
    ] = None,
    device: Annotated[str, typer.Option(help="where model and tables are: cpu, or cuda")] = _DEFAULT.device,
    backend: Annotated[str, typer.Option(help="torch.distributed backend")] = _DEFAULT.backend,
    exchange: Annotated[
        str | None,
        typer.Option(metavar="CODEC", help=f"code embeddings and their gradients: {', '.join(EXCHANGE_CODECS)}"),
    ] = None,
    gradient: Annotated[
        str | None,
        typer.Option(metavar="CODEC", help="code dense gradients, with error feedback: the same but lossless"),
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of everything random")] = _DEFAULT.seed,
    epochs: Annotated[int, typer.Option(help="passes over the training samples")] = _DEFAULT.epochs,
    steps: Annotated[int | None, typer.Option(help="stop after this many steps")] = None,
    batch_size: Annotated[int, typer.Option(help="samples per step, all ranks together")] = _DEFAULT.batch_size,
    slices: Annotated[
        int, typer.Option(help="slices of a global batch: a power of two, at least as many as ranks")
    ] = _DEFAULT.slices,
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}, or package.module:factory")] = _DEFAULT.model,
    dim: Annotated[int, typer.Option(help="embedding dimension")] = _DEFAULT.embedding_dim,
    tables: Annotated[Path | None, typer.Option(metavar="FILE", help="settings of each table (TOML)")] = None,
    row_shards: Annotated[int, typer.Option(help="row shards of each table; part of the model")] = _DEFAULT.row_shards,
    sharding: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help=f"which rank has which rows: auto (planned when the run starts), {', '.join(SHARDINGS)}, "
            "or a TOML file",
        ),
    ] = AUTO,
    use: Annotated[
        Path | None, typer.Option(metavar="FILE", help="plan with a sketch that an earlier run wrote (--sketch)")
    ] = None,
    rebalance: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="look every STEPS steps whether shards should move; same bits"),
    ] = None,
    tensor_train: Annotated[
        str | None,
        typer.Option(metavar="ROWS:RANK", help="hold tables of at least ROWS rows as tensor trains of rank RANK"),
    ] = None,
    bottom: Annotated[str, typer.Option(help="hidden widths of the bottom MLP")] = "64",
    top: Annotated[str, typer.Option(help="hidden widths of the top MLP")] = "128,64",
    sparse_rate: Annotated[float, typer.Option(help="learning rate of the embeddings")] = _DEFAULT.sparse_rate,
    dense_rate: Annotated[float, typer.Option(help="learning rate of the MLPs")] = _DEFAULT.dense_rate,
    dense_optimizer: Annotated[str, typer.Option(help="adagrad, adam or sgd")] = _DEFAULT.dense_optimizer,
    decay: Annotated[str, typer.Option(help="learning rates over the run: linear, polynomial, none")] = _DEFAULT.decay,
    warmup: Annotated[int, typer.Option(help="steps during which the learning rates rise")] = _DEFAULT.warmup,
    decay_start: Annotated[
        int | None, typer.Option(help="step at which decay starts; default: after the warm-up")
    ] = None,
    decay_steps: Annotated[int | None, typer.Option(help="steps of the decay; default: to the end")] = None,
    decay_power: Annotated[float, typer.Option(help="power of polynomial decay")] = _DEFAULT.decay_power,
    decay_floor: Annotated[
        float, typer.Option(help="share of the rates that remains after decay")
    ] = _DEFAULT.decay_floor,
    clip_value: Annotated[
        float | None, typer.Option(help="clip each element of a gradient, also of embedding rows")
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="clip the norm of the dense gradient, and of each embedding row's")
    ] = None,
    weight_decay: Annotated[float, typer.Option(help="L2 weight decay")] = _DEFAULT.weight_decay,
    table_store: Annotated[
        Path | None, typer.Option(help="folder on a disk for embedding tables larger than memory")
    ] = None,
    table_memory: Annotated[
        str | None, typer.Option(help="with --table-store: memory of each rank for rows, such as 64MiB")
    ] = None,
    table_device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="with --table-store and --device cuda: each rank's GPU memory for rows; as --table-memory",
        ),
    ] = None,
    rank_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="memory of each rank for tables; default: its share of the host's"),
    ] = None,
    split: Annotated[str, typer.Option(help="which samples are for evaluation: random, or last")] = _DEFAULT.split,
    eval_fraction: Annotated[float, typer.Option(help="share of the samples for evaluation")] = _DEFAULT.eval_fraction,
    checkpoint: Annotated[Path | None, typer.Option(help="folder for checkpoints")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="steps between checkpoints")] = None,
    keep: Annotated[int | None, typer.Option(metavar="N", help="newest checkpoints to keep; default: all")] = None,
    checkpoint_increments: Annotated[
        int, typer.Option(metavar="N", help="after a whole checkpoint, N with the changed rows alone")
    ] = _DEFAULT.checkpoint_increments,
    checkpoint_async: Annotated[
        bool, typer.Option("--checkpoint-async", help="write checkpoints while training goes on")
    ] = False,
    stop_early: Annotated[
        int | None,
        typer.Option(metavar="N", help="end after N epochs that were no better; keep the best one in DIR/best"),
    ] = None,
    best_by: Annotated[str, typer.Option(help="what is best: ne (normalised entropy) or auc")] = _DEFAULT.best_by,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the latest checkpoint")] = False,
    elastic: Annotated[bool, typer.Option("--elastic", help="go on when ranks die or join")] = False,
    port: Annotated[
        int, typer.Option(help="elastic: port where ranks can join; 0: any free port", min=0, max=65_535)
    ] = 0,
    join: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="elastic: join the run at this address, with the same options"),
    ] = None,
    min_ranks: Annotated[int, typer.Option(help="elastic: fewest ranks to go on with")] = _DEFAULT.min_ranks,
    tensorboard: Annotated[Path | None, typer.Option(help="folder for TensorBoard events")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the report to this file")] = None,
    sketch: Annotated[
        Path | None, typer.Option(help="with --ingest: write to this file how often each row was used")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="write a timeline of all ranks, for sennit timeline and ui.perfetto.dev"),
    ] = None,
    batches_ahead: Annotated[
        int, typer.Option(metavar="N", help="batches taken, and their ids sent, while one is computed: 0 to 3")
    ] = _DEFAULT.batches_ahead,
    overlap: Annotated[
        str, typer.Option(metavar="WHAT", help="what travels while a batch is computed: auto, ids or tables (all)")
    ] = _DEFAULT.overlap,
    timeout: Annotated[float, typer.Option(help="deadline of a collective, seconds")] = _DEFAULT.timeout_s,
    samples: Annotated[int, typer.Option(help="synthetic: number of samples")] = _SOURCE.samples,
    row_limit: Annotated[int, typer.Option(help="synthetic: rows of the largest tables")] = _SOURCE.row_limit,
    zipf: Annotated[float, typer.Option(help="synthetic: skew of the rows")] = _SOURCE.zipf_exponent,
) -> None:
    """Train a recommendation model. Report its quality, speed, time by phase and hash of the weights."""
    first, *further = data or [_SOURCE.data]
    try:
        config = TrainingConfig(
            source=Source(
                data=first,
                further=tuple(further),
                schema=schema,
                samples=samples,
                row_limit=row_limit,
                zipf_exponent=zipf,
            ),
            ingest=None if ingest is None else _ingest_target(context, ingest),
            split=split,
            eval_fraction=eval_fraction,
            seed=seed,
            epochs=epochs,
            max_steps=steps,
            batch_size=batch_size,
            slices=slices,
            model=model,
            embedding_dim=dim,
            row_shards=row_shards,
            tables=None if tables is None else SettingsFile.read(tables),
            sharding=sharding_of(sharding),
            use=use,
            rebalance=rebalance,
            tensor_train=None if tensor_train is None else TensorTrainRule.parse(tensor_train),
            bottom=_widths("bottom", bottom),
            top=_widths("top", top),
            sparse_rate=sparse_rate,
            dense_rate=dense_rate,
            dense_optimizer=dense_optimizer,
            decay=decay,
            rank_memory_bytes=None if rank_memory is None else _size("--rank-memory", rank_memory),
            table_store=_table_store(table_store, table_memory, table_device_memory, device),
            warmup=warmup,
            decay_start=decay_start,
            decay_steps=decay_steps,
            decay_power=decay_power,
            decay_floor=decay_floor,
            clip_value=clip_value,
            clip_norm=clip_norm,
            weight_decay=weight_decay,
            device=device,
            backend=backend,
            exchange=exchange,
            gradient=gradient,
            batches_ahead=batches_ahead,
            overlap=overlap,
            timeout_s=timeout,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            keep=keep,
            checkpoint_increments=checkpoint_increments,
            checkpoint_async=checkpoint_async,
            stop_early=stop_early,
            best_by=best_by,
            resume=resume,
            elastic=elastic,
            min_ranks=min_ranks,
            tensorboard=tensorboard,
            json_path=json_path,
            sketch_path=sketch,
            timeline=timeline,
        )
        instead, forked = context.obj
        if instead is not None:
            instead(config, ranks)
            return
        start(config, ranks, port=port, join=None if join is None else Address.parse(join), forked=forked)
    except SennitError as error:
        fail(error)


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
    if config.ingest is None:
        sources.check(config.source)
    for name, folder in (
        ("--checkpoint", config.checkpoint),
        ("--table-store", config.table_store.folder if config.table_store is not None else None),
        ("--tensorboard", config.tensorboard),
        ("--json", config.json_path.absolute().parent if config.json_path is not None else None),
        ("--timeline", config.timeline.absolute().parent if config.timeline is not None else None),
        ("--sketch", config.sketch_path.absolute().parent if config.sketch_path is not None else None),
    ):
        if folder is not None:
            _make_folder(name, folder)
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
        find(config.model)
        run_rank(config, Place(rank=int(os.environ["RANK"]), world_size=world_size))
        return
    world_size = ranks if ranks is not None else 1
    if join is not None:
        join.check()
    else:
        config.check_world(world_size)
    _check_ingest(config, world_size)
    # Before what must not be in a process that is forked: CUDA, threads of the store, the user's code.
    with Ranks(world_size, forked=forked and config.device == "cpu") as here:
        find(config.model)
        if join is None:
            _begin(config, world_size, here, port)
        else:
            here.run(_join_here, config, address=join, store_timeout_s=config.timeout_s, on_loss=_tell_newcomer)


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
    return run_rank(config, Place(rank=rank, world_size=world_size, store=store)).weights_sha256


def _join_here(config: TrainingConfig, number: int, count: int, store: Store) -> Any:
    return join_run(config, number, store).weights_sha256


def _tell_newcomer(number: int, error: str) -> None:
    typer.echo(f"newcomer {number} did not come to the end: {error}", err=True)


def _tell_loss(rank: int, error: str) -> None:
    typer.echo(f"rank {rank} did not come to the end: {error}", err=True)


def _check_ingest(config: TrainingConfig, local_ranks: int) -> None:
    if config.ingest is not None:
        config.ingest.check(local_ranks)


def _ingest_target(context: typer.Context, text: str) -> IngestTarget:
    """Parses the target. The feeders have the data set then, so the options that describe one are refused."""
    for name in ("data", "schema", "samples", "row_limit", "zipf"):
        given = context.get_parameter_source(name)
        if given is not None and given.name != "DEFAULT":
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} with --ingest; the data set is the feeders': give it to sennit feed")
    return IngestTarget.parse(text)


def _table_store(folder: Path | None, memory: str | None, there: str | None, device: str) -> TableStore | None:
    if there is not None and (folder is None or device == "cpu"):
        raise ConfigError("--table-device-memory alone; allowed: with --table-store and --device cuda")
    if folder is None and memory is None:
        return None
    if folder is None or memory is None:
        given, missing = ("--table-memory", "--table-store") if folder is None else ("--table-store", "--table-memory")
        raise ConfigError(f"{given} without {missing}; allowed: both, or neither")
    return TableStore(
        folder=folder,
        memory_bytes=_size("--table-memory", memory),
        device_bytes=None if there is None else _size("--table-device-memory", there),
    )


def _size(name: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _make_folder(name: str, folder: Path) -> None:
    """Makes the folder before training, not hours later."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{name}: {error}; choose another folder") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{name}: no permission to write in {folder}; choose another folder")


def _widths(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--{name} {text!r}; allowed: widths separated by commas, like 128,64") from None


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
