# SPDX-License-Identifier: Apache-2.0
"""`sennit roofline`: the least time of a step, by phase. The model is a file, or the options of `sennit train`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import torch
import torch.nn.functional as F
import typer
from torch.utils.flop_counter import FlopCounterMode

from sennit.command_line import busy, fail, stdout_console, writable_file, write_json
from sennit.runtime.model.factory import build
from sennit.runtime.model.inputs import ModelInputs
from sennit.runtime.planner import roofline, roofline_report
from sennit.runtime.planner.constants import cores_here, read_constants
from sennit.runtime.planner.roofline import FLOAT_BYTES, Machines, Tables, Workload
from sennit.runtime.planner.roofline_files import (
    CODED_BYTES,
    STATE_BYTES,
    caches_here,
    read_machines,
    read_model,
    read_rate,
    this_machine,
)
from sennit.runtime.sharded.tables import Shard, shard_bytes
from sennit.runtime.training import command as training
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.planned import (
    TABLE_WISE,
    check_ranks,
    limits_here,
    model_inputs,
    placement_here,
    source_of,
    uses_of,
)
from sennit.transport.codecs import EXCHANGE_CODECS
from sennit.transport.config import from_environment
from sennit.transport.errors import ConfigError, SennitError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

# Enough that products of matrices are those of a batch.
COUNTED_SAMPLES: Final = 2


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: sennit roofline --data flights --ranks 2 --measured report.json; or, with files of examples/: "
    "sennit roofline --model-file neo-a.toml --cluster zionex.toml. Without --model-file all options of sennit train "
    "describe the model",
)
def bound(
    context: typer.Context,
    model_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a described model (TOML), in place of options")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a described cluster (TOML); default: this machine, calibrated")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(metavar="FILE", help="report of sennit train --json, to set beside the bound")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write all of it to this file", callback=writable_file)
    ] = None,
) -> None:
    """Print the least time of each phase of a step, what binds it, and the memory of a rank."""
    try:
        if model_file is not None:
            if context.args:
                raise ConfigError(f"{context.args[0]} with --model-file, which has the model; allowed: one of them")
            if cluster is None:
                raise ConfigError("--model-file without --cluster; allowed: both (sennit train's options run here)")
            _report(read_model(model_file).work, read_machines(cluster), measured, json_path, [])
            return
    except SennitError as error:
        fail(error)

    def use(config: TrainingConfig, ranks: int | None) -> None:
        with busy("measuring this machine, and counting the work of a step"):
            machines, notes = _machines(config, ranks, cluster)
            if cluster is not None and config.sharding.is_planned:
                # Kernels there are not those here.
                config = replace(config, sharding=TABLE_WISE)
            work = _workload(config, machines.ranks)
        _report(work, machines, measured, json_path, notes)

    training.main(context.args, use=use, name="sennit roofline")


def _report(
    work: Workload, machines: Machines, measured: Path | None, json_path: Path | None, notes: list[str]
) -> None:
    bounds = roofline.bounds_of(work, machines)
    run = None if measured is None else roofline_report.read_report(measured, work, machines.ranks)
    roofline_report.render(work, machines, bounds, run, notes, stdout_console())
    if json_path is not None:
        write_json(json_path, roofline_report.as_json(work, machines, bounds, run, notes))


def _machines(config: TrainingConfig, ranks: int | None, described: Path | None) -> tuple[Machines, list[str]]:
    if described is not None:
        found = read_machines(described)
        check_ranks(ranks, found.ranks, described)
        return found, []
    if config.device != "cpu":
        raise ConfigError(f"--device {config.device} without --cluster; a calibration is of cpu kernels")
    count = ranks or 1
    constants, notes = read_constants(from_environment().calibration)
    store = config.table_store
    return this_machine(
        constants,
        ranks=count,
        cores=cores_here(),
        memory_bytes=limits_here(config, count)[0] if store is None else store.memory_bytes,
        cache_bytes=caches_here() / count,
        read_bytes_per_s=read_rate(),
        file_bytes=0.0 if store is None else 1e18,
    ), notes


def _workload(config: TrainingConfig, ranks: int) -> Workload:
    """The model of the options, with the rows of its data."""
    if config.ingest is not None:
        raise ConfigError("sennit roofline with --ingest; the feeders have the data: allowed: --data")
    for name, codec in (("exchange", config.exchange), ("gradient", config.gradient)):
        if codec is not None and EXCHANGE_CODECS[codec] not in CODED_BYTES:
            raise ConfigError(f"--{name} {codec}, whose size depends on the data; allowed: another codec, or none")
    source = source_of(config, ranks)
    tables = config.tables_of(source.tables)
    placement = placement_here(config, source, ranks)
    found = []
    for number, (table, use) in enumerate(zip(tables, uses_of(config, source, tables), strict=True)):
        shards = [
            Shard(number, row, column) for row in range(table.row_shards) for column in range(table.column_shards)
        ]
        owners = {(shard.row, placement.owner_of[shard]) for shard in shards if number not in placement.replicated}
        is_by_rows = len({owner for _, owner in owners}) > 1 and len({row for row, _ in owners}) > 1
        size = sum(shard_bytes(tables, shard) for shard in shards)
        # The cores of a tensor train are few, and come from a cache.
        row_bytes = 0.0 if table.train_rank is not None else float(table.dim * table.precision.dtype.itemsize)
        found.append(
            Tables(
                name=table.name,
                rows=table.rows,
                dim=table.dim,
                length=use.mean_length,
                row_bytes=row_bytes,
                state_bytes=max(0.0, size / table.rows - row_bytes),
                spread="replicated" if number in placement.replicated else "row" if is_by_rows else "table",
                use=use,
            )
        )
    flops, weights = _dense(config.model, model_inputs(config, source, tables))
    return Workload(
        name=f"{config.model} on {config.source.data}",
        tables=found,
        batch=config.batch_size,
        dense_flops=flops,
        dense_numbers=weights,
        dense_state_bytes=STATE_BYTES[config.dense_optimizer],
        exchange_bytes=_coded(config.exchange),
        gradient_bytes=_coded(config.gradient),
    )


def _coded(codec: str | None) -> float:
    return FLOAT_BYTES if codec is None else CODED_BYTES[EXCHANGE_CODECS[codec]]


def _dense(name: str, inputs: ModelInputs) -> tuple[float, float]:
    """Floating-point operations of a sample's forward and backward pass, as torch counts them, and trained weights."""
    with torch.random.fork_rng(devices=[]):
        model = build(name, inputs)
        dense, labels = torch.zeros(COUNTED_SAMPLES, inputs.dense_count), torch.zeros(COUNTED_SAMPLES)
        vectors = {table.name: torch.zeros(COUNTED_SAMPLES, table.dim, requires_grad=True) for table in inputs.tables}
        with FlopCounterMode(display=False) as counter:
            F.binary_cross_entropy_with_logits(model(dense, vectors), labels).backward()  # type: ignore[no-untyped-call]
    weights = sum(one.numel() for one in model.parameters() if one.requires_grad)
    return counter.get_total_flops() / COUNTED_SAMPLES, float(weights)


def main(arguments: list[str]) -> None:
    """The command line."""
    app(args=arguments, prog_name="sennit roofline")
