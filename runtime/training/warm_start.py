# SPDX-License-Identifier: Apache-2.0
"""Begins a run with what another one has learnt, on other data (`--warm-start`), as of the next day.

Weights of the model, rows of the tables and the states of their optimizers are taken over. Means, deviations and
vocabularies stay those of the checkpoint, and a vocabulary gets the values that are new (`Preprocessing.fit`). So rows
of a table move: each goes where its value is now. Rows of new values begin as in a new run. Position, order of samples
and learning rates are those of a new run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.checkpoint.folder import named
from sennit.runtime.checkpoint.manifest import CheckpointError, differences
from sennit.runtime.checkpoint.reading import OpenedCheckpoint
from sennit.runtime.data.preprocessing import Encoding, Preprocessing
from sennit.runtime.sharded.tables import Range, Table
from sennit.runtime.training.trainer import DENSE, OPTIMIZER, TABLES, Trainer
from sennit.transport.errors import ConfigError

_MAY_DIFFER: Final = ("rows", "row_shards", "optimizer")
"""Settings of a table that may be others than in the checkpoint."""


def begin(trainer: Trainer, folder: Path, fixed: Mapping[str, Any]) -> list[str]:
    """Fills a new trainer from a checkpoint, or from the newest one in `folder`. Collective.

    `fixed`: what a checkpoint of this run says of its model. Returns lines for people about what begins anew. Raises
    `ConfigError` on all ranks if the checkpoint is of another model, and `CheckpointError` if it cannot be used.
    """
    opened = OpenedCheckpoint(named(folder))
    _check_equal(trainer, opened)
    theirs = opened.about.fixed.get("model", {})
    lines = differences(_kept(theirs), _kept(fixed))
    if lines:
        raise ConfigError(f"--warm-start {opened.path} is of another model:\n  " + "\n  ".join(lines))
    goes_on = {
        name for name, table in theirs["tables"].items() if table["optimizer"] == fixed["tables"][name]["optimizer"]
    }
    for name, table in fixed["tables"].items():
        for what in ("rows", "row_shards") if "ids" in table else ():
            if table[what] != theirs["tables"][name][what]:
                raise ConfigError(
                    f"--warm-start {opened.path}: table {name} has {what} {theirs['tables'][name][what]} there, and "
                    f"{table[what]} here; allowed: the same for dynamic ids"
                )
    return _WarmStart(trainer, opened, theirs["tables"], goes_on).begin()


def _kept(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """What a model must have as in the checkpoint, of what manifests say of it."""
    tables = {
        name: {key: value for key, value in table.items() if key not in _MAY_DIFFER}
        for name, table in fixed.get("tables", {}).items()
    }
    return {key: value for key, value in fixed.items() if key != "warm_start"} | {"tables": tables}


def _check_equal(trainer: Trainer, opened: OpenedCheckpoint) -> None:
    """Raises unless all ranks have found the same checkpoint."""
    every: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(every, opened.about.sha256)
    if every.count(every[0]) < len(every):
        rank = next(rank for rank, one in enumerate(every) if one != every[0])
        raise ConfigError(f"--warm-start: rank {rank} finds another checkpoint than rank 0; name one step")


class _WarmStart:
    """What fills one trainer."""

    def __init__(
        self, trainer: Trainer, opened: OpenedCheckpoint, theirs: Mapping[str, Mapping[str, Any]], goes_on: set[str]
    ) -> None:
        """`theirs`: the tables as the checkpoint's manifest describes them. `goes_on`: those whose states it has."""
        known, ours = Preprocessing.read(opened.path), trainer.source.preprocessing
        if known is None or ours is None:
            raise CheckpointError(f"{opened.path} has no preprocessing.json")
        self._trainer, self._opened, self._theirs, self._goes_on = trainer, opened, theirs, goes_on
        self._encodings = {
            before.name: (before, now) for before, now in zip(known.encodings, ours.encodings, strict=True)
        }
        self._state = trainer.whole_state()
        self._lines = [
            f"optimizer states of table {table.name} begin anew: the checkpoint has those of another optimizer"
            for table in trainer.tables.tables
            if table.name not in goes_on
        ]

    def begin(self) -> list[str]:
        about = self._opened.about
        for table in self._trainer.tables.tables:
            self._fill(table, self._encodings[table.name])
        self._read_steps()
        self._read_dense()
        self._trainer.restore(self._state)
        return [f"begins with the weights of run {about.run_id} after step {about.step}", *self._lines]

    def _fill(self, table: Table, encodings: tuple[Encoding, Encoding]) -> None:
        """Fills the shards of a table that this rank has. All ranks read their parts of it at the same time."""
        before, now = encodings
        theirs = self._theirs[table.name]
        prefix = f"{TABLES}{table.name}/"
        held = {name.removeprefix(prefix): value for name, value in self._state.items() if name.startswith(prefix)}
        if table.ids is not None:
            grown = now.vocabulary is not None and before.places_in(now).tolist() != list(range(before.row_count))
            if before.salt != now.salt or grown:
                raise ConfigError(
                    f"--warm-start: table {table.name} has dynamic ids, and the data give others than before; allowed: "
                    "ids or hashes, and no dictionary that has changed"
                )
            self._read(table, prefix, held)
            return
        if before.row_count != theirs["rows"] or now.row_count != table.rows:
            raise CheckpointError(f"{self._opened.path}: its table {table.name} has not the rows of its vocabulary")
        if table.train_rank is not None:
            if table.rows != before.row_count:
                raise ConfigError(
                    f"--warm-start: table {table.name} is a tensor train of {before.row_count} rows, and would have "
                    f"{table.rows}; allowed: ordinary tables for values that come and go"
                )
            self._read(table, prefix, held)
            return
        old = replace(table, rows=before.row_count, row_shards=theirs["row_shards"])
        places = torch.from_numpy(before.places_in(now))
        parts: dict[str, Tensor] = {}
        moves: list[tuple[Tensor, Range, str, Range]] = []
        for name, tensor in held.items():
            shard, _, what = name.partition(".")
            column, _, what = what.partition(".")
            for row in range(old.row_shards):
                key, rows = f"{prefix}{row}.{column}.{what}", old.row_range(row)
                if not rows.size or not self._has(table, key):
                    continue
                about = self._opened.tensors[key]
                parts.setdefault(key, torch.empty(about.size, dtype=about.properties.dtype))
                moves.append((tensor, table.row_range(int(shard)), key, rows))
        self._opened.read(parts)
        for tensor, span, key, rows in moves:
            moved = places[rows.low : rows.high]
            is_here = (moved >= span.low) & (moved < span.high)
            index = (moved[is_here] - span.low).to(tensor.device)
            tensor.index_copy_(0, index, parts[key][is_here].to(tensor.device))

    def _read(self, table: Table, prefix: str, held: Mapping[str, Tensor]) -> None:
        """Reads what this rank has of a table as it is."""
        self._opened.read({prefix + name: value for name, value in held.items() if self._has(table, prefix + name)})

    def _has(self, table: Table, key: str) -> bool:
        """Whether a tensor of the table is taken over. Weights must be."""
        return key.endswith((".weight", ".ids", ".candidates", ".sketch")) or table.name in self._goes_on

    def _read_steps(self) -> None:
        """The updates that tables have behind them: Adam's correction of its moments goes on."""
        steps = self._state[f"{TABLES}steps"]
        names = list(self._theirs)
        before = torch.empty(len(names), dtype=torch.int64)
        self._opened.read({f"{TABLES}steps": before})
        for number, table in enumerate(self._trainer.tables.tables):
            if table.name in self._goes_on:
                steps[number] = before[names.index(table.name)]

    def _read_dense(self) -> None:
        config, about = self._trainer.config, self._opened.about
        wanted = {name: value for name, value in self._state.items() if name.startswith(DENSE)}
        if about.fixed.get("optimizer", {}).get("dense_optimizer") == config.dense_optimizer:
            # Settings of the optimizer are those of this run.
            prefix = f"{OPTIMIZER}state."
            wanted |= {name: value for name, value in self._state.items() if name.startswith(prefix)}
        else:
            self._lines.append("states of the dense optimizer begin anew: the checkpoint has those of another one")
        for name, value in wanted.items():
            found = self._opened.tensors.get(name)
            if isinstance(value, Tensor) and (found is None or found.size != value.shape):
                shape = "none" if found is None else tuple(found.size)
                raise ConfigError(
                    f"--warm-start {self._opened.path}: {name} is {tuple(value.shape)} here, {shape} in the "
                    "checkpoint; allowed: the same model"
                )
        self._opened.read(wanted)
        self._state |= wanted
