# SPDX-License-Identifier: Apache-2.0
"""`sennit tables`: what the embedding tables of a checkpoint hold, by row, for people and for an index of neighbours.

Rows of a dynamic table have the id that they were given to, how often and in which step it last came. Rows of other
tables are numbered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as Lines
from torch import Tensor

from sennit.known_names import few, hint
from sennit.runtime.checkpoint.folder import named
from sennit.runtime.checkpoint.reading import OpenedCheckpoint
from sennit.runtime.data.packages import require
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.kernels.id_directory import counts_of, steps_of
from sennit.runtime.training.trainer import TABLES
from sennit.transport.errors import ConfigError, DeviceError

_SHARD: Final = re.compile(re.escape(TABLES) + r"(?P<table>.+)/(?P<row>\d+)\.(?P<column>\d+)\.weight")
BY: Final = ("count", "age", "norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows of one row shard that are in use."""

    ids: Tensor
    """Int64 [n]: ids, or the numbers of rows in the table. The bits of ids, if they have no sign."""

    weight: Tensor
    """[n, dim] in the table's precision."""

    counts: Tensor | None = None
    """Int64 [n]: how often each id came in training; None: the table is not dynamic."""

    last: Tensor | None = None
    """Int64 [n]: the step of the table in which it last came."""

    has_sign: bool = True
    """Whether ids are numbers with a sign. Those of a column of uint64 have none."""

    @property
    def shown_ids(self) -> Any:
        """The ids as the data have them: NumPy int64 or uint64 [n]."""
        ids = self.ids.numpy()
        return ids if self.has_sign else ids.view(np.uint64)

    @property
    def norms(self) -> Tensor:
        """Float32 [n]: the 2-norm of each row."""
        norms: Tensor = self.weight.float().norm(dim=1)
        return norms


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One table."""

    name: str
    rows: int
    used: int
    """Rows that have ids; all of them, if the table is not dynamic."""

    dim: int
    precision: str
    is_dynamic: bool


class CheckpointTables:
    """The tables of a checkpoint. Holds one row shard in memory at a time."""

    def __init__(self, folder: Path) -> None:
        """`folder`: a checkpoint, or a folder of checkpoints, of which the newest is read. Raises `CheckpointError`."""
        self.source = named(folder)
        self._opened = OpenedCheckpoint(self.source, alone=True)
        known = Preprocessing.read(self.source)
        self._unsigned = {one.name for one in known.encodings if one.id_type == "uint64"} if known is not None else ()
        self._shards: dict[str, dict[int, list[str]]] = {}
        """By table and row shard: the keys of its column shards, in their order."""

        for key in sorted(self._opened.tensors, key=_place):
            if found := _SHARD.fullmatch(key):
                self._shards.setdefault(found["table"], {}).setdefault(int(found["row"]), []).append(key)

    @property
    def names(self) -> list[str]:
        """Tables that have rows of their own. Tensor trains have none."""
        return list(self._shards)

    def rows(self, name: str) -> Iterator[Rows]:
        """The rows of each row shard. Raises `ConfigError` for a table that the checkpoint has not."""
        if name not in self._shards:
            raise ConfigError(
                f"{self.source}: table {name}; allowed: {few(self.names) or 'none'}{hint(name, self.names)}"
            )
        first = 0
        for keys in self._shards[name].values():
            weight = torch.cat([self._opened.tensor(key) for key in keys], 1)
            directory = keys[0].removesuffix("weight") + "ids"
            if directory not in self._opened.tensors:
                yield Rows(ids=torch.arange(first, first + len(weight)), weight=weight)
                first += len(weight)
                continue
            entries = self._opened.tensor(directory)
            last = steps_of(entries)
            used = last > 0
            yield Rows(
                ids=entries[used, 0],
                weight=weight[used],
                counts=counts_of(entries)[used],
                last=last[used],
                has_sign=name not in self._unsigned,
            )

    def summary(self, name: str) -> Summary:
        shards = self._shards[name]
        about = [self._opened.tensors[keys[0]] for keys in shards.values()]
        directories = [keys[0].removesuffix("weight") + "ids" for keys in shards.values()]
        rows = sum(one.size[0] for one in about)
        is_dynamic = directories[0] in self._opened.tensors
        used = sum(int((steps_of(self._opened.tensor(one)) > 0).sum()) for one in directories) if is_dynamic else rows
        return Summary(
            name=name,
            rows=rows,
            used=used,
            dim=sum(self._opened.tensors[key].size[1] for key in shards[0]),
            precision=str(about[0].properties.dtype).removeprefix("torch."),
            is_dynamic=is_dynamic,
        )


def _place(key: str) -> tuple[str, int, int]:
    found = _SHARD.fullmatch(key)
    return (key, 0, 0) if found is None else (found["table"], int(found["row"]), int(found["column"]))


def first_rows(tables: CheckpointTables, name: str, *, by: str, count: int) -> Rows:
    """The `count` rows of a table with the highest count or norm, or the least age. Ties in the order of the file.

    Raises `ConfigError` for counts and ages of a table that is not dynamic.
    """
    best: Rows | None = None
    for rows in tables.rows(name):
        both = rows if best is None else _joined(best, rows)
        key = {"count": both.counts, "age": both.last, "norm": both.norms}[by]
        if key is None:
            raise ConfigError(f"{tables.source}: table {name} by {by}, but its ids are row numbers; allowed: norm")
        chosen = key.to(torch.float64).sort(descending=True, stable=True).indices[:count]
        best = Rows(
            ids=both.ids[chosen],
            weight=both.weight[chosen],
            counts=None if both.counts is None else both.counts[chosen],
            last=None if both.last is None else both.last[chosen],
            has_sign=both.has_sign,
        )
    assert best is not None
    return best


def _joined(one: Rows, other: Rows) -> Rows:
    def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
        return None if first is None or second is None else torch.cat((first, second))

    return Rows(
        ids=torch.cat((one.ids, other.ids)),
        weight=torch.cat((one.weight, other.weight)),
        counts=both(one.counts, other.counts),
        last=both(one.last, other.last),
        has_sign=one.has_sign,
    )


def write_parquet(tables: CheckpointTables, name: str, path: Path) -> int:
    """Writes the rows of a table: `id`, `row` (a fixed-size list of float32), and `count` and `last_step` if the table
    is dynamic. Returns how many. Raises `ConfigError`, and `DeviceError` if the file cannot be written.
    """
    arrow = require("pyarrow", package="pyarrow", purpose="rows as Parquet")
    parquet = require("pyarrow.parquet", package="pyarrow", purpose="rows as Parquet")
    partial, written = path.with_name(f"{path.name}.partial"), 0
    writer = None
    try:
        for rows in tables.rows(name):
            columns: Mapping[str, Any] = {
                "id": arrow.array(rows.shown_ids),
                "row": arrow.FixedSizeListArray.from_arrays(
                    arrow.array(rows.weight.float().flatten().numpy()), rows.weight.shape[1]
                ),
            }
            if rows.counts is not None and rows.last is not None:
                columns = {**columns, "count": rows.counts.numpy(), "last_step": rows.last.numpy()}
            table = arrow.table(columns)
            writer = writer or parquet.ParquetWriter(partial, table.schema)
            writer.write_table(table)
            written += len(table)
        if writer is not None:
            writer.close()
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DeviceError(f"{path} was not written: {error}; choose a file in a folder with room") from error
    return written


def show_tables(tables: CheckpointTables, console: Console) -> None:
    lines = Lines(box=None, pad_edge=False)
    lines.add_column("table")
    for name in ("rows", "in use", "columns"):
        lines.add_column(name, justify="right")
    lines.add_column("precision")
    lines.add_column("ids")
    for name in tables.names:
        one = tables.summary(name)
        kind = "dynamic" if one.is_dynamic else "row numbers"
        lines.add_row(name, f"{one.rows:,}", f"{one.used:,}", str(one.dim), one.precision, kind)
    console.print(lines)


def show_rows(rows: Rows, console: Console) -> None:
    lines = Lines(box=None, pad_edge=False)
    for name in ("id", "count", "last step", "norm"):
        lines.add_column(name, justify="right")
    counts = [""] * len(rows.ids) if rows.counts is None else [f"{one:,}" for one in rows.counts.tolist()]
    last = [""] * len(rows.ids) if rows.last is None else [f"{one:,}" for one in rows.last.tolist()]
    for line in zip(map(str, rows.shown_ids.tolist()), counts, last, (f"{one:.4g}" for one in rows.norms), strict=True):
        lines.add_row(*line)
    console.print(lines)
