# SPDX-License-Identifier: Apache-2.0
"""Writes `synthetic-stream` as files, for programs that read files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from sennit.command_line import json_text, write_whole
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.stream.attainable import by_day
from sennit.runtime.stream.planted import Planted
from sennit.runtime.stream.synthetic import LABEL, TIME, SyntheticDay, days_of
from sennit.runtime.stream.synthetic_settings import FORMATS, SyntheticStream

SCHEMA: Final = "schema.toml"
ATTAINABLE: Final = "attainable.json"


def write(
    settings: SyntheticStream, folder: Path, format: str, told: Callable[[SyntheticDay], object] = lambda day: None
) -> None:
    """Writes the files of all days in the order of time, each whole or not at all. `told` hears of each.

    `schema.toml` is for `sennit train --schema`, `attainable.json` has what true probabilities reach by day
    (`Attainable`). Row groups and record batches are the blocks of `SyntheticDay`.

    Raises DataError for another format, for files that are there already, and for files that cannot be written.
    """
    if format not in FORMATS:
        raise DataError(f"format {format!r}; allowed: {', '.join(FORMATS)}")
    days = {f"day-{day.day:05d}.{format}": day for day in days_of(settings)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (SCHEMA, *days, ATTAINABLE):
            if (folder / name).exists():
                raise DataError(f"{folder / name} exists already; allowed: a folder without the files of a stream")
        write_whole(folder / SCHEMA, schema_text(settings))
        for name, day in days.items():
            _write_day(folder / name, format, day)
            told(day)
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror or error}; allowed: a folder that can be written") from error
    found = [asdict(one) for one in by_day(Planted(settings))]
    write_whole(folder / ATTAINABLE, json_text({"settings": asdict(settings), "days": found}))


def schema_text(settings: SyntheticStream) -> str:
    """The schema file for `sennit train`."""
    dense = ", ".join(f'"{name}"' for name in settings.dense_names)
    lines = [f'label = "{LABEL}"', f'time = "{TIME}"', f"dense = [{dense}]"]
    for name, rows in zip(settings.table_names, settings.hashed_rows, strict=True):
        lines += [f"[sparse.{name}]", 'encode = "hash"', f"rows = {rows}"]
    return "\n".join(lines) + "\n"


def _write_day(path: Path, format: str, day: SyntheticDay) -> None:
    # What reads a folder that grows looks for `*.parquet`, which does not find a name with a dot at its beginning.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    arrow = require("pyarrow", package="pyarrow", purpose="writing a stream")
    try:
        with _writer(partial, format, day.schema) as write_table:
            for block in range(len(day.block_rows)):
                # One record batch, and so one row group, however many pieces there are.
                pieces = day.read(block, day.schema.names)
                write_table(arrow.Table.from_batches(pieces, schema=day.schema).combine_chunks())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _writer(path: Path, format: str, schema: Any) -> Iterator[Callable[[Any], None]]:
    """Yields what writes a `pyarrow.Table` to the file."""

    def module(name: str) -> Any:
        return require(f"pyarrow.{name}", package="pyarrow", purpose="writing a stream")

    if format == "parquet":
        with module("parquet").ParquetWriter(path, schema) as writer:
            yield writer.write_table
    elif format == "arrow":
        with module("ipc").new_file(path, schema) as writer:
            yield writer.write_table
    else:
        csv = module("csv")
        options = csv.WriteOptions(delimiter="," if format == "csv" else "\t", quoting_style="needed")
        with csv.CSVWriter(path, schema, write_options=options) as writer:
            yield writer.write_table
