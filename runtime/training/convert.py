# SPDX-License-Identifier: Apache-2.0
"""Makes a checkpoint for other slices of the global batch, other row shards of the tables, or other ids of theirs.

All belong to the model and decide bits. None changes what it computes: all weights and optimizer states are kept, and
only the order of sums differs from then on. Ids that had no row of their own may get one afterwards, or none.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.known_names import few, hint
from sennit.runtime.backend.torch_versions import HashStore
from sennit.runtime.checkpoint import folder as checkpoint
from sennit.runtime.checkpoint.manifest import CheckpointError, Manifest, code_versions, new_run_id
from sennit.runtime.checkpoint.reading import OpenedCheckpoint
from sennit.runtime.checkpoint.writing import save
from sennit.runtime.data import preprocessing
from sennit.runtime.model.settings import SettingsFile
from sennit.runtime.sharded.slices import Slices
from sennit.runtime.sharded.tables import DynamicIds, Table
from sennit.runtime.training import convert_ids
from sennit.runtime.training.resumption import check_unused
from sennit.runtime.training.trainer import TABLES
from sennit.transport.errors import ConfigError

_SHARD: Final = re.compile(r"(?P<table>.+)/(?P<row>\d+)\.(?P<column>\d+)\.(?P<name>\w+)")
"""A tensor of a shard. Those of tensor trains have another form: they have no row shards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """What `convert` has made."""

    source: Path
    """The checkpoint that was read."""

    output: Path
    """The checkpoint that was written."""

    changes: tuple[str, ...]
    """What is new, a line each."""


def convert(
    folder: Path,
    output: Path,
    *,
    slices: int | None = None,
    row_shards: int | Mapping[str, int] | None = None,
    dynamic: Mapping[str, tuple[int, DynamicIds]] | None = None,
    fixed: Sequence[str] = (),
) -> Converted:
    """Writes the checkpoint in `folder` as the first one of a new run, in the folder `output`.

    `folder`: a checkpoint, or a folder of checkpoints, of which the newest is taken. `slices`: V of a run of
    `sennit train`. Other programs have no V in their checkpoints: they give modules another one. `row_shards`: of all
    tables but tensor trains, or by the names of tables. None leaves what is there. `dynamic`: tables with a vocabulary
    or row numbers that get dynamic ids, with their most rows and their rules. `fixed`: dynamic tables that get a
    vocabulary of the ids that have rows.

    Weights, optimizer states and the position in the data are kept, so the model computes what it did but for rounding.
    Bits of further training differ from those of the old run, which is why the run gets a new id. Needs memory for all
    tables with their states. For one process without a group of ranks.

    Raises `ConfigError` for what cannot be, also where `output` has checkpoints already, and `CheckpointError`.
    """
    if row_shards == {}:
        row_shards = None
    if slices is None and row_shards is None and not dynamic and not fixed:
        raise ConfigError("nothing to convert; allowed: other slices, other row shards, or other ids")
    if dist.is_initialized():
        raise ConfigError("convert in a group of ranks; allowed: a process without a group")
    source = checkpoint.named(folder)
    if output.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{output} is in the checkpoint that is read; allowed: another folder")
    check_unused(output)
    opened = OpenedCheckpoint(source, alone=True)
    changes: list[str] = []
    about = _fresh(opened.about)
    if slices is not None:
        changes.append(_set_slices(about.fixed, slices, source))
    state = opened.everything()
    if row_shards is not None:
        counts = _wanted(row_shards, state, source)
        changes += _set_row_shards(about, counts)
        state = _recut(state, {table: rows for table, (_, rows) in counts.items()}, source)
    path = source / preprocessing.NAME
    documents = {path.name: path.read_text(encoding="utf-8")} if path.name in opened.about.files else {}
    if dynamic or fixed:
        known = preprocessing.Preprocessing.read(source)
        known, lines = _with_other_ids(state, about, known, dynamic or {}, fixed, source)
        changes += lines
        if known is not None:
            documents[path.name] = known.text()
    with _alone():
        written = save(output, about, state, documents=documents)
    return Converted(source=source, output=written, changes=tuple(changes))


def dynamic_of(names: Sequence[str], file: Path | None) -> dict[str, tuple[int, DynamicIds]]:
    """The rows and rules of tables that get dynamic ids, from the file of `--tables`. Raises `ConfigError`."""
    if names and file is None:
        raise ConfigError(f"--dynamic {names[0]} without --tables; allowed: with the file that says its rows and rules")
    settings = None if file is None else SettingsFile.read(file)
    found = {}
    for name in names:
        assert settings is not None
        rules, rows = settings.option(name, "ids"), settings.option(name, "rows")
        if rules is None or rows is None:
            missing = 'ids = "dynamic"' if rules is None else "rows"
            raise ConfigError(f"{file}: table {name} without {missing}; allowed: both for --dynamic")
        found[name] = (rows, rules)
    return found


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Inside, this process is a group of one rank, as savers want it."""
    dist.init_process_group("sennit", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _fresh(about: Manifest) -> Manifest:
    """The manifest of a new run, which is copied and may be changed."""
    free = {**copy.deepcopy(dict(about.free)), "converted_from": about.run_id}
    return replace(
        about, run_id=new_run_id(), fixed=copy.deepcopy(dict(about.fixed)), free=free, code=code_versions(),
        after=(), files={}, tensors={},
    )  # fmt: skip


def _set_slices(fixed: Mapping[str, Any], slices: int, source: Path) -> str:
    Slices(count=slices, rank=0, world_size=1)
    order = fixed.get("order", {})
    if "slices" not in order:
        raise ConfigError(f"{source} is not of sennit train, and names no slices; allowed: another V for its modules")
    if slices > order["batch_size"]:
        raise ConfigError(f"{slices} slices; allowed: at most {order['batch_size']}, the batch size")
    before, order["slices"] = order["slices"], slices
    return f"slices: {before} before, {slices} now"


def _wanted(row_shards: int | Mapping[str, int], state: Mapping[str, Any], source: Path) -> dict[str, tuple[int, int]]:
    """The row shards of each table before and now, by the table's name in the state."""
    before: dict[str, int] = {}
    for key in state:
        # A hash of dynamic ids says their row shards, and rows would have to be given anew.
        if (shard := _SHARD.fullmatch(key)) and f"{shard['table']}/0.0.ids" not in state:
            before[shard["table"]] = max(before.get(shard["table"], 0), int(shard["row"]) + 1)
    if not before:
        raise ConfigError(f"{source}: no table with row shards")
    asked = (
        list(row_shards.items()) if isinstance(row_shards, Mapping) else [(_shown(key), row_shards) for key in before]
    )
    for table, now in asked:
        if not isinstance(now, int):
            raise ConfigError(f"row shards {now!r} of table {table}; allowed: a whole number")
        Table(name=table, rows=1, dim=1, row_shards=now)  # refuses a number out of range
    if not isinstance(row_shards, Mapping):
        return {key: (count, row_shards) for key, count in before.items()}
    found: dict[str, tuple[int, int]] = {}
    for table, now in row_shards.items():
        # A program may have its tables below other names.
        keys = [key for key in before if _shown(key) == table] or [key for key in before if key.endswith(f".{table}")]
        if len(keys) != 1:
            known = [_shown(key) for key in before]
            raise ConfigError(f"row shards of table {table}; allowed: {few(known)}{hint(table, known)}")
        found[keys[0]] = before[keys[0]], now
    return found


def _with_other_ids(
    state: dict[str, Any],
    about: Manifest,
    known: preprocessing.Preprocessing | None,
    dynamic: Mapping[str, tuple[int, DynamicIds]],
    fixed: Sequence[str],
    source: Path,
) -> tuple[preprocessing.Preprocessing | None, list[str]]:
    """Changes the ids of tables. Returns the preprocessing that goes with them, and what has changed, in words."""
    keys = {match["table"] for key in state if (match := _SHARD.fullmatch(key))}
    lines = []
    for table in (*dynamic, *fixed):
        found = [key for key in keys if _shown(key) == table] or [key for key in keys if key.endswith(f".{table}")]
        if len(found) != 1:
            names = sorted(map(_shown, keys))
            raise ConfigError(f"{source}: ids of table {table}; allowed: {few(names)}{hint(table, names)}")
        encoding = next((one for one in known.encodings if one.name == table), None) if known is not None else None
        if table in dynamic:
            rows, rules = dynamic[table]
            steps = _steps_of(table, found[0], state, about)
            lines.append(convert_ids.to_dynamic(state, found[0], table, encoding, rows, rules, steps))
            convert_ids.described(about, table, rows, rules)
            id_type = "int64" if encoding is None else convert_ids.id_type_of(encoding)
            changed = preprocessing.Encoding(name=table, row_count=rows, is_dynamic=True, id_type=id_type)
        else:
            if known is None:
                raise ConfigError(f"{source} has no {preprocessing.NAME} for a vocabulary; allowed: of sennit train")
            told, changed = convert_ids.to_fixed(state, found[0], table, encoding)
            lines.append(told)
            convert_ids.described(about, table, changed.row_count, None)
        known = None if known is None else convert_ids.with_encoding(known, changed)
    return known, lines


def _steps_of(table: str, key: str, state: Mapping[str, Any], about: Manifest) -> int:
    """How many steps a table has taken. The most of any, if the manifest does not name the tables of a module."""
    steps = state[f"{key.removesuffix(table)}steps"].tolist()
    names = list(about.fixed.get("model", {}).get("tables", {}))
    return int(steps[names.index(table)] if table in names and len(names) == len(steps) else max(steps))


def _shown(key: str) -> str:
    """The name of a table."""
    return key.removeprefix(TABLES)


def _set_row_shards(about: Manifest, counts: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    known = about.fixed.get("model", {}).get("tables", {}), about.free.get("tables", {})
    for key, (before, now) in counts.items():
        for tables in known:
            if _shown(key) in tables:
                tables[_shown(key)]["row_shards"] = now
        yield f"row shards of {_shown(key)}: {before} before, {now} now"


def _recut(state: Mapping[str, Any], row_shards: Mapping[str, int], source: Path) -> dict[str, Any]:
    """The state with other row shards. Rows keep their bits, and so do their optimizer states."""
    found: dict[str, Any] = {}
    parts: dict[tuple[str, str, str], dict[int, Tensor]] = {}
    for key, value in state.items():
        shard = _SHARD.fullmatch(key)
        if shard and shard["table"] in row_shards:
            parts.setdefault((shard["table"], shard["column"], shard["name"]), {})[int(shard["row"])] = value
        else:
            found[key] = value
    for (table, column, name), of_row in parts.items():
        if sorted(of_row) != list(range(len(of_row))):
            raise CheckpointError(f"{source} has not all row shards of {table}")
        whole = torch.cat([of_row.pop(row) for row in range(len(of_row))])
        borders = Table(name=_shown(table), rows=len(whole), dim=1, row_shards=row_shards[table]).row_borders
        for row, (low, high) in enumerate(itertools.pairwise(borders)):
            found[f"{table}/{row}.{column}.{name}"] = whole[low:high]
    return found
